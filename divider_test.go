package mongoq_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// awaitDivided waits until a queue has its dividers.
func awaitDivided(t testing.TB, db *mongo.Database, q string) {
	t.Helper()
	require.Eventually(t, func() bool {
		n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "q", Value: q}, {Key: "divider", Value: true}})
		require.NoError(t, err)
		return n == 4
	}, soon, time.Millisecond)
}

// Whatever a queue tells of itself, its dividers are not in it.
func TestDividersAreNoEnvelopes(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		p := newPipeline(t, store, &mongoq.Stage{Name: "a", Handler: forward})
		q := stageQueue(t, p, "a")
		workThrough(t, q, usedMuch)
		awaitDivided(t, db, q.Name())

		require.Equal(t, "0000", sizes(t, q))
		s, err := q.Stats(t.Context(), mongoq.Exact())
		require.NoError(t, err)
		require.Equal(t, mongoq.Stats{Q: q.Name(), Processed: s.Processed}, s)
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		next, err := q.Peek(t.Context(), 10)
		require.NoError(t, err)
		require.Empty(t, next)
		empty, err := p.Empty(t.Context())
		require.NoError(t, err)
		require.True(t, empty)
		all, err := store.Queues(t.Context())
		require.NoError(t, err)
		require.Empty(t, all)
		for range 2 {
			push(t, q, "x", mongoq.Delay(time.Hour))
			n, err := q.Purge(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
			awaitDivided(t, db, q.Name())
		}

		// Another process that finds the queue busy has nothing to add.
		other := newQueue(t, openStore(t, db), q.Name())
		workThrough(t, other, usedMuch)
		awaitDivided(t, db, q.Name())
		require.Equal(t, "0000", sizes(t, q))
	})
}

// Dividers lie between the priorities, and hide none of them, nor what somebody wrote by hand with one of its own.
func TestDividersHideNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		workThrough(t, q, usedMuch)
		awaitDivided(t, db, "q")
		for _, prio := range []int{4, 2, 3, 1} {
			push(t, q, prio, mongoq.Priority(prio))
		}
		for _, prio := range []any{0.25, 1.75, 7, nil} {
			_, err := db.Collection("mongoq").InsertOne(t.Context(), bson.D{
				{Key: "_id", Value: bson.NewObjectID()}, {Key: "q", Value: "q"}, {Key: "when", Value: time.Now().Add(-time.Minute)},
				{Key: "prio", Value: prio}, {Key: "pushed", Value: time.Now()}, {Key: "payload", Value: -1},
			})
			require.NoError(t, err)
		}
		var got []int
		for range 8 {
			if n := payloadOf[int](t, &tryReserve(t, q).Envelope); n > 0 {
				got = append(got, n)
			}
		}
		require.Equal(t, []int{1, 2, 3, 4}, got)
		_, err := q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}

// One who waits gets them, too, though no look for the next one shows them.
func TestWhatHasAPriorityOfItsOwnIsNotLeftWaiting(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, used := range []bool{false, true} {
			q := newQueue(t, store, fmt.Sprint("used: ", used))
			if used {
				workThrough(t, q, usedMuch)
			}
			waits := beginReserve(t, q)
			awaitSleep(t, store, q.Name(), 1)
			_, err := db.Collection("mongoq").InsertOne(t.Context(), bson.D{
				{Key: "_id", Value: bson.NewObjectID()}, {Key: "q", Value: q.Name()}, {Key: "when", Value: time.Now().Add(-time.Minute)},
				{Key: "prio", Value: 7}, {Key: "pushed", Value: time.Now()}, {Key: "payload", Value: "x"},
			})
			require.NoError(t, err)
			await(t, waits.done, "it was left waiting") // ten seconds, and the poll interval
			require.Equal(t, "x", payloadOf[string](t, &waits.result(t).Envelope))
		}
	})
}
