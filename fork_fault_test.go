package mongoq_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// requireJoined waits until n envelopes have come out of a joinsPipeline, and requires that each did once, with all its
// parts, and that nothing else is left.
func requireJoined(t testing.TB, db *mongo.Database, p *mongoq.Pipeline, n int, msg string) {
	t.Helper()
	require.Eventually(t, func() bool {
		done, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "processed", Value: bson.D{{Key: "$type", Value: "date"}}}})
		return err == nil && int(done) == n && int(docs(t, db)) == n
	}, 2*late, 20*time.Millisecond, msg)
	seen := map[int]bool{}
	for e, err := range stageQueue(t, p, "end").History().List(t.Context()) {
		require.NoError(t, err)
		all := payloadOf[[]int](t, e)
		require.Len(t, all, 4, msg)
		require.False(t, seen[all[0]], msg)
		seen[all[0]] = true
	}
	require.Len(t, seen, n, msg)
}

// lossyJoins is a joinsPipeline over a network that loses what a test tells it to, with n envelopes to go through it; the
// database is seen past that network.
func lossyJoins(t testing.TB, n int, lease time.Duration) (*mongo.Database, *mongotest.Lossy, *mongoq.Pipeline) {
	t.Helper()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	lossy := newLossy()
	p := joinsPipeline(t, anotherClient(t, db, options.Client().SetDialer(lossy)), lease)
	_, err := p.PushMany(t.Context(), ints(n))
	require.NoError(t, err)
	return db, lossy, p
}

// forkCommands are those that forks and joins consist of.
var forkCommands = []string{"commitTransaction", "insert", "update", "delete", "find"}

// Whatever answer or request is lost on the way of a fork and its join, each envelope comes out once with all its parts,
// and nothing else is left.
func TestForkAndJoinThoughMessagesAreLost(t *testing.T) {
	t.Parallel()
	for _, command := range forkCommands {
		for _, lose := range []string{"request", "reply"} {
			t.Run(command+" "+lose, func(t *testing.T) {
				t.Parallel()
				const n = 40
				db, lossy, p := lossyJoins(t, n, 2*time.Second)
				if lose == "request" {
					lossy.LoseRequest(command, 4)
				} else {
					lossy.LoseReply(command, 4)
				}
				stop := runPipeline(t, p)
				requireJoined(t, db, p, n, "")
				stop()
				requireJoined(t, db, p, n, "after its end")
			})
		}
	}
}

// Whatever command of a fork and its join the server refuses for a while, or runs without a majority, likewise.
func TestForkAndJoinThoughCommandsAreRefused(t *testing.T) {
	t.Parallel()
	const n = 10
	var dbs []*mongo.Database
	var ps []*mongoq.Pipeline
	var fs []fault
	for _, command := range forkCommands {
		for _, f := range []fault{failing(codeShuttingDown), failing(codeMaxTime), failing(codeUnauthorized), unacknowledged(codeWCFailed)} {
			if f.ran && command == "find" {
				continue
			}
			db := mongotest.Faulty(t, mongotest.ReplicaSet)
			p := joinsPipeline(t, db, time.Second)
			_, err := p.PushMany(t.Context(), ints(n))
			require.NoError(t, err)
			f.name += " of " + command
			f.data = append(bson.D{{Key: "failCommands", Value: bson.A{command}}}, f.data...)
			dbs, ps, fs = append(dbs, db), append(ps, p), append(fs, f)
		}
	}
	for i, f := range fs {
		heal := mongotest.Fail(t, dbs[i], mongotest.Times(5), f.data)
		stop := runPipeline(t, ps[i])
		requireJoined(t, dbs[i], ps[i], n, f.name)
		stop()
		require.Positive(t, heal(), f.name)
		requireJoined(t, dbs[i], ps[i], n, f.name)
	}
}

// Whatever request or answer comes too late, likewise: the others go on without it, and when it comes it changes nothing.
func TestForkAndJoinThoughMessagesComeLate(t *testing.T) {
	t.Parallel()
	for _, command := range forkCommands {
		for _, held := range []string{"request", "reply"} {
			t.Run(command+" "+held, func(t *testing.T) {
				t.Parallel()
				const n = 10
				db, lossy, p := lossyJoins(t, n, time.Second)
				hold := lossy.HoldReply
				if held == "request" {
					hold = lossy.HoldRequest
				}
				message := hold(command)
				stop := runPipeline(t, p)
				awaitHeld(t, message)
				requireJoined(t, db, p, n, "while it is held")
				message.Release()
				stop()
				requireJoined(t, db, p, n, "after it came")
			})
		}
	}
}

// A fork without a join whose commit's answer was lost for good tells what happened by its copies.
func TestForkWhoseAnswerIsLost(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	lossy := newLossy()
	store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
	events := make(chan mongoq.Event, 8)
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "split", Handler: forward, Fork: []string{"a", "b"}, Worker: mongoq.WorkerConfig{OnEvent: func(e mongoq.Event) {
			if e.Kind != mongoq.EventReserved {
				events <- e
			}
		}}},
		&mongoq.Stage{Name: "a", Handler: forward}, &mongoq.Stage{Name: "b", Handler: forward},
	)
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	lossy.LoseReply("commitTransaction", 2)
	runPipeline(t, p, "split")
	require.Equal(t, mongoq.EventForked, await(t, events, "no event").Kind)
	require.EqualValues(t, 2, docs(t, db))
}

// A process that was killed in the middle of a fork's transaction leaves it open: somebody else ends it.
func TestForksLeftOpenAreEnded(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "split", Handler: forward, Fork: []string{"a", "b"}},
		&mongoq.Stage{Name: "a", Handler: forward}, &mongoq.Stage{Name: "b", Handler: forward},
	)
	id, err := p.Push(t.Context(), "x")
	require.NoError(t, err)

	// What the killed process had done: noted its session, and written in a transaction.
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(background)
	require.NoError(t, mongoq.NoteTransaction(t.Context(), store, session, -time.Second))
	require.NoError(t, session.StartTransaction())
	err = mongo.WithSession(t.Context(), session, func(ctx context.Context) error {
		_, err := db.Collection("mongoq").UpdateByID(ctx, id, bson.D{{Key: "$set", Value: bson.D{{Key: "x", Value: 1}}}})
		return err
	})
	require.NoError(t, err)
	began := time.Now()
	runPipeline(t, p, "split")
	require.Eventually(t, func() bool {
		n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "part.of", Value: id}})
		return err == nil && n == 2
	}, late, 10*time.Millisecond)
	require.Less(t, time.Since(began), 20*time.Second, "the server takes a minute or more")
	require.EqualValues(t, 2, docs(t, db))
	require.Eventually(t, func() bool {
		left, err := db.Collection("mongoq.transactions").CountDocuments(t.Context(), bson.D{})
		return err == nil && left == 0
	}, late, 5*time.Millisecond)
}
