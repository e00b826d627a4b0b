// Package model tests the queue as a whole against what it promises: random programs of all verbs against a model in
// memory, and concurrent runs whose recorded history must have a linear order. It is a module of its own, since the
// libraries that it tests with are none of the queue's.
//
//	go test ./...                                         # the quick runs
//	go test -run TestPrograms . -rapid.checks 2000        # more programs
//	go test -run TestPrograms . -rapid.seed 4711          # those of a seed, which a failure prints
//	go test -run TestHistories . -histories 200           # more histories
package model
