package mongoq_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// waits is a policy that says these, then stops.
type waits struct {
	all  []time.Duration
	next int
}

func (w *waits) Reset() { w.next = 0 }

func (w *waits) NextBackOff() time.Duration {
	if w.next == len(w.all) {
		return backoff.Stop
	}
	w.next++
	return w.all[w.next-1]
}

func policy(all ...time.Duration) func() backoff.BackOff {
	return func() backoff.BackOff { return &waits{all: all} }
}

// deadLetters lists the dead letters of a queue.
func deadLetters(t testing.TB, q *mongoq.Queue) []*mongoq.Envelope {
	t.Helper()
	var all []*mongoq.Envelope
	for e, err := range q.DeadLetters().List(t.Context()) {
		require.NoError(t, err)
		all = append(all, e)
	}
	return all
}

func TestADeadLetterKeepsWhatItWasAndSaysWhy(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		tests := []struct {
			kind  mongoq.DeadKind
			fails int // before it dies
			die   func(*mongoq.Reservation) error
		}{
			{mongoq.DeadRetries, 2, func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errFailed) }},
			{mongoq.DeadRetries, 2, func(r *mongoq.Reservation) error {
				return r.Rollback(t.Context(), errFailed, mongoq.After(time.Hour))
			}},
			{mongoq.DeadPermanent, 0, func(r *mongoq.Reservation) error {
				return r.Rollback(t.Context(), fmt.Errorf("wrapped: %w", backoff.Permanent(errFailed)))
			}},
			{mongoq.DeadExplicit, 1, func(r *mongoq.Reservation) error { return r.DeadLetter(t.Context(), errFailed) }},
		}
		for i, test := range tests {
			name := fmt.Sprint(test.kind, i)
			q := newQueue(t, store, name, mongoq.QueueConfig{Retry: retries(2)})
			id := push(t, q, bson.D{{Key: "$a", Value: "$b"}}, mongoq.Headers(map[string]string{"k": "$v"}), mongoq.Priority(4), mongoq.TTL(time.Hour))
			pushed := rawDoc(t, db, id)
			for range test.fails {
				require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed))
			}
			require.Empty(t, deadLetters(t, q), name)
			r := tryReserve(t, q)
			require.NoError(t, test.die(r), name)

			dead := deadLetters(t, q)
			require.Len(t, dead, 1, name)
			e := dead[0]
			require.Equal(t, id, e.ID, name)
			require.Equal(t, name+".dead", e.Q)
			require.Equal(t, test.kind, e.Dead.Kind)
			require.Equal(t, name, e.Dead.From)
			require.Contains(t, e.Dead.Msg, errFailed.Error())
			require.False(t, e.Dead.At.Before(r.Reserved))
			require.Equal(t, []int{test.fails, test.fails + 1, 1}, []int{e.Retries, e.Deliveries, e.Moves}, name)
			require.Len(t, e.Failures, test.fails+1, name)
			require.Contains(t, e.Failures[test.fails].Msg, errFailed.Error())
			require.Equal(t, test.fails+1, e.Failures[test.fails].Retries)
			require.Equal(t, []mongoq.Hop{{From: name, At: e.Dead.At}}, e.Hops)
			require.Zero(t, e.Reserved)
			require.Zero(t, e.ExpireAt)

			doc := rawDoc(t, db, id)
			for _, same := range []string{"payload", "headers", "prio", "pushed", "deadline"} {
				require.Equal(t, pushed[same], doc[same], "%s: %s", name, same)
			}
			stats, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, stats.Dead)
			require.Zero(t, stats.Total)
		}
	})
}

func TestADeadLetterTakesThePatchOfItsRollback(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		push(t, q, "x", mongoq.Headers(map[string]string{"a": "1"}))
		require.NoError(t, tryReserve(t, q).Rollback(t.Context(), backoff.Permanent(errFailed),
			mongoq.Payload("y"), mongoq.AddHeaders(map[string]string{"b": "2"})))
		e := deadLetters(t, q)[0]
		require.Equal(t, "y", payloadOf[string](t, e))
		require.Equal(t, map[string]string{"a": "1", "b": "2"}, e.Headers)
	})
}

func TestWithoutADeadLetterQueueNothingDies(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{
			DeadLetter: mongoq.NoDeadLetter, Retry: policy(0, time.Hour, time.Minute),
		})
		id := push(t, q, "x")
		requireWait := func(want time.Duration) {
			t.Helper()
			e, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, want, e.When.Sub(e.Failures[len(e.Failures)-1].At))
			setDue(t, db, id, 0)
		}
		for _, want := range []time.Duration{0, time.Hour, time.Minute, time.Hour, time.Hour} {
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed))
			requireWait(want)
		}
		require.NoError(t, tryReserve(t, q).Rollback(t.Context(), backoff.Permanent(errFailed)))
		requireWait(time.Hour)
		r := tryReserve(t, q)
		require.Equal(t, 6, r.Retries)
		require.ErrorIs(t, r.DeadLetter(t.Context(), errFailed), mongoq.ErrInvalidOption)
		require.NoError(t, r.Release(t.Context()), "a refused verb settles nothing")
		for range 3 { // nor does the loss of its consumers end it
			lost := tryReserve(t, q, mongoq.LeaseFor(time.Millisecond))
			require.Equal(t, id, lost.ID)
			require.Eventually(t, func() bool { return sizes(t, q) == "1100" }, soon, 2*time.Millisecond)
		}
		require.Equal(t, 9, tryReserve(t, q).Retries)
		require.Empty(t, deadLetters(t, q))
	})
}

// A dead letter that fails stays where it is: it neither loops nor dies again.
func TestADeadLetterNeverDiesAgain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		dlq := newQueue(t, store, "q.dead", mongoq.QueueConfig{Retry: policy(0, time.Hour, time.Minute)})
		id := push(t, q, "x")
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
		was := deadLetters(t, q)[0]

		for i, test := range []struct {
			fail func(*mongoq.Reservation) error
			want time.Duration
		}{
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errFailed) }, 0},
			{func(r *mongoq.Reservation) error { return r.DeadLetter(t.Context(), errFailed) }, time.Hour},
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), backoff.Permanent(errFailed)) }, time.Hour},
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errFailed) }, time.Hour},
			{func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errFailed) }, time.Hour},
		} {
			r := tryReserve(t, dlq)
			require.Equal(t, id, r.ID)
			require.NotNil(t, r.Dead)
			require.Equal(t, i, r.Retries)
			require.NoError(t, test.fail(r))
			e, err := dlq.Get(t.Context(), id)
			require.NoError(t, err, "it stays in its queue")
			require.Equal(t, was.Dead, e.Dead)
			require.Equal(t, was.Moves, e.Moves)
			require.Equal(t, test.want, e.When.Sub(e.Failures[len(e.Failures)-1].At), "failure %d", i)
			setDue(t, db, id, 0)
		}
		for range 3 {
			tryReserve(t, dlq, mongoq.LeaseFor(time.Millisecond))
			require.Eventually(t, func() bool { return sizes(t, dlq) == "1100" }, soon, 2*time.Millisecond)
		}
		require.Equal(t, 8, tryReserve(t, dlq).Retries)
		require.Empty(t, deadLetters(t, dlq))
		require.Equal(t, "0000", sizes(t, newQueue(t, store, "q.dead.dead")))
	})
}

func TestADeadLetterCanBeHandledLikeAnyOther(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		dlq := newQueue(t, store, "q.dead")
		for _, x := range []string{"committed", "moved"} {
			push(t, q, x)
			require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
		}
		require.NoError(t, tryReserve(t, dlq).Commit(t.Context()))
		require.NoError(t, tryReserve(t, dlq).MoveToQ(t.Context(), "q"))
		require.Empty(t, deadLetters(t, q))
		r := tryReserve(t, q)
		require.Equal(t, "moved", payloadOf[string](t, &r.Envelope))
		require.Nil(t, r.Dead)
		require.NoError(t, r.DeadLetter(t.Context(), errFailed), "it lives anew")
		require.Len(t, deadLetters(t, q), 1)
	})
}

func TestRedrivePutsDeadLettersBack(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: retries(1)})
		dlq := newQueue(t, store, "q.dead")
		var ids []bson.ObjectID
		for i := range 5 {
			id := push(t, q, i, mongoq.TTL(time.Hour), mongoq.Headers(map[string]string{"k": "v"}))
			ids = append(ids, id)
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed))
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed))
		}
		require.Len(t, deadLetters(t, q), 5)

		// Chosen ones.
		n, err := q.DeadLetters().Redrive(t.Context(), mongoq.IDs(ids[1], bson.NewObjectID()), mongoq.IDs(ids[3]))
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		require.Equal(t, "2200", sizes(t, q))
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.IDs(ids[1], ids[3]))
		require.NoError(t, err)
		require.Zero(t, n, "they are no dead letters any more")
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.IDs())
		require.NoError(t, err)
		require.Zero(t, n)

		for _, want := range []int{1, 3} {
			e, err := q.Get(t.Context(), ids[want])
			require.NoError(t, err)
			require.Equal(t, []int{0, 2, 2}, []int{e.Retries, e.Deliveries, e.Moves})
			require.Nil(t, e.Dead)
			require.Zero(t, e.Deadline)
			require.Zero(t, e.ExpireAt)
			require.Equal(t, map[string]string{"k": "v"}, e.Headers)
			require.Equal(t, "q.dead", e.Hops[1].From)
			require.Len(t, e.Failures, 2)
			doc := rawDoc(t, db, e.ID)
			for _, gone := range []string{"dead", "reserved", "lease", "deadline", "expireAt"} {
				require.NotContains(t, doc, gone)
			}
		}
		again := []*mongoq.Reservation{tryReserve(t, q), tryReserve(t, q)}
		require.ElementsMatch(t, []int{1, 3}, payloads[int](t, again))
		for _, r := range again {
			require.NoError(t, r.Rollback(t.Context(), errFailed), "it may fail as often as a new one")
		}
		require.Equal(t, "2200", sizes(t, q))
		for range again {
			require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		}

		// One that somebody holds stays, until the lease ends.
		held := tryReserve(t, dlq, mongoq.LeaseFor(time.Hour))
		lapsed := tryReserve(t, dlq, mongoq.LeaseFor(time.Millisecond))
		require.Eventually(t, func() bool { return sizes(t, dlq) == "3201" }, soon, 2*time.Millisecond)
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.IDs(held.ID))
		require.NoError(t, err)
		require.Zero(t, n)
		n, err = q.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		require.ErrorIs(t, lapsed.Commit(t.Context()), mongoq.ErrLeaseLost)
		require.Equal(t, []*mongoq.Envelope{{ID: held.ID}}, idsOnly(deadLetters(t, q)))
		require.NoError(t, held.Commit(t.Context()))
		require.Equal(t, "2200", sizes(t, q))
	})
}

func idsOnly(es []*mongoq.Envelope) []*mongoq.Envelope {
	var all []*mongoq.Envelope
	for _, e := range es {
		all = append(all, &mongoq.Envelope{ID: e.ID})
	}
	return all
}

// A redrive is of what was dead when it began: consumers that fail at once must not keep it busy for ever.
func TestRedrivePutsEachBackOnce(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 1500
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: 5 * time.Millisecond})
		at := time.Now().Add(-time.Hour)
		insertRaw(t, db, rawDocs(t, n, func(i int) bson.D {
			return bson.D{
				{Key: "q", Value: "q.dead"}, {Key: "when", Value: at}, {Key: "prio", Value: 2}, {Key: "payload", Value: i},
				{Key: "dead", Value: bson.D{{Key: "from", Value: "q"}, {Key: "at", Value: at}, {Key: "kind", Value: "explicit"}, {Key: "msg", Value: "x"}}},
			}
		}))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		for range 20 {
			wg.Go(func() {
				for ctx.Err() == nil {
					rs, err := q.ReserveMany(ctx, 10)
					if err != nil {
						continue
					}
					for _, r := range rs {
						_ = r.DeadLetter(context.WithoutCancel(ctx), errFailed)
					}
				}
			})
		}
		bounded, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		redriven, err := q.DeadLetters().Redrive(bounded)
		require.NoError(t, err)
		require.EqualValues(t, n, redriven)
	})
}

func TestQueuesMayShareADeadLetterQueue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		cfg := mongoq.QueueConfig{DeadLetter: "graveyard"}
		a, b := newQueue(t, store, "a", cfg), newQueue(t, store, "b", cfg)
		graveyard := newQueue(t, store, "graveyard")
		die := func(q *mongoq.Queue, n int) {
			t.Helper()
			for range n {
				push(t, q, q.Name())
				require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
			}
		}
		die(a, 2)
		die(b, 3)
		require.Len(t, deadLetters(t, a), 2)
		require.Len(t, deadLetters(t, b), 3)
		for _, e := range deadLetters(t, b) {
			require.Equal(t, "b", payloadOf[string](t, e))
		}
		require.Equal(t, "5500", sizes(t, graveyard))

		n, err := a.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		require.Equal(t, "2200", sizes(t, a))
		require.Equal(t, "0000", sizes(t, b))
		require.Len(t, deadLetters(t, b), 3)

		// An id of another queue's is passed over.
		n, err = a.DeadLetters().Redrive(t.Context(), mongoq.IDs(deadLetters(t, b)[0].ID))
		require.NoError(t, err)
		require.Zero(t, n)

		// So is a purge's business its own dead letters, but those under a lease.
		die(a, 2)
		held := tryReserve(t, graveyard)
		require.Equal(t, "b", held.Dead.From)
		n, err = b.DeadLetters().Purge(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		require.Len(t, deadLetters(t, a), 2)
		require.Len(t, deadLetters(t, b), 1)
		require.NoError(t, held.Release(t.Context()))
		n, err = b.DeadLetters().Purge(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		require.Empty(t, deadLetters(t, b))
		require.Len(t, deadLetters(t, a), 2)
		require.Equal(t, "2200", sizes(t, a), "what lives stays")
	})
}
