package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// reserveAll pushes n envelopes and reserves them together.
func reserveAll(t testing.TB, q *mongoq.Queue, n int, opts ...mongoq.ReserveOption) []*mongoq.Reservation {
	t.Helper()
	all := make([]any, n)
	for i := range all {
		all[i] = i
	}
	_, err := q.PushMany(t.Context(), all)
	require.NoError(t, err)
	rs, err := q.ReserveMany(t.Context(), n, opts...)
	require.NoError(t, err)
	require.Len(t, rs, n)
	return rs
}

// requireLost checks that just these failed, with ErrLeaseLost.
func requireLost(t testing.TB, err error, total int, indexes ...int) {
	t.Helper()
	var be *mongoq.BatchError
	require.ErrorAs(t, err, &be)
	require.Equal(t, total, be.Total)
	var failed []int
	for _, f := range be.Failed {
		require.ErrorIs(t, f.Err, mongoq.ErrLeaseLost)
		failed = append(failed, f.Index)
	}
	require.Equal(t, indexes, failed)
	require.ErrorIs(t, err, mongoq.ErrLeaseLost)
}

// eachRetention runs f on a queue without a history, and on one with.
func eachRetention(t *testing.T, f func(t *testing.T, db *mongo.Database, store *mongoq.Store, q *mongoq.Queue, requireDone func(*mongoq.Reservation))) {
	t.Helper()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for name, retention := range map[string]time.Duration{"deleted": 0, "kept": time.Hour} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				q := newQueue(t, store, name, mongoq.QueueConfig{Retention: retention, Lease: time.Minute})
				f(t, db, store, q, func(r *mongoq.Reservation) {
					t.Helper()
					e, err := store.Get(t.Context(), r.ID)
					if retention == 0 {
						require.ErrorIs(t, err, mongoq.ErrNotFound)
						return
					}
					require.NoError(t, err)
					require.False(t, e.Processed.IsZero())
					require.Equal(t, e.Processed.Add(time.Hour), e.ExpireAt)
				})
			})
		}
	})
}

func TestCommitManyCommitsAll(t *testing.T) {
	t.Parallel()
	eachRetention(t, func(t *testing.T, _ *mongo.Database, _ *mongoq.Store, q *mongoq.Queue, requireDone func(*mongoq.Reservation)) {
		rs := reserveAll(t, q, 5)
		push(t, q, "single") // claimed under a token of its own
		rs = append(rs, tryReserve(t, q))
		require.NoError(t, q.CommitMany(t.Context(), rs))
		for _, r := range rs {
			requireDone(r)
			require.ErrorIs(t, r.Commit(t.Context()), mongoq.ErrLeaseLost)
		}
		require.Equal(t, "0000", sizes(t, q))
	})
}

func TestCommitManyTellsOfTheOneThatWasLost(t *testing.T) {
	t.Parallel()
	eachRetention(t, func(t *testing.T, db *mongo.Database, _ *mongoq.Store, q *mongoq.Queue, requireDone func(*mongoq.Reservation)) {
		// One whose lease has lapsed and that is somebody else's now.
		rs := reserveAll(t, q, 2)
		push(t, q, "lapsing")
		rs = append(rs, tryReserve(t, q, mongoq.LeaseFor(brief)))
		rs = append(rs, reserveAll(t, q, 2)...)
		holder := reserve(t, q)
		require.Equal(t, rs[2].ID, holder.ID)
		before := storedBytes(t, db, holder.ID)
		requireLost(t, q.CommitMany(t.Context(), rs), 5, 2)
		for _, i := range []int{0, 1, 3, 4} {
			requireDone(rs[i])
		}
		requireSameDoc(t, before, storedBytes(t, db, holder.ID))
		require.NoError(t, holder.Commit(t.Context()))

		// One that was lost though its lease runs, as in a failover.
		rs = reserveAll(t, q, 5)
		_, err := db.Collection("mongoq").UpdateByID(t.Context(), rs[2].ID, bson.D{{Key: "$set", Value: bson.D{{Key: "lease", Value: bson.NewObjectID()}}}})
		require.NoError(t, err)
		before = storedBytes(t, db, rs[2].ID)
		requireLost(t, q.CommitMany(t.Context(), rs), 5, 2)
		for _, i := range []int{0, 1, 3, 4} {
			requireDone(rs[i])
		}
		requireSameDoc(t, before, storedBytes(t, db, rs[2].ID))
		requireLost(t, q.CommitMany(t.Context(), rs), 5, 0, 1, 2, 3, 4)
	})
}

func TestCommitManyCommitsEachOnce(t *testing.T) {
	t.Parallel()
	eachRetention(t, func(t *testing.T, _ *mongo.Database, _ *mongoq.Store, q *mongoq.Queue, requireDone func(*mongoq.Reservation)) {
		rs := reserveAll(t, q, 4)
		require.NoError(t, rs[1].Commit(t.Context()))
		require.NoError(t, rs[2].Release(t.Context(), mongoq.Delay(time.Hour)))
		requireLost(t, q.CommitMany(t.Context(), []*mongoq.Reservation{rs[0], rs[1], rs[0], rs[2], rs[3], rs[3]}), 6, 1, 2, 3, 5)
		for _, i := range []int{0, 1, 3} {
			requireDone(rs[i])
		}
		require.Equal(t, "1010", sizes(t, q))
	})
}

func TestCommitManyNeedsReservations(t *testing.T) {
	t.Parallel()
	eachRetention(t, func(t *testing.T, _ *mongo.Database, _ *mongoq.Store, q *mongoq.Queue, _ func(*mongoq.Reservation)) {
		require.ErrorIs(t, q.CommitMany(t.Context(), nil), mongoq.ErrInvalidOption)
		rs := reserveAll(t, q, 2)
		require.ErrorIs(t, q.CommitMany(t.Context(), []*mongoq.Reservation{rs[0], nil, rs[1]}), mongoq.ErrInvalidOption)
		require.Equal(t, "2002", sizes(t, q), "nothing is committed")
		require.NoError(t, q.CommitMany(t.Context(), rs))
	})
}

func TestCommitManyOfAnEndedContextCommitsNothing(t *testing.T) {
	t.Parallel()
	eachRetention(t, func(t *testing.T, _ *mongo.Database, _ *mongoq.Store, q *mongoq.Queue, _ func(*mongoq.Reservation)) {
		rs := reserveAll(t, q, 3)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := q.CommitMany(ctx, rs)
		var be *mongoq.BatchError
		require.ErrorAs(t, err, &be)
		require.Len(t, be.Failed, 3)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, "3003", sizes(t, q))
		require.NoError(t, q.CommitMany(t.Context(), rs), "they are not settled")
	})
}

// What is gone after a batch was its own only while nobody else can have taken it: a delete under a lease that is about
// to end goes singly.
func TestCommitManyBatchesWhatItMay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, w := watched(t, db)
		tests := []struct {
			name      string
			retention time.Duration
			lease     time.Duration
			sent      map[string]int
		}{
			{"deleted", 0, time.Minute, map[string]int{"delete": 1}},
			{"deleted, the lease is short and extended", 0, 5 * time.Second, map[string]int{"update": 1, "delete": 1}},
			{"kept", time.Hour, time.Minute, map[string]int{"update": 1}},
			{"kept, the lease is short", time.Hour, 5 * time.Second, map[string]int{"update": 1}},
		}
		// What is left of a lease is told by the server's clock, whatever this machine's shows.
		for _, by := range []time.Duration{0, 5 * time.Minute, -5 * time.Minute} {
			clock := &skewed{}
			clock.set(by)
			store := openStore(t, own, mongoq.Config{Clock: clock.now})
			for _, test := range tests {
				msg := fmt.Sprintf("%s, a clock off by %v", test.name, by)
				q := newQueue(t, store, test.name, mongoq.QueueConfig{Retention: test.retention})
				rs := reserveAll(t, q, 6, mongoq.LeaseFor(test.lease))
				w.take()
				require.NoError(t, q.CommitMany(t.Context(), rs), msg)
				sent := map[string]int{}
				for _, c := range w.take("delete", "update", "findAndModify", "bulkWrite") {
					sent[c.name]++
				}
				require.Equal(t, test.sent, sent, msg)
				require.Equal(t, "0000", sizes(t, q), msg)
			}
		}
	})
}

func TestCommitManyTakesReservationsOfOtherQueues(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		gone := newQueue(t, store, "gone")
		kept := newQueue(t, store, "kept", mongoq.QueueConfig{Retention: time.Hour})
		a, b := reserveAll(t, gone, 2), reserveAll(t, kept, 2)
		require.NoError(t, gone.CommitMany(t.Context(), append(a, b...)))
		for _, r := range a {
			requireGone(t, store, r.ID)
		}
		for _, r := range b {
			e, err := store.Get(t.Context(), r.ID)
			require.NoError(t, err)
			require.False(t, e.Processed.IsZero(), "each ends as its own queue says")
		}
	})
}

func TestCommitManyJoinsATransaction(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	for name, retention := range map[string]time.Duration{"deleted": 0, "kept": time.Hour} {
		q := newQueue(t, store, name, mongoq.QueueConfig{Retention: retention})
		rs := reserveAll(t, q, 3)
		session, err := db.Client().StartSession()
		require.NoError(t, err)
		abort := errors.New("abort")
		_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) {
			return nil, errors.Join(q.CommitMany(ctx, rs), abort)
		})
		require.ErrorIs(t, err, abort)
		require.Equal(t, "3003", sizes(t, q))
		_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) { return nil, q.CommitMany(ctx, rs) })
		session.EndSession(t.Context())
		require.NoError(t, err)
		require.Equal(t, "0000", sizes(t, q))
		requireLost(t, q.CommitMany(t.Context(), rs), 3, 0, 1, 2)
	}
}

// One consumer has two claims of one envelope, since the server's clock jumped, or a failover undid the first: only its holder
// has committed it.
func TestCommitManyOfTwoClaimsOfOneEnvelope(t *testing.T) {
	t.Parallel()
	for _, undone := range []bool{false, true} {
		mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
			q := newQueue(t, openStore(t, db), "q")
			push(t, q, 1)
			stored := db.Collection("mongoq").FindOne(t.Context(), bson.D{})
			before, err := stored.Raw()
			require.NoError(t, err)
			stale := tryReserve(t, q)
			if undone {
				_, err := db.Collection("mongoq").ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: stale.ID}}, before)
				require.NoError(t, err)
			} else {
				setDue(t, db, stale.ID, 0)
			}
			fresh := tryReserve(t, q)
			require.Equal(t, stale.ID, fresh.ID)
			require.Equal(t, undone, stale.Deliveries == fresh.Deliveries)
			push(t, q, 2)
			other := tryReserve(t, q)
			requireLost(t, q.CommitMany(t.Context(), []*mongoq.Reservation{other, stale, fresh}), 3, 1)
			require.Equal(t, "0000", sizes(t, q))
		})
	}
}

// Commits under a short lease go together like others, while a third of it is left.
func TestCommitsUnderAShortLeaseGoTogether(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, wire := watched(t, db)
		q := newQueue(t, openStore(t, own), "q", mongoq.QueueConfig{Lease: 5 * time.Second})
		commands := 0
		for range 5 { // a machine that is busy for three seconds does not tell
			rs := reserveAll(t, q, 30)
			wire.take()
			require.NoError(t, q.CommitMany(t.Context(), rs))
			require.Equal(t, "0000", sizes(t, q))
			if commands = len(wire.take("delete")); commands == 1 {
				break
			}
		}
		require.Equal(t, 1, commands)
	})
}

// Commits whose leases are about to end have them extended, and go together all the same: when a server has stood still
// that is all of them. One that somebody else has taken is told so.
func TestCommitsNearTheEndOfTheirLeasesGoTogether(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, wire := watched(t, db)
		q := newQueue(t, openStore(t, own), "q", mongoq.QueueConfig{Lease: time.Minute})
		for _, stolen := range []bool{false, true} {
			want, got := map[string]int{"update": 1, "delete": 1}, map[string]int{}
			if stolen {
				want["delete"]++ // for that which is another's
			}
			for range 3 { // a machine that is busy for five seconds does not tell
				rs := reserveAll(t, q, 30)
				for _, r := range rs {
					require.NoError(t, r.Extend(t.Context(), 5*time.Second)) // to less than the margin
				}
				if stolen {
					steal(t, db, rs[7].ID)
				}
				wire.take()
				err := q.CommitMany(t.Context(), rs)
				got = map[string]int{}
				for _, c := range wire.take("update", "delete") {
					got[c.name]++
				}
				if stolen {
					requireLost(t, err, 30, 7)
					require.NotNil(t, storedNow(t, db, rs[7].ID))
				} else {
					require.NoError(t, err)
				}
				if maps.Equal(want, got) {
					break
				}
			}
			require.Equal(t, want, got)
		}
	})
}
