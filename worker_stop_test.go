package mongoq_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Nothing is begun once the context has ended, not even by the handler that ended it.
func TestAStoppedWorkerBeginsNothing(t *testing.T) {
	t.Parallel()
	for _, concurrency := range []int{1, 4} {
		mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
			q := newQueue(t, openStore(t, db), "q")
			const n, end = 1000, 500
			pushAll(t, q, ints(n))
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var begun, after atomic.Int64
			w, err := q.Worker(func(context.Context, *mongoq.Reservation) error {
				if ctx.Err() != nil {
					after.Add(1)
				}
				if begun.Add(1) == end {
					stop()
				}
				return nil
			}, mongoq.WorkerConfig{Concurrency: concurrency})
			require.NoError(t, err)
			require.NoError(t, w.Run(ctx))
			// Others may have been on their way into their handlers at that moment, one each.
			require.Less(t, after.Load(), int64(concurrency))

			// What ran is committed, what was not begun is there for others, untouched, and nothing is held.
			left := n - int(begun.Load())
			s, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, left, s.Total)
			require.EqualValues(t, left, s.Ready)
			require.Zero(t, s.Reserved)
		})
	}
}

func TestWhatNeverStartedGoesToAnotherWorkerAtOnce(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		cfg := mongoq.QueueConfig{Lease: time.Hour, PollInterval: time.Minute}
		here := newQueue(t, openStore(t, db), "q", cfg)
		there := newQueue(t, openStore(t, anotherClient(t, db)), "q", cfg)
		const n = 3000
		var mu sync.Mutex
		ran, retries := map[bson.ObjectID]int{}, 0
		half := make(chan func(), 1)
		h := func(_ context.Context, r *mongoq.Reservation) error {
			mu.Lock()
			defer mu.Unlock()
			ran[r.ID]++
			retries += r.Retries
			if len(ran) == n/2 {
				(<-half)()
			}
			return nil
		}
		w := run(t, here, h)
		var stopped time.Time
		half <- func() { // in the midst of it, with much fetched ahead
			stopped = time.Now()
			w.stop()
		}
		pushAll(t, here, ints(n))
		await(t, w.done, "Run did not return")
		require.NoError(t, w.err)
		took := time.Since(stopped)
		done := len(w.told(mongoq.EventCommitted))
		require.Less(t, done, n, "it was done before it could be stopped")
		s, err := there.Stats(t.Context())
		require.NoError(t, err)
		t.Logf("the stop took %v; %d done, %d still reserved, %d left", took, done, s.Reserved, s.Total)
		require.Zero(t, s.Reserved, "a process that ends now leaves them to their leases")
		require.EqualValues(t, n-done, s.Ready)

		other := run(t, there, h)
		other.awaits(t, mongoq.EventCommitted, n-done)
		require.NoError(t, other.ends(t))
		require.Len(t, ran, n)
		for _, times := range ran {
			require.Equal(t, 1, times)
		}
		require.Zero(t, retries)
		requireEmpty(t, db)
	})
}

// What is claimed for a worker that stops in the same moment is given back: the one that a claim after a sleep takes, or
// the several that it takes where several came the last time.
func TestAClaimUnderWayIsGivenBackByAStop(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for q, claim := range map[string]struct {
			before  int // pushed in one call
			command string
		}{"one": {1, "findAndModify"}, "several": {2, "update"}} {
			lossy := newLossy()
			cfg := mongoq.QueueConfig{Lease: time.Hour, PollInterval: time.Minute}
			store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
			here, there := newQueue(t, store, q, cfg), newQueue(t, openStore(t, db), q, cfg)
			w := run(t, here, idle)
			require.Eventually(t, func() bool { return mongoq.Hears(store) }, soon, 2*time.Millisecond)
			awaitSleep(t, store, q, 1)
			pushAll(t, there, ints(claim.before))
			w.awaits(t, mongoq.EventCommitted, claim.before)
			awaitSleep(t, store, q, 1)
			held := lossy.HoldReply(claim.command)
			defer held.Release()
			ids := pushAll(t, there, ints(5))
			await(t, held.Reached(), "nothing was claimed")
			w.stop()
			held.Release()
			require.NoError(t, w.ends(t))
			require.Len(t, w.told(mongoq.EventCommitted), claim.before)

			other := run(t, there, idle)
			for _, e := range other.awaits(t, mongoq.EventCommitted, len(ids)) {
				require.Zero(t, e.Retries)
			}
			require.NoError(t, other.ends(t))
		}
	})
}

func TestRunningHandlersMayEndWithinTheDrain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const lease = 1500 * time.Millisecond
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: lease})
		begun, finish := make(chan struct{}, 8), make(chan struct{})
		w := run(t, q, until(begun, finish), mongoq.WorkerConfig{Concurrency: 4})
		pushAll(t, q, ints(4))
		for range 4 {
			await(t, begun, "not all were begun")
		}
		w.stop()
		require.NoError(t, lasting(t.Context(), lease+200*time.Millisecond)) // heartbeats go on
		select {
		case <-w.done:
			require.FailNow(t, "Run did not wait for its handlers")
		default:
		}
		close(finish)
		require.NoError(t, w.ends(t))
		require.Len(t, w.told(mongoq.EventCommitted), 4)
		requireEmpty(t, db)
	})
}

func TestADrainThatLastsTooLongCancelsHandlers(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: rest(9)})
		begun := make(chan struct{}, 1)
		ends := make(chan time.Time, 1)
		w := run(t, q, func(ctx context.Context, _ *mongoq.Reservation) error {
			begun <- struct{}{}
			<-ctx.Done()
			ends <- time.Now()
			return errors.Join(errFailed, context.Cause(ctx))
		}, mongoq.WorkerConfig{DrainTimeout: 300 * time.Millisecond})
		id := push(t, q, "x")
		await(t, begun, "it was not begun")
		stopped := time.Now()
		require.NoError(t, w.ends(t))
		require.GreaterOrEqual(t, (<-ends).Sub(stopped), 300*time.Millisecond)

		// What it then returned was stored before Run returned.
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 1, e.Retries)
		require.Contains(t, e.Failures[0].Msg, "it failed")
		require.Contains(t, e.Failures[0].Msg, "the worker stops")
	})
}

// A claim whose answer is late, and what gives back what it got, take long: the drain does not wait for them to begin.
func TestADrainBeginsThoughAClaimIsUnderWay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, true)
		q := s.queue(t)
		begun, canceled := make(chan struct{}, 1), make(chan error, 1)
		w := run(t, q, func(ctx context.Context, _ *mongoq.Reservation) error {
			begun <- struct{}{}
			<-ctx.Done()
			canceled <- context.Cause(ctx)
			return nil
		}, mongoq.WorkerConfig{Concurrency: 2, DrainTimeout: 100 * time.Millisecond})
		push(t, q, "x")
		await(t, begun, "it was not begun")
		awaitSleep(t, s.store, q.Name(), 1)
		one, many := lossy.HoldReply("findAndModify"), lossy.HoldReply("find")
		defer one.Release()
		defer many.Release()
		push(t, newQueue(t, openStore(t, db), q.Name()), "y")
		mongoq.Ring(s.store, q.Name())
		select {
		case <-one.Reached():
		case <-many.Reached():
		case <-time.After(soon):
			require.FailNow(t, "no claim is under way")
		}
		w.stop()
		select {
		case cause := <-canceled:
			require.ErrorContains(t, cause, "the worker stops")
		case <-time.After(5 * time.Second):
			require.Fail(t, "the handler was not told")
		}
		one.Release()
		many.Release()
		require.NoError(t, w.ends(t))
	})
}

func TestAHandlerThatIgnoresItsContextIsAbandonedAndReported(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		cfg := mongoq.QueueConfig{Lease: 2 * time.Second, Retry: retries(9), PollInterval: 100 * time.Millisecond}
		q := newQueue(t, openStore(t, db), "q", cfg)
		begun, finish := make(chan struct{}, 8), make(chan struct{})
		release := sync.OnceFunc(func() { close(finish) })
		defer release()
		returned := make(chan struct{})
		w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
			begun <- struct{}{}
			if r.Payload.Type == bson.TypeString {
				defer close(returned)
				<-finish
				return nil
			}
			<-ctx.Done()
			return nil
		}, mongoq.WorkerConfig{DrainTimeout: 200 * time.Millisecond})
		stubborn := push(t, q, "stubborn")
		pushAll(t, q, ints(3))
		for range 4 {
			await(t, begun, "not all were begun")
		}
		stopped := time.Now()
		err := w.ends(t)
		t.Logf("the drain took %v, with a DrainTimeout of 200 ms", time.Since(stopped))
		var abandoned *mongoq.AbandonedError
		require.ErrorAs(t, err, &abandoned)
		require.Equal(t, []bson.ObjectID{stubborn}, abandoned.IDs)
		require.ErrorContains(t, err, "1 handlers ignored the end of their context")
		require.Len(t, w.log.from(slog.LevelError), 1)
		require.Len(t, w.told(mongoq.EventCommitted), 3, "the others were committed")

		// Nobody extends its lease any more: it is delivered again, and what the first one comes to is nothing.
		again := reserve(t, q)
		require.Equal(t, stubborn, again.ID)
		require.Equal(t, 1, again.Retries)
		release()
		await(t, returned, "the stubborn one did not return")
		require.NoError(t, again.Commit(t.Context()))
		requireEmpty(t, db)
	})
}

// stubbornWithText is a handler that ignores its context until it may finish, where the payload is a text; others end at once.
func stubbornWithText(begun chan<- struct{}, finish <-chan struct{}) mongoq.Handler {
	return func(_ context.Context, r *mongoq.Reservation) error {
		begun <- struct{}{}
		if r.Payload.Type == bson.TypeString {
			<-finish
		}
		return nil
	}
}

// A commit that is on its way when the drain ends is waited for, and is nobody's abandoned job.
func TestACommitOnItsWayIsNotAbandoned(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		lossy := newLossy()
		store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute})
		begun, finish := make(chan struct{}, 8), make(chan struct{})
		defer close(finish)
		commit := lossy.HoldReply("delete")
		defer commit.Release()
		w := run(t, q, stubbornWithText(begun, finish), mongoq.WorkerConfig{DrainTimeout: 10 * time.Millisecond})
		stubborn := push(t, q, "stubborn")
		await(t, begun, "it was not begun")
		push(t, q, 1)
		await(t, commit.Reached(), "nothing was committed")
		w.stop()
		require.Eventually(t, func() bool { return len(w.log.from(slog.LevelError)) > 0 }, late, 2*time.Millisecond)
		select {
		case <-w.done:
			require.FailNow(t, "Run did not wait for a commit that was on its way")
		case <-time.After(20 * time.Millisecond):
		}
		commit.Release()
		var abandoned *mongoq.AbandonedError
		require.ErrorAs(t, w.ends(t), &abandoned)
		require.Equal(t, []bson.ObjectID{stubborn}, abandoned.IDs)
		require.Len(t, w.told(mongoq.EventCommitted), 1)
	})
}

// A job that is done and waits for its turn to be stored is neither abandoned nor forgotten.
func TestAJobThatWaitsToBeStoredIsNotAbandoned(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute})
		begun, finish := make(chan struct{}, 8), make(chan struct{})
		defer close(finish)
		w := run(t, q, stubbornWithText(begun, finish), mongoq.WorkerConfig{DrainTimeout: 10 * time.Millisecond})
		stubborn := push(t, q, "stubborn")
		await(t, begun, "it was not begun")
		empty := mongoq.FillBehind(store)
		defer empty()
		push(t, q, 1)
		await(t, begun, "it was not begun")
		w.stop()
		require.Eventually(t, func() bool { return len(w.log.from(slog.LevelError)) > 0 }, late, 2*time.Millisecond)
		empty()
		var abandoned *mongoq.AbandonedError
		require.ErrorAs(t, w.ends(t), &abandoned)
		require.Equal(t, []bson.ObjectID{stubborn}, abandoned.IDs)
		require.Len(t, w.told(mongoq.EventCommitted), 1)
	})
}

func TestCommitsAreStoredWhenRunReturns(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		lossy := newLossy()
		store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute})
		commit := lossy.HoldRequest("delete") // the first of them; others stand in line behind it
		defer commit.Release()
		var begun atomic.Int64
		w := run(t, q, func(context.Context, *mongoq.Reservation) error {
			begun.Add(1)
			return nil
		})
		pushAll(t, q, ints(50))
		await(t, commit.Reached(), "nothing was committed")
		require.Eventually(t, func() bool { return begun.Load() == 50 }, late, 2*time.Millisecond, "handlers wait for commits")
		w.stop()
		select {
		case <-w.done:
			require.FailNow(t, "Run did not wait for its commits")
		case <-time.After(50 * time.Millisecond):
		}
		commit.Release()
		require.NoError(t, w.ends(t))
		require.Len(t, w.told(mongoq.EventCommitted), 50)
		requireEmpty(t, db)
	})
}

// A worker that abandoned a handler may run again; when that handler comes back, it works for nobody.
func TestAnAbandonedHandlerDoesNotJoinTheNextRun(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: time.Hour, Retry: retries(9)})
		begun, finish, back := make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
		var c crowd
		var dead atomic.Int64
		w, err := q.Worker(func(ctx context.Context, r *mongoq.Reservation) error {
			if r.Payload.Type == bson.TypeString {
				begun <- struct{}{}
				<-finish
				defer close(back)
				return nil
			}
			c.enter()
			defer c.leave()
			if ctx.Err() != nil {
				dead.Add(1)
			}
			return lasting(ctx, 2*time.Millisecond)
		}, mongoq.WorkerConfig{Concurrency: 1, DrainTimeout: time.Millisecond, Logger: slog.New(&logbook{})})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		stubborn := push(t, q, "stubborn")
		await(t, begun, "it was not begun")
		stop()
		var abandoned *mongoq.AbandonedError
		require.ErrorAs(t, await(t, ended, "Run did not return"), &abandoned)

		ctx, stop = context.WithCancel(t.Context())
		defer stop()
		go func() { ended <- w.Run(ctx) }()
		pushAll(t, q, ints(50))
		require.Eventually(t, func() bool { return c.most.Load() > 0 }, late, time.Millisecond)
		close(finish)
		await(t, back, "the stubborn one did not return")
		require.Eventually(t, func() bool {
			s, err := q.Stats(t.Context())
			return err == nil && s.Total <= 1
		}, late, 5*time.Millisecond)
		stop()
		require.NoError(t, await(t, ended, "Run did not return"))
		require.EqualValues(t, 1, c.most.Load(), "more handlers than Concurrency")
		require.Zero(t, dead.Load(), "handlers were begun with a context that had ended")
		e, err := q.Get(t.Context(), stubborn)
		require.NoError(t, err, "what an abandoned handler returned was stored")
		require.Zero(t, e.Processed)
	})
}

// A worker of a store that is closed has nothing to do any more, and says so.
func TestAWorkerEndsWithItsStore(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		w := run(t, q, idle)
		push(t, q, "x")
		w.awaits(t, mongoq.EventCommitted, 1)
		require.NoError(t, store.Close(t.Context()))
		await(t, w.done, "Run went on without its store")
		require.ErrorIs(t, w.err, mongoq.ErrClosed)
	})
}
