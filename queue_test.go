package mongoq_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestNewQueueIsEmpty(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "new")
		require.Equal(t, "new", q.Name())
		s, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, mongoq.Stats{Q: "new"}, s)
		require.True(t, s.NextDue.IsZero())

		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		_, err = q.TryPop(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		all, err := q.Peek(t.Context(), 10)
		require.NoError(t, err)
		require.Empty(t, all)
	})
}

func TestSizesFollowEveryStep(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		// Nobody polls in time: the last Pop wakes by the due time.
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{PollInterval: time.Minute})
		require.Equal(t, "0000", sizes(t, q))

		delayed := push(t, q, "delayed", mongoq.Delay(time.Hour))
		push(t, q, "a")
		push(t, q, "b")
		require.Equal(t, "3210", sizes(t, q))

		r := tryReserve(t, q)
		require.Equal(t, "3111", sizes(t, q))
		require.NoError(t, r.Rollback(t.Context(), errors.New("not yet"), mongoq.After(0)))
		require.Equal(t, "3210", sizes(t, q))

		r = tryReserve(t, q)
		require.Equal(t, "3111", sizes(t, q))
		require.NoError(t, r.Commit(t.Context()))
		require.Equal(t, "2110", sizes(t, q))

		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		e, err := q.Pop(ctx)
		require.NoError(t, err)
		require.NotEqual(t, delayed, e.ID)
		setDue(t, db, delayed, 300*time.Millisecond)
		due := rawDoc(t, db, delayed)["when"].(bson.DateTime).Time()
		e, err = q.Pop(ctx)
		require.NoError(t, err)
		require.Equal(t, delayed, e.ID)
		require.False(t, e.Reserved.Before(due), "taken at %v, due at %v", e.Reserved, due)
		require.Equal(t, "0000", sizes(t, q))
	})
}

func TestPeekShowsTheOrderAndTakesNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		_, err := q.PushMany(t.Context(), []any{
			mongoq.With("last", mongoq.Priority(4)),
			mongoq.With("second"),
			mongoq.With("first", mongoq.Priority(1)),
			mongoq.With("third", mongoq.Priority(3)),
			mongoq.With("later", mongoq.Priority(1), mongoq.Delay(time.Hour)),
		})
		require.NoError(t, err)
		push(t, newQueue(t, openStore(t, db), "other"), "elsewhere")
		held := push(t, q, "held", mongoq.Priority(1))
		// It is behind "first", which waits longer.
		first := tryReserve(t, q)
		r := tryReserve(t, q)
		require.Equal(t, held, r.ID)
		require.NoError(t, first.Release(t.Context()))

		before := sizes(t, q)
		for range 2 {
			require.Equal(t, []string{"first", "second", "third", "last"}, peeked(t, q, 10))
			require.Equal(t, []string{"first", "second"}, peeked(t, q, 2))
		}
		require.Equal(t, before, sizes(t, q))
		require.Zero(t, rawDoc(t, db, idOf(t, q, "second"))["deliveries"])

		require.NoError(t, q.Pause(t.Context()))
		require.Len(t, peeked(t, q, 10), 4, "a pause hides nothing")
		require.NoError(t, q.Resume(t.Context()))
		for _, want := range []string{"first", "second", "third", "last"} {
			require.Equal(t, want, payloadOf[string](t, &tryReserve(t, q).Envelope))
		}
		require.Empty(t, peeked(t, q, 10))
	})
}

func peeked(t *testing.T, q *mongoq.Queue, n int) []string {
	t.Helper()
	all, err := q.Peek(t.Context(), n)
	require.NoError(t, err)
	var texts []string
	for _, e := range all {
		texts = append(texts, payloadOf[string](t, e))
	}
	return texts
}

// idOf is the id of the due envelope with this payload.
func idOf(t *testing.T, q *mongoq.Queue, payload string) bson.ObjectID {
	t.Helper()
	all, err := q.Peek(t.Context(), 100)
	require.NoError(t, err)
	for _, e := range all {
		if payloadOf[string](t, e) == payload {
			return e.ID
		}
	}
	require.Fail(t, "no such envelope", payload)
	return bson.NilObjectID
}

func TestPeekShowsNothingPastItsDeadline(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter})
		id := push(t, q, "late", mongoq.TTL(time.Millisecond))
		push(t, q, "alive", mongoq.TTL(time.Hour))
		require.Eventually(t, func() bool { return len(peeked(t, q, 10)) == 1 }, 10*time.Second, time.Millisecond)
		require.Equal(t, []string{"alive"}, peeked(t, q, 10))
		require.Equal(t, "q", rawDoc(t, db, id)["q"], "it took nothing")
	})
}

func TestGetFindsAnEnvelopeWhereverItIs(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		other := newQueue(t, store, "other")
		id := push(t, q, "x", mongoq.Headers(map[string]string{"k": "v"}), mongoq.Priority(3))
		inQueue := func(q *mongoq.Queue) *mongoq.Envelope {
			t.Helper()
			e, err := store.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, q.Name(), e.Q)
			same, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, e, same)
			return e
		}
		notIn := func(q *mongoq.Queue) {
			t.Helper()
			_, err := q.Get(t.Context(), id)
			require.ErrorIs(t, err, mongoq.ErrNotFound)
		}

		e := inQueue(q)
		require.Equal(t, id, e.ID)
		require.Equal(t, "x", payloadOf[string](t, e))
		require.Equal(t, map[string]string{"k": "v"}, e.Headers)
		require.Equal(t, 3, e.Priority)
		require.Zero(t, e.Deliveries+e.Retries+e.Moves)
		require.True(t, e.Reserved.IsZero())
		require.WithinDuration(t, e.Pushed, e.When, 0)
		notIn(other)

		r := tryReserve(t, q)
		e = inQueue(q)
		require.Equal(t, r.Envelope, *e)
		require.False(t, e.Reserved.IsZero())
		require.Equal(t, 1, e.Deliveries)

		require.NoError(t, r.MoveToQ(t.Context(), "other"))
		e = inQueue(other)
		require.Equal(t, 1, e.Moves)
		require.Equal(t, "q", e.Hops[0].From)
		notIn(q)

		require.NoError(t, tryReserve(t, other).MoveToQ(t.Context(), "q"))
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("enough")))
		e = inQueue(newQueue(t, store, "q.dead"))
		require.Equal(t, mongoq.DeadExplicit, e.Dead.Kind)
		notIn(q)

		_, err := q.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.NoError(t, tryReserve(t, q).Commit(t.Context(), mongoq.Result(1)))
		require.False(t, inQueue(q).Processed.IsZero())

		for _, id := range []bson.ObjectID{bson.NewObjectID(), bson.NilObjectID} {
			_, err = store.Get(t.Context(), id)
			require.ErrorIs(t, err, mongoq.ErrNotFound)
			_, err = q.Get(t.Context(), id)
			require.ErrorIs(t, err, mongoq.ErrNotFound)
		}
	})
}

func TestRemoveTakesOnlyWhatWaits(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		gone := func(id bson.ObjectID) {
			t.Helper()
			_, err := store.Get(t.Context(), id)
			require.ErrorIs(t, err, mongoq.ErrNotFound)
		}

		due, later := push(t, q, "due"), push(t, q, "later", mongoq.Delay(time.Hour))
		for _, id := range []bson.ObjectID{due, later} {
			require.ErrorIs(t, newQueue(t, store, "other").Remove(t.Context(), id), mongoq.ErrNotFound)
			require.NoError(t, q.Remove(t.Context(), id))
			gone(id)
			require.ErrorIs(t, q.Remove(t.Context(), id), mongoq.ErrNotFound)
		}

		id := push(t, q, "held")
		r := tryReserve(t, q)
		before := rawDoc(t, db, id)
		require.ErrorIs(t, q.Remove(t.Context(), id), mongoq.ErrReserved)
		require.Equal(t, before, rawDoc(t, db, id))

		require.NoError(t, r.Commit(t.Context()))
		before = rawDoc(t, db, id)
		require.ErrorIs(t, q.Remove(t.Context(), id), mongoq.ErrNotFound, "in the history")
		require.Equal(t, before, rawDoc(t, db, id))

		id = push(t, q, "lapsed")
		r = tryReserve(t, q)
		setDue(t, db, id, 0) // the lease has run out
		require.NoError(t, q.Remove(t.Context(), id))
		gone(id)
		require.ErrorIs(t, r.Commit(t.Context()), mongoq.ErrLeaseLost)

		id = push(t, q, "dead")
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("x")))
		require.ErrorIs(t, q.Remove(t.Context(), id), mongoq.ErrNotFound, "it is elsewhere")
		require.NoError(t, newQueue(t, store, "q.dead").Remove(t.Context(), id))
		gone(id)
	})
}

func TestPurgeTakesWhatWaits(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: mongoq.KeepForever})
		none, err := q.Purge(t.Context())
		require.NoError(t, err)
		require.Zero(t, none)

		committed, dead, held, lapsed := push(t, q, 1), push(t, q, 2), push(t, q, 3), push(t, q, 4)
		require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("x")))
		require.Equal(t, held, tryReserve(t, q).ID)
		require.Equal(t, lapsed, tryReserve(t, q).ID)
		setDue(t, db, lapsed, 0)
		elsewhere := push(t, newQueue(t, store, "other"), 5)
		payloads := make([]any, 2_100) // more than two batches
		for i := range payloads {
			payloads[i] = mongoq.With(i, mongoq.Delay(time.Duration(i%2)*time.Hour))
		}
		_, err = q.PushMany(t.Context(), payloads)
		require.NoError(t, err)

		n, err := q.Purge(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, len(payloads)+1, n, "due, scheduled, and the one whose lease ran out")
		s, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, mongoq.Stats{Q: "q", Total: 1, Reserved: 1, Processed: 1, Dead: 1}, s)
		for _, id := range []bson.ObjectID{committed, dead, held, elsewhere} {
			_, err := store.Get(t.Context(), id)
			require.NoError(t, err)
		}

		// Nor does the purge of a dead-letter queue take the dead.
		n, err = newQueue(t, store, "q.dead").Purge(t.Context())
		require.NoError(t, err)
		require.Zero(t, n)
		_, err = store.Get(t.Context(), dead)
		require.NoError(t, err)
	})
}

func TestPauseIsStoredAndHoldsForEveryProcess(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		far := newQueue(t, openStore(t, anotherClient(t, db)), "q")
		id := push(t, q, "x")
		held := tryReserve(t, q)
		_, err := far.TryReserve(t.Context()) // it knows that nothing is paused
		require.ErrorIs(t, err, mongoq.ErrEmpty)

		require.NoError(t, q.Pause(t.Context()))
		refused := func(q *mongoq.Queue) {
			t.Helper()
			_, err := q.TryReserve(t.Context())
			require.ErrorIs(t, err, mongoq.ErrQueuePaused)
			_, err = q.TryPop(t.Context())
			require.ErrorIs(t, err, mongoq.ErrQueuePaused)
			s, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.True(t, s.Paused)
		}
		refused(q)
		require.Eventually(t, func() bool {
			_, err := far.TryReserve(t.Context())
			return errors.Is(err, mongoq.ErrQueuePaused)
		}, 3*time.Second, 20*time.Millisecond) // a second, by what it promises
		refused(far)
		refused(newQueue(t, openStore(t, db), "q")) // it is stored
		_, err = newQueue(t, store, "other").TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty, "the others are not paused")

		// Pushes and the settling of reservations go on; who waits goes on waiting.
		push(t, q, "y")
		push(t, far, "z")
		require.NoError(t, held.Release(t.Context()))
		require.Equal(t, "3300", sizes(t, q))
		got := make(chan *mongoq.Reservation, 1)
		go func() {
			r, err := far.Reserve(t.Context())
			if err == nil {
				got <- r
			}
		}()
		require.NoError(t, q.Pause(t.Context()), "again")
		require.Empty(t, got)

		require.NoError(t, q.Resume(t.Context()))
		here := payloadOf[string](t, &tryReserve(t, q).Envelope) // at once in this process
		select {
		case r := <-got:
			require.ElementsMatch(t, []string{"y", "z"}, []string{here, payloadOf[string](t, &r.Envelope)})
		case <-time.After(10 * time.Second):
			require.Fail(t, "the waiter never woke")
		}
		s, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.False(t, s.Paused)
		require.Equal(t, id, tryReserve(t, q).ID)
		require.NoError(t, q.Resume(t.Context()), "again")
	})
}

func TestQueueNamesOfEveryKind(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		names := []string{"a", " ", "a.b", ".", "with space", "Üñïçødé ✓", "a$", "$none"[1:], "{}", "null", string(make255())}
		for _, name := range names {
			q := newQueue(t, store, name, mongoq.QueueConfig{
				DeadLetter: "dead", Retention: time.Hour,
				Retry: func() backoff.BackOff { return &backoff.StopBackOff{} },
			})
			push(t, q, name)
			require.NoError(t, tryReserve(t, q).MoveToQ(t.Context(), name), "to itself: it starts over")
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errors.New("x")))
			n, err := q.DeadLetters().Redrive(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
			require.NoError(t, q.Pause(t.Context()))
			require.NoError(t, q.Resume(t.Context()))
			r := tryReserve(t, q)
			require.Equal(t, name, payloadOf[string](t, &r.Envelope))
			require.Equal(t, name, r.Q)
			require.NoError(t, r.Commit(t.Context()))
			s, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.Equal(t, mongoq.Stats{Q: name, Processed: 1}, s)
		}
	})
}

func make255() []byte {
	b := make([]byte, 255)
	for i := range b {
		b[i] = 'n'
	}
	return b
}
