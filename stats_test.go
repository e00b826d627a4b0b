package mongoq_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestStatsTellWhatAQueueHolds(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: mongoq.KeepForever, DeadLetter: "dead"})
		for i := range 8 {
			push(t, q, i)
		}
		require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("x")))
		tryReserve(t, q)
		tryReserve(t, q)
		setDue(t, db, tryReserve(t, q).ID, -time.Minute) // its lease ran out a minute ago
		soon := time.Now().Add(time.Hour).Truncate(time.Millisecond)
		push(t, q, "later", mongoq.At(soon.Add(time.Hour)), mongoq.Priority(1))
		push(t, q, "sooner", mongoq.At(soon), mongoq.Priority(4))

		for _, opts := range [][]mongoq.StatsOption{nil, {mongoq.Exact()}} {
			s, err := q.Stats(t.Context(), opts...)
			require.NoError(t, err)
			require.InDelta(t, time.Minute, s.OldestReady, float64(20*time.Second))
			require.True(t, soon.Equal(s.NextDue), "%v, not %v", s.NextDue, soon)
			s.OldestReady, s.NextDue = 0, time.Time{}
			require.Equal(t, mongoq.Stats{Q: "q", Total: 7, Ready: 3, Scheduled: 2, Reserved: 2, Processed: 2, Dead: 1}, s)
		}

		// Dead letters are counted for the queue that they came from, wherever they are; live ones where they are.
		dead := newQueue(t, store, "dead", mongoq.QueueConfig{Retention: mongoq.KeepForever})
		require.Equal(t, "1100", sizes(t, dead))
		r := tryReserve(t, dead)
		require.NoError(t, r.Commit(t.Context()))
		s, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Zero(t, s.Dead, "it was committed, and is history of the dead-letter queue")
		s, err = dead.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, mongoq.Stats{Q: "dead", Processed: 1}, s)
	})
}

// many writes n envelopes with these fields, on the server.
func many(t testing.TB, db *mongo.Database, n int, fields bson.D) {
	t.Helper()
	seed := db.Collection("seed")
	_, err := seed.UpdateByID(t.Context(), 1, bson.D{{Key: "$set", Value: bson.D{}}}, upsert)
	require.NoError(t, err)
	cur, err := seed.Aggregate(t.Context(), bson.A{
		bson.D{{Key: "$project", Value: bson.D{{Key: "_id", Value: 0}, {Key: "n", Value: bson.D{{Key: "$range", Value: bson.A{0, n}}}}}}},
		bson.D{{Key: "$unwind", Value: "$n"}},
		bson.D{{Key: "$replaceWith", Value: bson.D{{Key: "$literal", Value: fields}}}},
		bson.D{{Key: "$merge", Value: bson.D{{Key: "into", Value: "mongoq"}, {Key: "whenMatched", Value: "fail"}}}},
	})
	require.NoError(t, err)
	require.NoError(t, cur.Close(t.Context()))
}

func TestStatsCountUpToTheirBound(t *testing.T) {
	t.Parallel()
	const bound = 10_000
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		past, future := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		one := func(q string, when time.Time, more ...bson.E) bson.D {
			return append(bson.D{{Key: "q", Value: q}, {Key: "when", Value: when}, {Key: "prio", Value: 2}}, more...)
		}
		held := bson.E{Key: "reserved", Value: past}
		done := bson.E{Key: "processed", Value: past}
		died := bson.E{Key: "dead", Value: bson.D{{Key: "from", Value: "died"}, {Key: "kind", Value: "retries"}}}
		type part struct {
			n      int
			fields bson.D
		}
		for _, c := range []struct {
			q            string
			parts        []part
			exact, upTo  mongoq.Stats
			upToNotSplit bool // of what is not due, only the sum is told
		}{
			{q: "full", parts: []part{{bound, one("full", past)}},
				exact: mongoq.Stats{Total: bound, Ready: bound}, upTo: mongoq.Stats{Total: bound, Ready: bound}},
			{q: "ready", parts: []part{{bound + 1, one("ready", past)}},
				exact: mongoq.Stats{Total: bound + 1, Ready: bound + 1}, upTo: mongoq.Stats{Total: bound, Ready: bound, Capped: true}},
			{q: "lapsed", parts: []part{{bound + 1, one("lapsed", past, held)}, {1, one("lapsed", future, held)}},
				exact: mongoq.Stats{Total: bound + 2, Ready: bound + 1, Reserved: 1},
				upTo:  mongoq.Stats{Total: bound + 1, Ready: bound, Reserved: 1, Capped: true}},
			{q: "scheduled", parts: []part{{bound + 1, one("scheduled", future)}},
				exact: mongoq.Stats{Total: bound + 1, Scheduled: bound + 1}, upTo: mongoq.Stats{Total: bound, Scheduled: bound, Capped: true}},
			{q: "both", parts: []part{{6_000, one("both", future)}, {4_001, one("both", future.Add(-time.Minute), held)}},
				exact: mongoq.Stats{Total: bound + 1, Scheduled: 6_000, Reserved: 4_001},
				upTo:  mongoq.Stats{Total: bound, Scheduled: 5_999, Reserved: 4_001, Capped: true}, upToNotSplit: true},
			{q: "done", parts: []part{{bound + 1, one("done", past, done)}},
				exact: mongoq.Stats{Processed: bound + 1}, upTo: mongoq.Stats{Processed: bound, Capped: true}},
			{q: "died", parts: []part{{bound + 1, one("grave", past, died)}},
				exact: mongoq.Stats{Dead: bound + 1}, upTo: mongoq.Stats{Dead: bound, Capped: true}},
		} {
			q := newQueue(t, store, c.q)
			for _, p := range c.parts {
				many(t, db, p.n, p.fields)
			}
			counts := func(opts ...mongoq.StatsOption) mongoq.Stats {
				t.Helper()
				s, err := q.Stats(t.Context(), opts...)
				require.NoError(t, err)
				if s.Ready > 0 {
					require.InDelta(t, time.Hour, s.OldestReady, float64(time.Minute))
				}
				require.Equal(t, s.Scheduled > 0, !s.NextDue.IsZero())
				require.Equal(t, c.q, s.Q)
				s.Q, s.OldestReady, s.NextDue = "", 0, time.Time{}
				return s
			}
			require.Equal(t, c.exact, counts(mongoq.Exact()), "%s, to the end", c.q)
			got := counts()
			if c.upToNotSplit {
				require.InDelta(t, c.upTo.Scheduled, got.Scheduled, 1, c.q)
				require.InDelta(t, c.upTo.Total, got.Total, 1, c.q)
				c.upTo.Scheduled, c.upTo.Total = got.Scheduled, got.Total
			}
			require.Equal(t, c.upTo, got, c.q)
		}
	})
}

func TestQueuesListsAllThatHoldSomething(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		none, err := store.Queues(t.Context())
		require.NoError(t, err)
		require.Empty(t, none)

		long := strings.Repeat("z", mongoq.MaxQueueName)
		names := []string{" ", "A", "a", "a.dead", "a\tb", "b", "held", "history", "later", "paused", "zz", long, "Ünï", "✓"}
		for _, name := range []string{"a", "b", " ", "A", "zz", long, "Ünï", "✓", "a\tb"} {
			push(t, newQueue(t, store, name, mongoq.QueueConfig{DeadLetter: "a.dead"}), name)
		}
		a := newQueue(t, store, "a")
		require.NoError(t, tryReserve(t, a).DeadLetter(t.Context(), errors.New("x")))
		push(t, a, 1)
		push(t, a, 2)
		push(t, newQueue(t, store, "later"), 1, mongoq.Delay(time.Hour))
		held := newQueue(t, store, "held")
		push(t, held, 1)
		tryReserve(t, held)
		history := newQueue(t, store, "history", mongoq.QueueConfig{Retention: time.Hour})
		push(t, history, 1)
		require.NoError(t, tryReserve(t, history).Commit(t.Context()))
		require.NoError(t, newQueue(t, store, "paused").Pause(t.Context()))
		emptied := newQueue(t, store, "emptied")
		push(t, emptied, 1)
		require.NoError(t, tryReserve(t, emptied).Commit(t.Context()))
		resumed := newQueue(t, store, "resumed")
		require.NoError(t, resumed.Pause(t.Context()))
		require.NoError(t, resumed.Resume(t.Context()))

		all, err := openStore(t, anotherClient(t, db)).Queues(t.Context())
		require.NoError(t, err)
		byName := map[string]mongoq.Stats{}
		var got []string
		for _, s := range all {
			got = append(got, s.Q)
			alone, err := newQueue(t, store, s.Q, mongoq.QueueConfig{DeadLetter: "any"}).Stats(t.Context())
			require.NoError(t, err)
			alone.OldestReady, s.OldestReady = 0, 0
			require.Equal(t, alone, s)
			byName[s.Q] = s
		}
		want := append([]string{}, names...)
		require.ElementsMatch(t, want, got)
		require.IsIncreasing(t, got)
		require.Equal(t, mongoq.Stats{Q: "a", Total: 2, Ready: 2, Dead: 1}, byName["a"])
		require.Equal(t, mongoq.Stats{Q: "a.dead", Total: 1, Ready: 1}, byName["a.dead"])
		require.Equal(t, mongoq.Stats{Q: "history", Processed: 1}, byName["history"])
		require.Equal(t, mongoq.Stats{Q: "held", Total: 1, Reserved: 1}, byName["held"])
		require.Equal(t, mongoq.Stats{Q: "paused", Paused: true}, byName["paused"])
		require.EqualValues(t, 1, byName["later"].Scheduled)
	})
}

func TestQueuesListsHundreds(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		docs := make([]any, 0, 600)
		for i := range 200 {
			for p := 1; p <= 3; p++ {
				docs = append(docs, bson.D{{Key: "q", Value: fmt.Sprintf("q%03d", i)}, {Key: "when", Value: time.Now()}, {Key: "prio", Value: p}})
			}
		}
		_, err := db.Collection("mongoq").InsertMany(t.Context(), docs)
		require.NoError(t, err)
		all, err := store.Queues(t.Context())
		require.NoError(t, err)
		require.Len(t, all, 200)
		for i, s := range all {
			require.Equal(t, fmt.Sprintf("q%03d", i), s.Q)
			require.EqualValues(t, 3, s.Total)
		}
	})
}
