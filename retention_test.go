package mongoq_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestACommitSaysHowLongItIsKept(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, of := range []time.Duration{0, time.Hour, mongoq.KeepForever} {
			q := newQueue(t, store, fmt.Sprint("q", of), mongoq.QueueConfig{Retention: of})
			for _, keep := range []time.Duration{0, time.Minute, mongoq.KeepForever} {
				id := push(t, q, "x")
				require.NoError(t, tryReserve(t, q).Commit(t.Context(), mongoq.Retain(keep), mongoq.Result("done")))
				e, err := store.Get(t.Context(), id)
				switch keep {
				case 0:
					require.ErrorIs(t, err, mongoq.ErrNotFound)
				case mongoq.KeepForever:
					require.NoError(t, err)
					require.NotContains(t, rawDoc(t, db, id), "expireAt")
				default:
					require.NoError(t, err)
					require.Equal(t, keep, e.ExpireAt.Sub(e.Processed))
					require.Equal(t, "done", e.Result.StringValue())
				}
			}
			push(t, q, "x")
			r := tryReserve(t, q)
			for _, odd := range []time.Duration{-2, time.Millisecond - 1} {
				require.ErrorIs(t, r.Commit(t.Context(), mongoq.Retain(odd)), mongoq.ErrInvalidOption)
			}
			require.NoError(t, r.Commit(t.Context()), "a refused commit settles nothing")
		}
	})
}

// What was done in one burst is not forgotten in one.
func TestRetentionIsSpread(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n, keep, spread = 300, time.Hour, 10 * time.Minute
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: keep, RetentionSpread: spread})
		_, err := q.PushMany(t.Context(), ints(n))
		require.NoError(t, err)
		rs, err := q.ReserveMany(t.Context(), n)
		require.NoError(t, err)
		require.Len(t, rs, n)
		require.NoError(t, q.CommitMany(t.Context(), rs))
		check := func(keep, spread time.Duration) {
			t.Helper()
			first, last := keep+spread, time.Duration(0)
			for e, err := range q.History().List(t.Context()) {
				require.NoError(t, err)
				kept := e.ExpireAt.Sub(e.Processed)
				first, last = min(first, kept), max(last, kept)
			}
			require.GreaterOrEqual(t, first, keep)
			require.LessOrEqual(t, last, keep+spread)
			require.GreaterOrEqual(t, last-first, spread*8/10, "of 300, all in less than that has a chance of 1e-26")
		}
		check(keep, spread)
		_, err = q.History().SetRetention(t.Context(), 2*keep)
		require.NoError(t, err)
		check(2*keep, spread)
		_, err = q.History().SetRetention(t.Context(), keep, mongoq.Spread(0))
		require.NoError(t, err)
		check(keep, 0)
		_, err = store.History().SetRetention(t.Context(), keep, mongoq.Spread(time.Minute))
		require.NoError(t, err)
		check(keep, time.Minute)
		for _, odd := range []time.Duration{-1, time.Millisecond - 1} {
			_, err = store.Queue("q", mongoq.QueueConfig{RetentionSpread: odd})
			require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		}
	})
}

func TestTheRetentionOfWhatIsThereIsChanged(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 2300
		own, s := spied(t, db)
		store := openStore(t, own)
		q := newQueue(t, store, "q")
		start, ids := someHistory(t, db, "q", n)
		_, others := someHistory(t, db, "other", 3)
		live := push(t, q, "live", mongoq.TTL(time.Hour))
		before := rawDoc(t, db, live)
		kept := func(id bson.ObjectID) time.Duration {
			t.Helper()
			e, err := store.Get(t.Context(), id)
			require.NoError(t, err)
			if e.ExpireAt.IsZero() {
				return mongoq.KeepForever
			}
			return e.ExpireAt.Sub(e.Processed)
		}

		// Cut short, and done again.
		ctx, cancel := context.WithCancel(t.Context())
		s.forget()
		changed, err := q.History().SetRetention(ctx, 48*time.Hour, mongoq.OnProgress(func(mongoq.Progress) { cancel() }))
		require.ErrorIs(t, err, context.Canceled)
		require.EqualValues(t, 1000, changed)
		found := explain(t, db, s.last(t, "find"))
		require.LessOrEqual(t, found.keys, int64(1005))
		require.Equal(t, []string{"mongoq_history"}, found.indexes)
		require.LessOrEqual(t, explain(t, db, s.last(t, "update")).keys, int64(2001))
		changed, err = q.History().SetRetention(t.Context(), 48*time.Hour)
		require.NoError(t, err)
		require.EqualValues(t, n, changed)
		for _, i := range []int{0, 1, n / 2, n - 1} {
			require.Equal(t, 48*time.Hour, kept(ids[i]))
		}
		require.Equal(t, mongoq.KeepForever, kept(others[0]))
		require.Equal(t, before, rawDoc(t, db, live), "what lives is not touched")

		// A part of it; and of all queues.
		changed, err = q.History().SetRetention(t.Context(), mongoq.KeepForever, mongoq.Since(start.Add(-100*time.Millisecond)))
		require.NoError(t, err)
		require.EqualValues(t, 10, changed)
		require.Equal(t, mongoq.KeepForever, kept(ids[n-10]))
		require.Equal(t, 48*time.Hour, kept(ids[n-11]))
		changed, err = store.History().SetRetention(t.Context(), 72*time.Hour, mongoq.Limit(1004))
		require.NoError(t, err)
		require.EqualValues(t, 1004, changed)
		changed, err = store.History().SetRetention(t.Context(), 72*time.Hour, mongoq.IDs(ids[0], others[0], live))
		require.NoError(t, err)
		require.EqualValues(t, 2, changed)
		require.Equal(t, 72*time.Hour, kept(others[0]))
		require.Equal(t, before, rawDoc(t, db, live))

		for name, c := range map[string]struct {
			d    time.Duration
			opts []mongoq.RetentionOption
		}{
			"none":        {0, nil},
			"negative":    {-2, nil},
			"short":       {time.Millisecond - 1, nil},
			"spread":      {time.Hour, []mongoq.RetentionOption{mongoq.Spread(-1)}},
			"limit":       {time.Hour, []mongoq.RetentionOption{mongoq.Limit(0)}},
			"no progress": {time.Hour, []mongoq.RetentionOption{mongoq.OnProgress(nil)}},
		} {
			_, err := q.History().SetRetention(t.Context(), c.d, c.opts...)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
		}

		// What is past its new end is forgotten, and nothing else.
		changed, err = q.History().SetRetention(t.Context(), time.Millisecond, mongoq.IDs(ids[5]))
		require.NoError(t, err)
		require.EqualValues(t, 1, changed)
		require.Eventually(t, func() bool {
			n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: ids[5]}})
			return err == nil && n == 0
		}, late, 20*time.Millisecond)
		count, err := q.History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, n-1, count)
	})
}

// An expireAt that is no date never expires.
func TestWhatExpiresAtNoDateNeverExpires(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		at := time.Now().Add(-time.Hour)
		odd := []any{"2001-01-01", 0, at.UnixMilli(), nil, bson.D{{Key: "at", Value: at}}, bson.Timestamp{T: 1}, false, bson.A{}}
		insertRaw(t, db, rawDocs(t, len(odd), func(i int) bson.D {
			return finishedDoc("q", at, i, bson.E{Key: "expireAt", Value: odd[i]})
		}))
		for range 2 { // two passes of the server, at least
			insertRaw(t, db, []any{finishedDoc("canary", at, "x", bson.E{Key: "expireAt", Value: at})})
			require.Eventually(t, func() bool {
				n, err := store.History().Count(t.Context())
				return err == nil && n == int64(len(odd))
			}, late, 20*time.Millisecond)
		}
		n, err := newQueue(t, store, "q").History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, len(odd), n)
	})
}

// A stage that ends an envelope may say for how long it is kept, too.
func TestAStageSaysForHowLongItsEndIsKept(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		p := newPipeline(t, store, &mongoq.Stage{Name: "end", Handler: func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
			return mongoq.Done(mongoq.Retain(time.Hour), mongoq.Result("kept")), nil
		}})
		id, err := p.Push(t.Context(), "x")
		require.NoError(t, err)
		runPipeline(t, p)
		require.Eventually(t, func() bool {
			e, err := store.Get(t.Context(), id)
			return err == nil && !e.Processed.IsZero() && e.ExpireAt.Equal(e.Processed.Add(time.Hour)) && e.Result.StringValue() == "kept"
		}, late, 5*time.Millisecond)
	})
}
