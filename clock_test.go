package mongoq_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// skewed is a clock that is wrong, by more or less as time goes on.
type skewed struct {
	by   atomic.Int64
	wall bool // it has no monotonic reading, as one that was made of something else than time.Now
}

func (c *skewed) set(d time.Duration) { c.by.Store(int64(d)) }

func (c *skewed) now() time.Time {
	t := time.Now().Add(time.Duration(c.by.Load()))
	if c.wall {
		t = t.Round(0)
	}
	return t
}

// rightOnTime sees that a push for now is due at once, and one for later not before nor long after.
func rightOnTime(t *testing.T, db *mongo.Database, q *mongoq.Queue) {
	t.Helper()
	id := push(t, q, "now", mongoq.TTL(time.Hour))
	r := tryReserve(t, q) // not later
	require.Equal(t, id, r.ID)
	require.WithinDuration(t, serverTime(t, db), r.Pushed, 2*time.Second)
	require.False(t, r.Pushed.After(r.Reserved))
	require.InDelta(t, time.Hour, r.Deadline.Sub(r.Pushed), float64(time.Second))
	require.NoError(t, r.Commit(t.Context()))

	const delay = 250 * time.Millisecond
	id = push(t, q, "later", mongoq.Delay(delay))
	r = reserve(t, q)
	require.Equal(t, id, r.ID)
	waited := r.Reserved.Sub(r.Pushed)
	require.GreaterOrEqual(t, waited, delay, "early by the server's clock")
	require.Less(t, waited, delay+2*time.Second)
	require.NoError(t, r.Rollback(t.Context(), errors.New("x"), mongoq.After(delay)))
	r = reserve(t, q)
	waited = r.Reserved.Sub(r.Failures[len(r.Failures)-1].At)
	require.GreaterOrEqual(t, waited, delay)
	require.Less(t, waited, delay+2*time.Second)
	require.NoError(t, r.Commit(t.Context()))
}

func TestWrongClockNeitherHidesNorHurries(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]time.Duration{"five minutes ahead": 5 * time.Minute, "five minutes behind": -5 * time.Minute, "right": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				clock := &skewed{}
				clock.set(by)
				q := newQueue(t, openStore(t, db, mongoq.Config{Clock: clock.now}), "q")
				rightOnTime(t, db, q)

				// Nor does it to others, whose clocks are right.
				far := newQueue(t, openStore(t, anotherClient(t, db)), "q")
				push(t, q, "x")
				r := tryReserve(t, far)
				require.NoError(t, r.Release(t.Context(), mongoq.At(time.Now().Add(-time.Minute))))
				require.Equal(t, r.ID, tryReserve(t, q).ID)
				push(t, far, "y")
				rs, err := q.ReserveMany(t.Context(), 5)
				require.NoError(t, err)
				require.Len(t, rs, 1)
				require.WithinDuration(t, serverTime(t, db), rs[0].Reserved, 2*time.Second)
				require.NoError(t, q.CommitMany(t.Context(), rs))
			})
		})
	}
}

func TestClockThatJumpsNeitherHidesNorHurries(t *testing.T) {
	t.Parallel()
	for name, wall := range map[string]bool{"with a monotonic reading": false, "without one": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				clock := &skewed{wall: wall}
				q := newQueue(t, openStore(t, db, mongoq.Config{Clock: clock.now}), "q")
				for _, by := range []time.Duration{0, 5 * time.Minute, -5 * time.Minute} {
					clock.set(by)
					rightOnTime(t, db, q)
				}
			})
		})
	}
}

// A clock may be set at any moment, also between two of the looks at it that a measurement takes.
func TestAClockThatIsSetWhileItIsMeasured(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	for look := range 12 {
		for _, by := range []time.Duration{6 * time.Minute, -2 * time.Minute} {
			var looks atomic.Int64
			q := newQueue(t, openStore(t, db, mongoq.Config{Clock: func() time.Time {
				if looks.Add(1) > int64(look) {
					return time.Now().Add(by)
				}
				return time.Now()
			}}), "q")
			id := push(t, q, "now")
			r := tryReserve(t, q)
			require.Equal(t, id, r.ID)
			require.WithinDuration(t, serverTime(t, db), r.Pushed, 10*time.Second, "set by %v after %d looks", by, look)
			require.NoError(t, r.Commit(t.Context()))
		}
	}
}

// What CommitMany relies on is the lease by the server's clock, not by a wrong one.
func TestWrongClockCommitsExactly(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for _, by := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
			clock := &skewed{}
			clock.set(by)
			q := newQueue(t, openStore(t, db, mongoq.Config{Clock: clock.now}), "q")
			_, err := q.PushMany(t.Context(), []any{1, 2, 3})
			require.NoError(t, err)
			rs, err := q.ReserveMany(t.Context(), 3)
			require.NoError(t, err)
			require.Len(t, rs, 3)
			setDue(t, db, rs[1].ID, 0) // its lease ran out, and somebody else took it
			other := tryReserve(t, newQueue(t, openStore(t, db), "q"))
			require.Equal(t, rs[1].ID, other.ID)
			requireLost(t, q.CommitMany(t.Context(), rs), 3, 1)
			require.Equal(t, "1001", sizes(t, q))
			require.NoError(t, other.Commit(t.Context()))
		}
	})
}
