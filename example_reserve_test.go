package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seed-de459a48/mongoq"
)

func ExampleQueue_Reserve() {
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "one", "two")
	defer done()

	ctx, stop := context.WithCancel(context.Background()) // in a program: signal.NotifyContext
	defer stop()
	// The loop of a consumer. Run as many as you like: goroutines of a process don't compete for the queue's head.
	for {
		r, err := mails.Reserve(ctx) // waits until there is one, or ctx ends
		if err != nil {
			fmt.Println("stopped:", err)
			return
		}
		fmt.Println(textOf(&r.Envelope))
		if textOf(&r.Envelope) == "two" {
			stop() // somebody presses Ctrl-C
		}
		// The outcome of work that is done must not be lost to a shutdown.
		if err := r.Commit(context.WithoutCancel(ctx)); err != nil {
			panic(err)
		}
	}
	// Output:
	// one
	// two
	// stopped: context canceled
}

func ExampleQueue_TryReserve() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	_, err := mails.TryReserve(ctx)
	switch {
	case errors.Is(err, mongoq.ErrEmpty):
		fmt.Println("nothing to do")
	case errors.Is(err, mongoq.ErrQueuePaused):
		fmt.Println("paused")
	case err != nil:
		panic(err)
	}
	// Output:
	// nothing to do
}

func ExampleQueue_ReserveMany() {
	ctx := context.Background()
	rows, done := exampleQueue("rows", mongoq.QueueConfig{}, "a", "b", "c")
	defer done()

	// Waits for the first, and takes with it what is there, up to 100.
	rs, err := rows.ReserveMany(ctx, 100)
	if err != nil {
		panic(err)
	}
	for _, r := range rs {
		fmt.Println(textOf(&r.Envelope))
	}
	// One statement commits them all. Each has its own outcome.
	if err := rows.CommitMany(ctx, rs); err != nil {
		panic(err) // a *mongoq.BatchError
	}
	// Output:
	// a
	// b
	// c
}

func ExampleLeaseFor() {
	ctx := context.Background()
	videos, done := exampleQueue("videos", mongoq.QueueConfig{}, "a long film")
	defer done()

	r, err := videos.Reserve(ctx, mongoq.LeaseFor(time.Hour))
	if err != nil {
		panic(err)
	}
	fmt.Println(r.When.Sub(r.Reserved))
	// Output:
	// 1h0m0s
}

// Pop takes an envelope for good: if the program dies now, nobody gets it again.
func ExampleQueue_Pop() {
	ctx := context.Background()
	hints, done := exampleQueue("hints", mongoq.QueueConfig{}, "warm the cache")
	defer done()

	e, err := hints.Pop(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(e))
	// Output:
	// warm the cache
}

func ExampleQueue_TryPop() {
	ctx := context.Background()
	hints, done := exampleQueue("hints", mongoq.QueueConfig{})
	defer done()

	_, err := hints.TryPop(ctx)
	fmt.Println(errors.Is(err, mongoq.ErrEmpty))
	// Output:
	// true
}
