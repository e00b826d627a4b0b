package mongoq_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// steps is a policy that says these, then stops.
type steps struct {
	waits []time.Duration
	next  int
}

func (s *steps) Reset() { s.next = 0 }

func (s *steps) NextBackOff() time.Duration {
	if s.next == len(s.waits) {
		return backoff.Stop
	}
	s.next++
	return s.waits[s.next-1]
}

// failures rolls the one envelope of a queue back n times, each delivery brought forward, and tells how long each
// failure made it wait, by the server's clock.
func failures(t *testing.T, db *mongo.Database, q *mongoq.Queue, n int, opts ...mongoq.RollbackOption) (waits []time.Duration) {
	t.Helper()
	for i := range n {
		r := tryReserve(t, q)
		require.Equal(t, i, r.Retries, "zero-based: the first delivery shows 0")
		require.Equal(t, i+1, r.Deliveries)
		require.NoError(t, r.Rollback(t.Context(), fmt.Errorf("failure %d", i+1), opts...))
		e, err := q.Get(t.Context(), r.ID)
		require.NoError(t, err)
		last := e.Failures[len(e.Failures)-1]
		require.Equal(t, fmt.Sprintf("failure %d", i+1), last.Msg)
		require.Equal(t, i+1, last.Retries)
		require.True(t, e.Reserved.IsZero())
		waits = append(waits, e.When.Sub(last.At))
		setDue(t, db, r.ID, 0)
	}
	return waits
}

func TestFailureWaitsWhatThePolicySays(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for name, c := range map[string]struct {
			policy func() backoff.BackOff
			want   []time.Duration // then a dead letter
			opts   []mongoq.RollbackOption
		}{
			"its own": {
				policy: func() backoff.BackOff {
					return &steps{waits: []time.Duration{time.Hour, 0, 1500 * time.Millisecond, 24 * time.Hour, time.Millisecond}}
				},
				want: []time.Duration{time.Hour, 0, 1500 * time.Millisecond, 24 * time.Hour, time.Millisecond},
			},
			"half used when it is made": {
				policy: func() backoff.BackOff {
					s := &steps{waits: []time.Duration{time.Hour, time.Minute}}
					s.NextBackOff()
					return s
				},
				want: []time.Duration{time.Hour, time.Minute},
			},
			"part of a millisecond": {
				policy: func() backoff.BackOff { return &steps{waits: []time.Duration{1001 * time.Microsecond}} },
				want:   []time.Duration{2 * time.Millisecond},
			},
			"constant": {
				policy: func() backoff.BackOff {
					return backoff.WithMaxRetries(backoff.NewConstantBackOff(90*time.Second), 3)
				},
				want: []time.Duration{90 * time.Second, 90 * time.Second, 90 * time.Second},
			},
			"exponential": {
				policy: func() backoff.BackOff {
					return backoff.WithMaxRetries(backoff.NewExponentialBackOff(
						backoff.WithInitialInterval(time.Second), backoff.WithMultiplier(3),
						backoff.WithRandomizationFactor(0), backoff.WithMaxInterval(20*time.Second)), 5)
				},
				want: []time.Duration{time.Second, 3 * time.Second, 9 * time.Second, 20 * time.Second, 20 * time.Second},
			},
			"no retries": {
				policy: func() backoff.BackOff { return backoff.WithMaxRetries(backoff.NewConstantBackOff(time.Second), 0) },
			},
			"stop": {policy: func() backoff.BackOff { return &backoff.StopBackOff{} }},
			"the call's wait": {
				policy: func() backoff.BackOff { return &steps{waits: []time.Duration{time.Hour, time.Hour}} },
				want:   []time.Duration{42 * time.Second, 42 * time.Second},
				opts:   []mongoq.RollbackOption{mongoq.After(42 * time.Second)},
			},
		} {
			q := newQueue(t, store, name, mongoq.QueueConfig{Retry: c.policy})
			id := push(t, q, name)
			require.Equal(t, c.want, failures(t, db, q, len(c.want), c.opts...), name)
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errors.New("the last"), c.opts...))

			r := tryReserve(t, newQueue(t, store, name+".dead"))
			require.Equal(t, id, r.ID, name)
			require.Equal(t, len(c.want), r.Retries, "%s: a dead letter keeps its retries", name)
			require.Equal(t, mongoq.DeadRetries, r.Dead.Kind)
			require.Equal(t, name, r.Dead.From)
			require.Equal(t, "the last", r.Dead.Msg)
			require.Len(t, r.Failures, len(c.want)+1)
			require.Equal(t, len(c.want)+1, r.Failures[len(c.want)].Retries)
			require.NoError(t, r.Commit(t.Context()))
		}
	})
}

func TestFourthFailureOfThreeRetriesIsADeadLetter(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{
			Retry: func() backoff.BackOff { return backoff.WithMaxRetries(&backoff.ZeroBackOff{}, 3) },
		})
		id := push(t, q, "x")
		for range 4 {
			require.Equal(t, "1100", sizes(t, q))
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errors.New("no")))
		}
		require.Equal(t, "0000", sizes(t, q))
		e, err := newQueue(t, store, "q.dead").Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 3, e.Retries)
		require.Equal(t, 4, e.Deliveries)
		require.Equal(t, 1, e.Moves)
		require.Equal(t, mongoq.DeadRetries, e.Dead.Kind)
		require.Equal(t, "no", e.Dead.Msg)
	})
}

func TestDefaultPolicyRetriesForANight(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		push(t, q, "x")
		mean, all := time.Second, time.Duration(0)
		for i, wait := range failures(t, db, q, 25) {
			require.InDelta(t, mean, wait, float64(mean)/4+float64(2*time.Millisecond), "after failure %d", i+1)
			all += mean
			mean = min(2*mean, time.Hour)
		}
		require.InDelta(t, 14*time.Hour, all, float64(30*time.Minute))
		require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errors.New("the last")))
		r := tryReserve(t, newQueue(t, store, "q.dead"))
		require.Equal(t, 25, r.Retries)
		require.Equal(t, mongoq.DeadRetries, r.Dead.Kind)
	})
}

// The default's waits have jitter: what failed together does not come back together.
func TestDefaultPolicyHasJitter(t *testing.T) {
	t.Parallel()
	waits := map[time.Duration]bool{}
	for range 20 {
		waits[mongoq.DefaultRetry().NextBackOff()] = true
	}
	require.Greater(t, len(waits), 10)
}

func TestPermanentFailureIsADeadLetterAtOnce(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		cause := errors.New("broken for good")
		for _, c := range []struct {
			cause error
			msg   string
		}{
			{backoff.Permanent(cause), "broken for good"},
			{fmt.Errorf("wrapped: %w", backoff.Permanent(cause)), "wrapped: broken for good"},
			{errors.Join(errors.New("other"), backoff.Permanent(cause)), "other\nbroken for good"},
		} {
			push(t, q, "x")
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), c.cause, mongoq.After(time.Hour)))
			r := tryReserve(t, newQueue(t, store, "q.dead"))
			require.Equal(t, mongoq.DeadPermanent, r.Dead.Kind)
			require.Equal(t, c.msg, r.Dead.Msg)
			require.Zero(t, r.Retries)
			require.NoError(t, r.Commit(t.Context()))
		}
	})
}

func TestWithoutADeadLetterQueueItIsRetriedForEver(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{
			DeadLetter: mongoq.NoDeadLetter,
			Retry:      func() backoff.BackOff { return &steps{waits: []time.Duration{time.Minute, time.Hour, time.Second}} },
		})
		push(t, q, "x")
		want := []time.Duration{time.Minute, time.Hour, time.Second, time.Hour, time.Hour, time.Hour}
		require.Equal(t, want, failures(t, db, q, len(want)), "the policy's longest, where it stops")
		r := tryReserve(t, q)
		require.ErrorIs(t, r.DeadLetter(t.Context(), errors.New("x")), mongoq.ErrInvalidOption)
		require.NoError(t, r.Rollback(t.Context(), backoff.Permanent(errors.New("x"))), "it was not settled by that")
		require.Equal(t, "1010", sizes(t, q))
		_, err := q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}

func TestDeadLetterNeverDiesAgain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		policy := func() backoff.BackOff { return &steps{waits: []time.Duration{time.Minute, time.Hour}} }
		q := newQueue(t, store, "q")
		dead := newQueue(t, store, "q.dead", mongoq.QueueConfig{Retry: policy})
		id := push(t, q, "x")
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("first")))
		for i, c := range []struct {
			settle func(*mongoq.Reservation) error
			want   time.Duration
		}{
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errors.New("x")) }, time.Minute},
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errors.New("x")) }, time.Hour},
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errors.New("x")) }, time.Hour},
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), backoff.Permanent(errors.New("x"))) }, time.Hour},
			{func(r *mongoq.Reservation) error { return r.DeadLetter(t.Context(), errors.New("x")) }, time.Hour},
		} {
			require.NoError(t, c.settle(tryReserve(t, dead)), "at %d", i)
			e, err := dead.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, c.want, e.When.Sub(e.Failures[len(e.Failures)-1].At), "at %d", i)
			require.Equal(t, "first", e.Dead.Msg)
			require.Equal(t, "q", e.Dead.From)
			require.Equal(t, 1, e.Moves)
			setDue(t, db, id, 0)
		}
		var none bson.M
		require.ErrorIs(t, db.Collection("mongoq").FindOne(t.Context(), bson.D{{Key: "q", Value: "q.dead.dead"}}).Decode(&none), mongo.ErrNoDocuments)
	})
}

// A move starts the policy over; a release leaves it where it is.
func TestMoveStartsThePolicyOver(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{
			Retry: func() backoff.BackOff { return &steps{waits: []time.Duration{time.Minute, time.Hour}} },
		})
		id := push(t, q, "x")
		require.Equal(t, []time.Duration{time.Minute}, failures(t, db, q, 1))
		r := tryReserve(t, q)
		require.NoError(t, r.Release(t.Context()))
		require.Equal(t, 1, tryReserve(t, q).Retries)
		setDue(t, db, id, 0)
		r = tryReserve(t, q) // its consumer was lost: that counts
		require.Equal(t, 2, r.Retries)
		require.True(t, r.Failures[1].Lost)
		require.NoError(t, r.MoveToQ(t.Context(), "q"))
		r = tryReserve(t, q)
		require.Zero(t, r.Retries)
		require.NoError(t, r.Rollback(t.Context(), errors.New("x")))
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, time.Minute, e.When.Sub(e.Failures[2].At))
	})
}
