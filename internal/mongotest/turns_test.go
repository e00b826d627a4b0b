package mongotest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// entered starts to enter and returns a channel that is closed once that has happened.
func entered(s *turnstile, name string, r resource) <-chan struct{} {
	in := make(chan struct{})
	go func() {
		s.enter(name, r)
		close(in)
	}()
	return in
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestTurnstile(t *testing.T) {
	t.Parallel()
	s := newTurnstile([resources]int{faultyReplicaSet: 1, faultyStandalone: 1, privateServer: 2})
	require.True(t, s.enter("A", faultyReplicaSet))
	require.True(t, s.enter("A", faultyReplicaSet), "again by the same test")
	require.True(t, s.enter("A/sub", faultyReplicaSet), "by a subtest of it")
	b := entered(s, "AB", faultyReplicaSet) // no subtest of A
	s.leave("A", faultyReplicaSet)
	s.leave("A", faultyReplicaSet)
	require.False(t, isClosed(b), "A/sub still has it")
	s.leave("A/sub", faultyReplicaSet)
	<-b
	s.leave("AB", faultyReplicaSet)
	require.Empty(t, s.held)
	require.Zero(t, s.used)
}

func TestTurnstilePrivateServers(t *testing.T) {
	t.Parallel()
	s := newTurnstile([resources]int{faultyReplicaSet: 1, faultyStandalone: 1, privateServer: 2})
	require.True(t, s.enter("A", privateServer))
	require.True(t, s.enter("B", privateServer))
	require.True(t, s.enter("B", privateServer), "a second one for B")
	require.True(t, s.enter("C", faultyReplicaSet))
	require.True(t, s.enter("C", privateServer), "or A waiting for the faulty one would never end")
	d := entered(s, "D", privateServer)
	for _, name := range []string{"C", "B", "B"} {
		require.False(t, isClosed(d))
		s.leave(name, privateServer)
	}
	<-d
}

func TestTurnstileOrder(t *testing.T) {
	t.Parallel()
	s := newTurnstile([resources]int{faultyReplicaSet: 1, faultyStandalone: 1, privateServer: 2})
	require.True(t, s.enter("A", faultyStandalone))
	require.False(t, s.enter("A/sub", faultyReplicaSet))
	require.True(t, s.enter("B", faultyReplicaSet))
}
