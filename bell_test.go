package mongoq_test

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// A store of its own, with its own client, stands for another process here: nothing but the database joins the two.

// unhurried is a queue whose waiters hardly look by themselves: only a signal wakes them in time.
var unhurried = mongoq.QueueConfig{PollInterval: time.Minute, Lease: time.Hour, Retention: time.Hour}

// pulse is what a signal may take on a machine that is busy, and much less than a poll.
const pulse = 2 * time.Second

// listener gives a queue in a store of its own in which one waiter sleeps, and follows the signals.
func listener(t testing.TB, db *mongo.Database, name string) (*mongoq.Queue, *pending[*mongoq.Reservation]) {
	t.Helper()
	return listens(t, openStore(t, anotherClient(t, db)), name)
}

func listens(t testing.TB, store *mongoq.Store, name string) (*mongoq.Queue, *pending[*mongoq.Reservation]) {
	t.Helper()
	q := newQueue(t, store, name, unhurried)
	w := beginReserve(t, q)
	require.Eventually(t, func() bool {
		n, _, asleep := mongoq.Line(store, name)
		return n == 1 && mongoq.Hears(store) && asleep
	}, soon, 2*time.Millisecond)
	return q, w
}

func TestPushesOfAnotherProcessWakeAsManyConsumers(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", unhurried)
		_, a := listener(t, db, "q")
		_, b := listener(t, db, "q")
		push(t, q, 1)
		require.NoError(t, lasting(t.Context(), 10*time.Millisecond))
		push(t, q, 2)
		pushed := time.Now()
		got := []int{payloadOf[int](t, &a.result(t).Envelope), payloadOf[int](t, &b.result(t).Envelope)}
		took := time.Since(pushed)
		t.Logf("both had theirs %v after the second push", took)
		require.Less(t, took, pulse)
		require.ElementsMatch(t, []int{1, 2}, got)
	})
}

func TestWhateverMakesAnEnvelopeTakeableWakesOtherProcesses(t *testing.T) {
	t.Parallel()
	type verb = func(context.Context, *mongoq.Reservation) error
	held := func(v verb) func(*testing.T, *mongo.Database, *mongoq.Queue) func(context.Context) error {
		return func(t *testing.T, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			r := tryReserve(t, q)
			return func(ctx context.Context) error { return v(ctx, r) }
		}
	}
	transacted := func(do func(context.Context, *mongoq.Queue) error) func(*testing.T, *mongo.Database, *mongoq.Queue) func(context.Context) error {
		return func(t *testing.T, db *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			return func(ctx context.Context) error {
				return inTransaction(ctx, db, func(ctx context.Context) error { return do(ctx, q) })
			}
		}
	}
	causes := map[string]func(*testing.T, *mongo.Database, *mongoq.Queue) func(context.Context) error{
		"rollback": held(func(ctx context.Context, r *mongoq.Reservation) error {
			return r.Rollback(ctx, errFailed, mongoq.After(0))
		}),
		"release": held(func(ctx context.Context, r *mongoq.Reservation) error { return r.Release(ctx) }),
		"release for a while": held(func(ctx context.Context, r *mongoq.Reservation) error {
			return r.Release(ctx, mongoq.Delay(100*time.Millisecond))
		}),
		"move within": held(func(ctx context.Context, r *mongoq.Reservation) error { return r.MoveToQ(ctx, r.Q) }),
		"resume": func(t *testing.T, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			require.NoError(t, q.Pause(t.Context()))
			push(t, q, "x")
			return q.Resume
		},
		"redrive": func(t *testing.T, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
			return func(ctx context.Context) error { _, err := q.DeadLetters().Redrive(ctx); return err }
		},
		"push for later": func(_ *testing.T, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := q.Push(ctx, "x", mongoq.Delay(100*time.Millisecond))
				return err
			}
		},
		"push in a transaction": transacted(func(ctx context.Context, q *mongoq.Queue) error {
			_, err := q.Push(ctx, "x")
			return err
		}),
		"push of many in a transaction": transacted(func(ctx context.Context, q *mongoq.Queue) error {
			_, err := q.PushMany(ctx, []any{"x", "y"})
			return err
		}),
		"release in a transaction": func(t *testing.T, db *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			r := tryReserve(t, q)
			return func(ctx context.Context) error {
				return inTransaction(ctx, db, func(ctx context.Context) error { return r.Release(ctx) })
			}
		},
	}
	for name, cause := range causes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := mongotest.Database(t, mongotest.ReplicaSet)
			q := newQueue(t, openStore(t, db), "q", unhurried)
			happen := cause(t, db, q)
			_, w := listener(t, db, "q")
			require.NoError(t, happen(t.Context()))
			happened := time.Now()
			w.result(t)
			took := time.Since(happened)
			t.Logf("woke after %v", took)
			limit := pulse
			if name == "resume" { // others may not know of it for a second
				limit += time.Second
			}
			require.Less(t, took, limit)
		})
	}
}

// A busy producer rings seldom, and its last ring is heard.
func TestRingsAreDebouncedAndTheLastIsHeard(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", unhurried)
		_, w := listener(t, db, "q")
		rings := func() int64 {
			n, err := db.Collection("mongoq.signals").CountDocuments(t.Context(), bson.D{})
			require.NoError(t, err)
			return n
		}
		before, began := rings(), time.Now()
		const n = 100_000
		for range n {
			mongoq.RingOut(store, "q")
		}
		pushFrom(t, q, 10, 100)()
		w.result(t)
		took := time.Since(began)
		sent := rings() - before
		t.Logf("%d signals for %d rings in %v", sent, n+100, took)
		require.LessOrEqual(t, sent, int64(took/(10*time.Millisecond))+3)
		require.Less(t, sent, int64(n/10))

		// The last of a burst has to wake one who waits, wherever it falls between two signals.
		_, err := q.Purge(t.Context())
		require.NoError(t, err)
		other := newQueue(t, store, "other", unhurried)
		elsewhere := openStore(t, db)
		far := newQueue(t, elsewhere, "q", unhurried)
		for i := range 20 {
			w := beginReserve(t, far)
			awaitSleep(t, elsewhere, "q", 1)
			for range i % 4 {
				push(t, other, "rings for others")
			}
			push(t, q, "one")
			require.NoError(t, w.result(t).Commit(t.Context()))
		}
	})
}

// A process that takes the server's clock to be behind wakes up for what is due all the same.
func TestAProcessWhoseIdeaOfTheClockIsBehindIsWoken(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	mongoq.Ahead(store, -5*time.Minute)
	q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
	w := beginReserve(t, q)
	awaitRest(t, store, "q")
	push(t, newQueue(t, openStore(t, anotherClient(t, db)), "q"), "x")
	w.result(t)
}

// A ring that comes while a waiter looks when something will be due must wake it, though the look has seen nothing.
func TestARingBesideALookIsNotLost(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	const poll = 4 * time.Second
	lossy := newLossy()
	store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
	q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: poll})
	w := beginReserve(t, q)
	awaitRest(t, store, "q")
	look := lossy.HoldReply("find") // the next look
	defer look.Release()
	await(t, look.Reached(), "it did not look")
	push(t, q, "x")
	require.NoError(t, lasting(t.Context(), 200*time.Millisecond)) // until its own signal has come back, too
	look.Release()
	released := time.Now()
	w.result(t)
	require.Less(t, time.Since(released), poll/2, "it slept until its next look")
}

// Where signals cannot be had, consumers poll, and it is said once. When they can be had, they are used.
func TestWithoutSignalsConsumersPoll(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Faulty(t, kind)
		there := newQueue(t, openStore(t, db.Client().Database(db.Name())), "q", unhurried)
		require.NoError(t, db.Collection("mongoq.signals").Drop(t.Context()))
		heal := mongotest.Fail(t, db, mongotest.Always, bson.D{
			{Key: "failCommands", Value: bson.A{"create"}}, {Key: "errorCode", Value: 13}, // Unauthorized
		})
		const poll = 200 * time.Millisecond
		var log logbook
		store := openStore(t, db, mongoq.Config{Logger: slog.New(&log)})
		w := run(t, newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: poll}), idle)
		for i := range 5 {
			push(t, there, i)
			pushed := time.Now()
			w.awaits(t, mongoq.EventCommitted, i+1)
			require.Less(t, time.Since(pushed), poll+pulse)
		}
		require.NoError(t, w.ends(t))
		said := 0
		for _, line := range log.from(slog.LevelWarn) {
			if line == "WARN mongoq: no signals between processes can be had; consumers poll" {
				said++
			}
		}
		require.Equal(t, 1, said, "%v", log.from(slog.LevelWarn))

		require.NotZero(t, heal())
		here := newQueue(t, store, "q", unhurried)
		near, far := beginReserve(t, here), beginReserve(t, there)
		require.Eventually(t, func() bool { return mongoq.Hears(store) }, soon, 5*time.Millisecond)
		push(t, there, "from there")
		push(t, there, "from there")
		near.result(t)
		far.result(t)
		again := beginReserve(t, there)
		push(t, here, "from here")
		again.result(t)
	})
}

// A process that only pushes finds out by itself that signals can be had.
func TestAPusherThatWasMuteSpeaksAgain(t *testing.T) {
	t.Parallel()
	db := mongotest.Faulty(t, mongotest.ReplicaSet)
	there := mongotest.Faulty(t, mongotest.ReplicaSet).Client().Database(db.Name())
	require.NoError(t, openStore(t, there).Close(t.Context()))
	require.NoError(t, db.Collection("mongoq.signals").Drop(t.Context()))
	heal := mongotest.Fail(t, db, mongotest.Always, bson.D{
		{Key: "failCommands", Value: bson.A{"create"}}, {Key: "errorCode", Value: 13}, // Unauthorized
	})
	var log logbook
	store := openStore(t, db, mongoq.Config{Logger: slog.New(&log)})
	q := newQueue(t, store, "q", unhurried)
	require.NotZero(t, heal())
	_, w := listens(t, openStore(t, there), "q")
	mongoq.MuteForLong(store)
	push(t, newQueue(t, store, "unheard", unhurried), "x")
	require.Eventually(t, func() bool {
		return slices.Contains(log.from(slog.LevelInfo), "INFO mongoq: signals between processes can be had again")
	}, late, 5*time.Millisecond)
	pushed := time.Now()
	push(t, q, "heard")
	w.result(t)
	require.Less(t, time.Since(pushed), pulse)
}

// A signal that could not be sent is sent once more.
func TestASignalThatWasRefusedIsRepeated(t *testing.T) {
	t.Parallel()
	db := mongotest.Faulty(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", unhurried)
	there := mongotest.Faulty(t, mongotest.ReplicaSet).Client().Database(db.Name())
	listening := openStore(t, there)
	_, w := listens(t, listening, "q")
	require.Eventually(t, func() bool { return mongoq.Rests(listening, "q") }, soon, 2*time.Millisecond)
	heal := mongotest.Fail(t, db, mongotest.Times(1), bson.D{
		{Key: "failCommands", Value: bson.A{"insert"}}, {Key: "errorCode", Value: 96}, // OperationFailed
		{Key: "namespace", Value: db.Name() + ".mongoq.signals"},
	})
	push(t, q, "x")
	pushed := time.Now()
	w.result(t)
	require.Less(t, time.Since(pushed), pulse)
	require.Equal(t, 1, heal())
}

// What an operator may do to the signals' collection costs no more than the moment, nor do documents that are no
// signals.
func TestSignalsAreMadeAnew(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	signals := db.Collection("mongoq.signals")
	q := newQueue(t, openStore(t, db), "q", unhurried)
	there, w := listener(t, db, "q")
	for _, odd := range []any{
		bson.D{{Key: "qs", Value: 7}}, bson.D{{Key: "qs", Value: bson.A{1, "q", bson.D{}}}}, bson.D{},
		bson.D{{Key: "qs", Value: bson.A{bson.D{{Key: "q", Value: "q"}, {Key: "when", Value: "soon"}}}}},
	} {
		_, err := signals.InsertOne(t.Context(), odd)
		require.NoError(t, err)
	}
	push(t, q, "after odd ones")
	require.NoError(t, w.result(t).Commit(t.Context()))

	w = beginReserve(t, there)
	require.NoError(t, signals.Drop(t.Context()))
	push(t, q, "makes a collection that is not capped") // it is found at last when signals are heard again
	require.NoError(t, w.result(t).Commit(t.Context()))
	for range 3 {
		w := beginReserve(t, there)
		push(t, q, "again")
		w.result(t)
	}
}

// Nobody follows the signals while nobody waits; who waits again is heard again.
func TestAFollowerComesBack(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.Standalone)
	q := newQueue(t, openStore(t, db), "q", unhurried)
	store := openStore(t, anotherClient(t, db))
	there := newQueue(t, store, "q", unhurried)
	for range 2 {
		w := beginReserve(t, there)
		require.Eventually(t, func() bool { return mongoq.Hears(store) }, soon, 2*time.Millisecond)
		push(t, q, "x")
		w.result(t)
	}
	require.Eventually(t, func() bool { return !mongoq.Hears(store) }, late, 20*time.Millisecond, "it goes on though nobody waits")
	w := beginReserve(t, there)
	require.Eventually(t, func() bool { return mongoq.Hears(store) }, soon, 2*time.Millisecond)
	push(t, q, "x")
	w.result(t)
}

// A worker in another process is woken by what its neighbours give back, too.
func TestAWorkersFailuresWakeItsNeighbours(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		cfg := unhurried
		cfg.Retry = func() backoff.BackOff { return backoff.NewConstantBackOff(0) }
		a, b := newQueue(t, openStore(t, db), "q", cfg), newQueue(t, openStore(t, anotherClient(t, db)), "q", cfg)
		ran := make(chan string, 100)
		h := func(name string) mongoq.Handler {
			return func(_ context.Context, r *mongoq.Reservation) error {
				ran <- name
				if r.Retries < 3 {
					return errFailed
				}
				return nil
			}
		}
		wa, wb := run(t, a, h("a")), run(t, b, h("b"))
		push(t, a, "x")
		for range 4 {
			await(t, ran, "a retry was not begun")
		}
		require.Eventually(t, func() bool {
			return len(wa.told(mongoq.EventCommitted))+len(wb.told(mongoq.EventCommitted)) == 1
		}, soon, 2*time.Millisecond)
	})
}
