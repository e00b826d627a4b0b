package mongotest

import "testing"

// Private is a server that only this test uses, whose nodes it may kill and pause. It is
// stopped when the test ends. At most two tests have one at once, others wait; a test
// may have several. Starting takes about 0.3 s, a replica set of three nodes 2 s.
func Private(t testing.TB, opts Options) *Server {
	t.Helper()
	turns.take(t, privateServer)
	if opts.Progress == nil {
		opts.Progress = announce
	}
	s, err := Start(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}
