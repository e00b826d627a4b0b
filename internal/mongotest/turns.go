package mongotest

import (
	"strings"
	"sync"
	"testing"
)

// A resource is something that only so many tests may have at once.
type resource int

const (
	faultyReplicaSet resource = iota // the server whose commands fail
	faultyStandalone
	privateServer // servers of one's own, which cost memory and CPU
	resources
)

// A turnstile gives resources to tests in turn.
//
// Parallel tests that take several at once don't lock each other out: what a test or one
// of its parents has, it may take again; who has a faulty server need not wait for a
// private one; and of the two faulty servers the replica set must be taken first.
type turnstile struct {
	limit [resources]int

	mu    sync.Mutex
	moved *sync.Cond
	used  [resources]int
	held  map[string]*[resources]int // by test name: how often it took each
}

func newTurnstile(limit [resources]int) *turnstile {
	s := &turnstile{limit: limit, held: make(map[string]*[resources]int)}
	s.moved = sync.NewCond(&s.mu)
	return s
}

var turns = newTurnstile([resources]int{faultyReplicaSet: 1, faultyStandalone: 1, privateServer: 2})

// take waits for the test's turn and gives the resource back when the test has ended.
func (s *turnstile) take(t testing.TB, r resource) {
	t.Helper()
	name := t.Name()
	if !s.enter(name, r) {
		t.Fatalf("take the faulty replica set before the faulty standalone server: the other order can deadlock")
	}
	t.Cleanup(func() { s.leave(name, r) })
}

func (s *turnstile) enter(name string, r resource) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	has := s.has(name, r)
	switch r {
	case privateServer:
		has = has || s.has(name, faultyReplicaSet) || s.has(name, faultyStandalone)
	case faultyReplicaSet:
		if !has && s.has(name, faultyStandalone) {
			return false
		}
	}
	for !has && s.used[r] >= s.limit[r] {
		s.moved.Wait()
	}
	s.used[r]++
	if s.held[name] == nil {
		s.held[name] = new([resources]int)
	}
	s.held[name][r]++
	return true
}

func (s *turnstile) leave(name string, r resource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used[r]--
	s.held[name][r]--
	if *s.held[name] == ([resources]int{}) {
		delete(s.held, name)
	}
	s.moved.Broadcast()
}

// has reports whether the test or one of its parents has r.
func (s *turnstile) has(name string, r resource) bool {
	for {
		if h := s.held[name]; h != nil && h[r] > 0 {
			return true
		}
		i := strings.LastIndexByte(name, '/')
		if i < 0 {
			return false
		}
		name = name[:i]
	}
}
