package mongoq_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestCommitWithoutRetentionDeletes(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		id := push(t, q, "x")
		require.NoError(t, tryReserve(t, q).Commit(t.Context(), mongoq.Result("kept nowhere")))
		_, err := store.Get(t.Context(), id)
		require.ErrorIs(t, err, mongoq.ErrNotFound)
		n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{})
		require.NoError(t, err)
		require.Zero(t, n)
	})
}

func TestCommitWithRetentionKeepsTheEnvelope(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for name, c := range map[string]struct {
			retention time.Duration
			ttl       time.Duration
			commit    func(*mongoq.Queue, *mongoq.Reservation) error
			result    any
		}{
			"for a time": {time.Hour, 0, func(_ *mongoq.Queue, r *mongoq.Reservation) error {
				return r.Commit(t.Context(), mongoq.Result(bson.D{{Key: "rows", Value: 3}}))
			}, bson.D{{Key: "rows", Value: 3}}},
			"longer than it would have lived": {24 * time.Hour, time.Hour, func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.Commit(t.Context(), mongoq.Result("$q")) }, "$q"},
			"for ever":                        {mongoq.KeepForever, 0, func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.Commit(t.Context(), mongoq.Result(nil)) }, nil},
			"for ever, whatever its deadline": {mongoq.KeepForever, time.Hour, func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.Commit(t.Context()) }, nil},
			"by CommitMany": {time.Hour, 0, func(q *mongoq.Queue, r *mongoq.Reservation) error {
				return q.CommitMany(t.Context(), []*mongoq.Reservation{r})
			}, nil},
		} {
			q := newQueue(t, store, name, mongoq.QueueConfig{Retention: c.retention, TTL: c.ttl})
			id := push(t, q, name, mongoq.Headers(someHeaders))
			r := tryReserve(t, q)
			held := rawDoc(t, db, id)
			require.NoError(t, c.commit(q, r), name)

			doc := rawDoc(t, db, id)
			processed := doc["processed"].(bson.DateTime)
			if c.retention == mongoq.KeepForever {
				require.NotContains(t, doc, "expireAt", name)
			} else {
				require.Equal(t, processed+bson.DateTime(c.retention.Milliseconds()), doc["expireAt"], name)
			}
			for _, evidence := range []string{"lease", "reserved", "deliveries", "when", "pushed", "payload", "headers", "prio", "q"} {
				require.Equal(t, held[evidence], doc[evidence], "%s: %s", name, evidence)
			}
			e, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, processed.Time().UnixMilli(), e.Processed.UnixMilli())
			if c.result != nil {
				same(t, name, c.result, e.Result)
			}
			s, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.Equal(t, mongoq.Stats{Q: name, Processed: 1}, s)
			_, err = q.TryReserve(t.Context())
			require.ErrorIs(t, err, mongoq.ErrEmpty, name)
		}
	})
}

func TestPopKeepsTheEnvelopeInTheHistory(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retention: time.Hour})
		id := push(t, q, "x")
		e, err := q.TryPop(t.Context())
		require.NoError(t, err)
		require.Equal(t, id, e.ID)
		kept, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.False(t, kept.Processed.IsZero())
	})
}

func TestRetentionHoldsForWhatIsCommittedFromNowOn(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		before := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		first, second := push(t, before, 1), push(t, before, 2)
		require.NoError(t, tryReserve(t, before).Commit(t.Context()))
		doc := rawDoc(t, db, first)
		after := newQueue(t, store, "q", mongoq.QueueConfig{Retention: mongoq.KeepForever})
		require.NoError(t, tryReserve(t, after).Commit(t.Context()))
		require.Equal(t, doc, rawDoc(t, db, first))
		require.NotContains(t, rawDoc(t, db, second), "expireAt")
	})
}

// listed is a history's payloads, in its order.
func listed(t *testing.T, q *mongoq.Queue) (payloads []string) {
	t.Helper()
	for e, err := range q.History().List(t.Context()) {
		require.NoError(t, err)
		payloads = append(payloads, payloadOf[string](t, e))
	}
	return payloads
}

func TestHistoryIsListedNewestFirst(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		require.Empty(t, listed(t, q))
		for i := range 5 {
			push(t, q, fmt.Sprint(i), mongoq.Priority(4-i%4))
		}
		push(t, newQueue(t, store, "q2"), "elsewhere")
		push(t, q, "live", mongoq.Delay(time.Hour))
		var want []string
		var last time.Time
		for range 5 {
			// The next is committed at another instant than the last.
			require.Eventually(t, func() bool { return serverTime(t, db).After(last) }, 10*time.Second, time.Millisecond)
			r := tryReserve(t, q)
			require.NoError(t, r.Commit(t.Context()))
			want = append([]string{payloadOf[string](t, &r.Envelope)}, want...)
			e, err := q.Get(t.Context(), r.ID)
			require.NoError(t, err)
			last = e.Processed
		}
		require.Equal(t, want, listed(t, q))

		// The caller may stop; more than the driver's first batch comes, too.
		for e, err := range q.History().List(t.Context()) {
			require.NoError(t, err)
			require.Equal(t, want[0], payloadOf[string](t, e))
			break
		}
		payloads := make([]any, 250)
		for i := range payloads {
			payloads[i] = fmt.Sprint("batch ", i)
		}
		_, err := q.PushMany(t.Context(), payloads)
		require.NoError(t, err)
		rs, err := q.ReserveMany(t.Context(), len(payloads))
		require.NoError(t, err)
		require.NoError(t, q.CommitMany(t.Context(), rs))
		all := listed(t, q)
		require.Len(t, all, len(payloads)+len(want))
		require.ElementsMatch(t, payloads, all[:len(payloads)])
		require.Equal(t, want, all[len(payloads):])
		var before *mongoq.Envelope
		for e, err := range q.History().List(t.Context()) {
			require.NoError(t, err)
			if before != nil {
				order := before.Processed.Compare(e.Processed)
				require.True(t, order > 0 || order == 0 && bytes.Compare(before.ID[:], e.ID[:]) > 0, "of one instant: by id, the latest first")
			}
			before = e
		}
	})
}

func serverTime(t *testing.T, db *mongo.Database) time.Time {
	t.Helper()
	raw, err := db.RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Raw()
	require.NoError(t, err)
	return raw.Lookup("localTime").Time()
}

func TestReplayPushesANewEnvelope(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour, Delay: time.Hour})
		for name, v := range map[string]any{"object": bson.D{{Key: "$a.b", Value: 1}}, "null": nil, "empty bytes": []byte{}, "string": "$q", "array": bson.A{}} {
			id := push(t, q, v, mongoq.Headers(someHeaders), mongoq.Priority(3), mongoq.Delay(0))
			require.NoError(t, tryReserve(t, q).Commit(t.Context(), mongoq.Result("done")), name)
			before := rawDoc(t, db, id)

			again, err := q.History().Replay(t.Context(), id, mongoq.Delay(0))
			require.NoError(t, err, name)
			require.NotEqual(t, id, again)
			require.Equal(t, before, rawDoc(t, db, id), "%s: the finished one is not touched", name)
			r := tryReserve(t, q)
			require.Equal(t, again, r.ID)
			same(t, name, v, r.Payload)
			require.Equal(t, someHeaders, r.Headers)
			require.Equal(t, 3, r.Priority)
			require.Zero(t, r.Retries+r.Moves)
			require.Equal(t, 1, r.Deliveries)
			require.True(t, r.Result.IsZero(), name)
			require.NoError(t, r.Commit(t.Context()))

			own := bson.NewObjectID()
			again, err = q.History().Replay(t.Context(), id, mongoq.Priority(1), mongoq.Headers(nil), mongoq.ID(own))
			require.NoError(t, err)
			require.Equal(t, own, again)
			e, err := q.Get(t.Context(), own)
			require.NoError(t, err)
			require.Equal(t, 1, e.Priority)
			require.Nil(t, e.Headers)
			require.Greater(t, e.When.Sub(e.Pushed), 50*time.Minute, "the queue's delay holds for it, too")
		}
		live := push(t, q, "live")
		for _, id := range []bson.ObjectID{live, bson.NewObjectID()} {
			_, err := q.History().Replay(t.Context(), id)
			require.ErrorIs(t, err, mongoq.ErrNotFound)
			_, err = newQueue(t, store, "other").History().Replay(t.Context(), id)
			require.ErrorIs(t, err, mongoq.ErrNotFound)
		}
	})
}

func TestFinishedEnvelopeIsNeverTouchedAgain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		keep := mongoq.QueueConfig{Retention: time.Hour}
		q := newQueue(t, store, "q", keep)
		id := bson.NewObjectID()
		own := mongoq.ID(id)
		push(t, q, "x", own)

		// One who lost it, and the one who committed it.
		stale := tryReserve(t, q)
		setDue(t, db, id, 0)
		r := tryReserve(t, q)
		require.NoError(t, r.Commit(t.Context(), mongoq.Result("done")))
		before := rawDoc(t, db, id)
		for name, held := range map[string]*mongoq.Reservation{"the stale holder": stale, "the committer": r} {
			for verb, do := range map[string]func() error{
				"commit":      func() error { return held.Commit(t.Context(), mongoq.Result("twice")) },
				"rollback":    func() error { return held.Rollback(t.Context(), errors.New("x")) },
				"release":     func() error { return held.Release(t.Context()) },
				"move":        func() error { return held.MoveToQ(t.Context(), "other") },
				"dead-letter": func() error { return held.DeadLetter(t.Context(), errors.New("x")) },
				"extend":      func() error { return held.Extend(t.Context(), time.Hour) },
				"commit many": func() error { return q.CommitMany(t.Context(), []*mongoq.Reservation{held}) },
			} {
				require.ErrorIs(t, do(), mongoq.ErrLeaseLost, "%s: %s", name, verb)
				require.Equal(t, before, rawDoc(t, db, id), "%s: %s", name, verb)
			}
		}

		// Nor do the verbs of the queue: past its lease's end, above all.
		setDue(t, db, id, -time.Hour)
		before = rawDoc(t, db, id)
		require.ErrorIs(t, q.Remove(t.Context(), id), mongoq.ErrNotFound)
		n, err := q.Purge(t.Context())
		require.NoError(t, err)
		require.Zero(t, n)
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		require.Empty(t, peeked(t, q, 10))
		push(t, q, "x", own)
		_, err = q.Push(t.Context(), "y", own)
		require.ErrorIs(t, err, mongoq.ErrDuplicate)
		require.Equal(t, before, rawDoc(t, db, id))
	})
}

func TestFinishedDeadLetterIsNeverTouchedAgain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		dead := newQueue(t, store, "q.dead", mongoq.QueueConfig{Retention: time.Hour})
		id := push(t, q, "x")
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("x")))
		require.NoError(t, tryReserve(t, dead).Commit(t.Context()))
		setDue(t, db, id, -time.Hour)
		before := rawDoc(t, db, id)
		n, err := q.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.Zero(t, n)
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.IDs(id))
		require.NoError(t, err)
		require.Zero(t, n)
		n, err = q.DeadLetters().Purge(t.Context())
		require.NoError(t, err)
		require.Zero(t, n)
		for e, err := range q.DeadLetters().List(t.Context()) {
			require.NoError(t, err)
			require.Fail(t, "it is no dead letter any more", e.ID)
		}
		require.Equal(t, before, rawDoc(t, db, id))
	})
}
