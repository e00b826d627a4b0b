package mongoq_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// someHistory gives a queue n finished envelopes, one each ten milliseconds, the last of them an hour ago.
func someHistory(t testing.TB, db *mongo.Database, q string, n int) (start time.Time, ids []bson.ObjectID) {
	t.Helper()
	start = time.Now().Truncate(time.Second).Add(-time.Hour)
	docs := rawDocs(t, n, func(i int) bson.D {
		return finishedDoc(q, start.Add(time.Duration(i-n)*10*time.Millisecond), i, bson.E{Key: "headers", Value: bson.D{{Key: "n", Value: fmt.Sprint(i)}}})
	})
	for _, d := range docs {
		ids = append(ids, d.(bson.Raw).Lookup("_id").ObjectID())
	}
	insertRaw(t, db, docs)
	return start, ids
}

// replays are the live envelopes of a queue that name an original, by it.
func replays(t *testing.T, db *mongo.Database, q string) map[bson.ObjectID]int {
	t.Helper()
	cur, err := db.Collection("mongoq").Find(t.Context(), bson.D{{Key: "q", Value: q}, {Key: "replayOf", Value: bson.D{{Key: "$exists", Value: true}}}})
	require.NoError(t, err)
	m := map[bson.ObjectID]int{}
	for cur.Next(t.Context()) {
		m[cur.Current.Lookup("replayOf", "id").ObjectID()]++
	}
	require.NoError(t, cur.Err())
	return m
}

func TestAReplayNamesItsOriginal(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		_, ids := someHistory(t, db, "q", 2)
		before := rawDoc(t, db, ids[0])
		first, err := q.History().Replay(t.Context(), ids[0])
		require.NoError(t, err)
		second, err := q.History().Replay(t.Context(), ids[0])
		require.NoError(t, err)
		require.NotEqual(t, first, second, "without an id, each is another")
		n, err := q.History().ReplayMany(t.Context(), "again", mongoq.IDs(ids[1]))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		byID := map[bson.ObjectID]*mongoq.Reservation{}
		for range 3 {
			r := tryReserve(t, q)
			byID[r.ReplayOf] = r
			require.NoError(t, r.Commit(t.Context()))
			e, err := q.Get(t.Context(), r.ID)
			require.NoError(t, err)
			require.Equal(t, r.ReplayOf, e.ReplayOf, "in the history, too")
			require.Equal(t, r.ReplayID, e.ReplayID)
			require.Equal(t, r.Headers["n"], fmt.Sprint(payloadOf[int](t, e)))
		}
		require.Len(t, byID, 2)
		require.Empty(t, byID[ids[0]].ReplayID)
		require.Equal(t, "again", byID[ids[1]].ReplayID)
		require.Equal(t, before, rawDoc(t, db, ids[0]), "the finished one is not touched")
		e, err := q.Get(t.Context(), ids[0])
		require.NoError(t, err)
		require.Zero(t, e.ReplayOf)

		// One who wrote it by hand, and wrong, gets it back as a dead letter.
		insertRaw(t, db, []any{bson.D{{Key: "q", Value: "q"}, {Key: "when", Value: time.Now().Add(-time.Hour)}, {Key: "replayOf", Value: "odd"}}})
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		require.Equal(t, mongoq.DeadUndecodable, deadLetters(t, q)[0].Dead.Kind)
	})
}

func TestAReplayIsRepeatable(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 2500
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		_, ids := someHistory(t, db, "q", n)

		// Cut short after a batch, as by a kill.
		ctx, cancel := context.WithCancel(t.Context())
		var told []int64
		done, err := q.History().ReplayMany(ctx, "monday", mongoq.OnProgress(func(p mongoq.Progress) {
			told = append(told, p.Done)
			cancel()
		}))
		require.ErrorIs(t, err, context.Canceled)
		require.EqualValues(t, 1000, done)
		require.Equal(t, []int64{1000}, told)
		require.Len(t, replays(t, db, "q"), 1000)
		for range 50 { // some are done meanwhile
			require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		}

		// Two that go on at once.
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				done, err := q.History().ReplayMany(t.Context(), "monday")
				if err != nil || done != n {
					t.Errorf("replayed %d, %v", done, err)
				}
			})
		}
		both.Wait()
		check := func() {
			t.Helper()
			all := replays(t, db, "q")
			require.Len(t, all, n)
			for _, id := range ids {
				require.Equal(t, 1, all[id])
			}
		}
		check()

		// Again, when some of them are done and in the history themselves.
		rs, err := q.ReserveMany(t.Context(), 500)
		require.NoError(t, err)
		require.NoError(t, q.CommitMany(t.Context(), rs))
		done, err = q.History().ReplayMany(t.Context(), "monday")
		require.NoError(t, err)
		require.EqualValues(t, n, done)
		check()
		require.Equal(t, fmt.Sprint(n-550), fmt.Sprint(live(t, q)))

		// Under another id it is another replay.
		done, err = q.History().ReplayMany(t.Context(), "tuesday", mongoq.IDs(ids[:10]...))
		require.NoError(t, err)
		require.EqualValues(t, 10, done)
		require.Equal(t, fmt.Sprint(n-540), fmt.Sprint(live(t, q)))
	})
}

func live(t *testing.T, q *mongoq.Queue) int64 {
	t.Helper()
	s, err := q.Stats(t.Context(), mongoq.Exact())
	require.NoError(t, err)
	return s.Total
}

func TestAReplayOfAPart(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		start, ids := someHistory(t, db, "q", 20)
		at := func(i int) time.Time { return start.Add(time.Duration(i-20) * 10 * time.Millisecond) }
		other := newQueue(t, store, "other", mongoq.QueueConfig{Delay: time.Hour})
		replay := func(h *mongoq.History, id string, opts ...mongoq.ReplayOption) (got []string) {
			t.Helper()
			before := replays(t, db, "q")
			n, err := h.ReplayMany(t.Context(), id, opts...)
			require.NoError(t, err)
			after := replays(t, db, "q")
			require.EqualValues(t, n, len(after)-len(before))
			for i, id := range ids {
				if after[id] > before[id] {
					got = append(got, fmt.Sprint(i))
				}
			}
			_, err = q.Purge(t.Context())
			require.NoError(t, err)
			return got
		}
		require.Equal(t, "3 7", strings.Join(replay(q.History(), "a", mongoq.IDs(ids[3], ids[7], bson.NewObjectID())), " "))
		require.Equal(t, "4 5 6", strings.Join(replay(q.History(), "b", mongoq.Since(at(4)), mongoq.Until(at(7))), " "))
		require.Equal(t, "18 19", strings.Join(replay(q.History(), "c", mongoq.Limit(2)), " "))
		require.Equal(t, "11", strings.Join(replay(q.History(), "d", mongoq.Header("n", "11")), " "))
		require.Empty(t, replay(q.History(), "e", mongoq.WithOutcome(mongoq.OutcomeDropped)))
		require.Empty(t, replay(q.History(), "f", mongoq.IDs()))
		require.Empty(t, replay(other.History(), "g"))
		require.Len(t, replay(store.History(), "h"), 20)

		// To another queue, as its handle pushes, and as the options say.
		n, err := q.History().ReplayMany(t.Context(), "moved", mongoq.To(other), mongoq.IDs(ids[1]))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		require.Equal(t, "1010", sizes(t, other))
		n, err = q.History().ReplayMany(t.Context(), "due", mongoq.To(other), mongoq.IDs(ids[2]), mongoq.Delay(0), mongoq.Priority(4), mongoq.TTL(time.Hour))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		r := tryReserve(t, other)
		require.Equal(t, ids[2], r.ReplayOf)
		require.Equal(t, 4, r.Priority)
		require.NotZero(t, r.Deadline)
		n, err = q.History().ReplayMany(t.Context(), "at", mongoq.IDs(ids[2]), mongoq.At(time.Now().Add(time.Hour)))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		require.Equal(t, "1010", sizes(t, q))

		// Under one id there is one envelope for each original.
		_, err = q.History().ReplayMany(t.Context(), "moved", mongoq.IDs(ids[1]))
		require.ErrorIs(t, err, mongoq.ErrDuplicate)
		require.ErrorContains(t, err, ids[1].Hex())
		n, err = q.History().ReplayMany(t.Context(), "moved", mongoq.To(other), mongoq.IDs(ids[1], ids[2]))
		require.NoError(t, err)
		require.EqualValues(t, 2, n)

		elsewhere := newQueue(t, openStore(t, db, mongoq.Config{Collection: "elsewhere"}), "q")
		for name, c := range map[string]struct {
			id  string
			opt mongoq.ReplayOption
		}{
			"no id":         {"", mongoq.Limit(1)},
			"a long id":     {strings.Repeat("x", mongoq.MaxReplayID+1), mongoq.Limit(1)},
			"odd bytes":     {"\xff", mongoq.Limit(1)},
			"limit":         {"x", mongoq.Limit(0)},
			"priority":      {"x", mongoq.Priority(5)},
			"delay":         {"x", mongoq.Delay(-1)},
			"TTL":           {"x", mongoq.TTL(-1)},
			"at":            {"x", mongoq.At(time.Time{})},
			"no queue":      {"x", mongoq.To(nil)},
			"another store": {"x", mongoq.To(elsewhere)},
			"no function":   {"x", mongoq.OnProgress(nil)},
			"since":         {"x", mongoq.Since(time.Time{})},
		} {
			_, err := q.History().ReplayMany(t.Context(), c.id, c.opt)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
		}
		require.Equal(t, "1010", sizes(t, q))
	})
}

// An answer that is lost leaves nothing out, and pushes nothing twice.
func TestAReplayWhoseAnswersAreLost(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 1500
		s, lossy := lossyStage(t, db, false)
		q := newQueue(t, s.store, "q", mongoq.QueueConfig{Retention: time.Hour})
		_, ids := someHistory(t, db, "q", n)
		lossy.LoseReply("insert", 1)
		lossy.LoseRequest("insert", 1)
		done := int64(0)
		for range 5 {
			var err error
			if done, err = q.History().ReplayMany(t.Context(), "x"); err == nil {
				break
			}
			require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown)
		}
		require.EqualValues(t, n, done)
		all := replays(t, db, "q")
		require.Len(t, all, n)
		for _, id := range ids {
			require.Equal(t, 1, all[id])
		}
	})
}
