package mongoq_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Claimers of several processes that want many at once meet at the head, and then go by turns. Each gets envelopes, none
// gets another's.
func TestClaimersOfSeveralProcessesGoByTurns(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n, processes = 6000, 4
		var c tally
		ctx, cancel := context.WithTimeout(t.Context(), late)
		defer cancel()
		feeder := newQueue(t, openStore(t, db), "q")
		for range n / 1000 {
			_, err := feeder.PushMany(t.Context(), make([]any, 1000))
			require.NoError(t, err)
		}
		got := make([]int, processes)
		var wg sync.WaitGroup
		for i := range processes {
			q := newQueue(t, openStore(t, anotherClient(t, db)), "q")
			wg.Go(func() {
				for {
					rs, err := q.ReserveMany(ctx, 100)
					if err != nil {
						return
					}
					got[i] += len(rs)
					if err := q.CommitMany(ctx, rs); err != nil {
						c.note(nil, err)
						return
					}
					es := make([]*mongoq.Envelope, len(rs))
					for k, r := range rs {
						es[k] = &r.Envelope
					}
					if c.note(es, nil) == n {
						cancel()
					}
				}
			})
		}
		wg.Wait()
		c.requireOnce(t, n)
		requireEmpty(t, db)
		for i, some := range got {
			require.NotZero(t, some, "process %d got nothing", i)
		}
		met, err := db.Collection("mongoq.turns").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "q"}})
		require.NoError(t, err)
		require.EqualValues(t, 1, met, "they never met")
	})
}

// inMillis is a time by the server's clock.
func inMillis(ms int) any { return bson.D{{Key: "$add", Value: bson.A{"$$NOW", ms}}} }

// haveTurn has somebody else have the turn at the queue q until then.
func haveTurn(t testing.TB, db *mongo.Database, until any) {
	t.Helper()
	turns := db.Collection("mongoq.turns")
	_, err := turns.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "q"}, {Key: "by", Value: bson.NewObjectID()}})
	require.NoError(t, err)
	_, err = turns.UpdateOne(t.Context(), bson.D{}, mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "until", Value: until}}}}})
	require.NoError(t, err)
}

// A turn is a courtesy: one that is not given back, by a process that died or paused, lapses, and one that cannot be
// true counts for nothing.
func TestATurnThatIsNotGivenBack(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		turns := db.Collection("mongoq.turns")
		held := func(until any) {
			t.Helper()
			_, err := turns.DeleteMany(t.Context(), bson.D{})
			require.NoError(t, err)
			if until != nil {
				haveTurn(t, db, until)
			}
		}
		for _, until := range []any{nil, inMillis(-1), inMillis(200), inMillis(3_600_000), "never"} {
			held(until)
			for range 3 {
				push(t, q, "x")
			}
			mongoq.HasMet(store, "q")
			rs, err := q.ReserveMany(t.Context(), 3)
			require.NoError(t, err)
			require.Len(t, rs, 3, "%v", until)
			require.NoError(t, q.CommitMany(t.Context(), rs))
			require.Eventually(t, func() bool {
				n, err := turns.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "q"}, {Key: "until", Value: bson.D{{Key: "$exists", Value: true}}}})
				return err == nil && n == 0
			}, soon, 5*time.Millisecond, "its own turn was not given back: %v", until)
		}
	})
}

// The document of a turn may be dropped at any time.
func TestATurnThatWasDropped(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		mongoq.HasMet(store, "q")
		reserveAll(t, q, 3)
		require.NoError(t, db.Collection("mongoq.turns").Drop(t.Context()))
		reserveAll(t, q, 3) // without
		mongoq.KeepsMeeting(store, "q")
		reserveAll(t, q, 3)
		n, err := db.Collection("mongoq.turns").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "q"}})
		require.NoError(t, err)
		require.EqualValues(t, 1, n, "it was not made again: each claim waits for a turn that nobody can have")
	})
}

// An envelope whose deadline passes while the claim waits for its turn is not delivered.
func TestADeadlineThatPassesInATurn(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		pushAll(t, q, ints(3), mongoq.TTL(100*time.Millisecond))
		haveTurn(t, db, inMillis(240)) // less than a turn's length
		mongoq.HasMet(store, "q")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		rs, err := q.ReserveMany(ctx, 3)
		require.ErrorIs(t, err, context.DeadlineExceeded, "%d were delivered after their deadline", len(rs))
	})
}

// Without the right to take turns claims go on without.
func TestClaimsGoOnWithoutTurns(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Faulty(t, kind)
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		for range 3 {
			push(t, q, "x")
		}
		mongoq.HasMet(store, "q")
		heal := mongotest.Fail(t, db, mongotest.Always, bson.D{
			{Key: "failCommands", Value: bson.A{"update"}}, {Key: "errorCode", Value: 13}, // Unauthorized
			{Key: "namespace", Value: db.Name() + ".mongoq.turns"},
		})
		rs, err := q.ReserveMany(t.Context(), 3)
		require.NoError(t, err)
		require.Len(t, rs, 3)
		require.NotZero(t, heal())
		require.NoError(t, q.CommitMany(t.Context(), rs))
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}
