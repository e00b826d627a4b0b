package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// soon is how long a test waits for what ought to come within milliseconds.
const soon = 10 * time.Second

// pending is a call that waits, in a goroutine of its own.
type pending[T any] struct {
	cancel context.CancelFunc
	done   chan struct{}
	got    T
	err    error
}

func begin[T any](t testing.TB, call func(context.Context) (T, error)) *pending[T] {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &pending[T]{cancel: cancel, done: make(chan struct{})}
	t.Cleanup(func() {
		cancel()
		<-p.done
	})
	go func() {
		defer close(p.done)
		p.got, p.err = call(ctx)
	}()
	return p
}

// beginReserve waits for an envelope.
func beginReserve(t testing.TB, q *mongoq.Queue, opts ...mongoq.ReserveOption) *pending[*mongoq.Reservation] {
	t.Helper()
	return begin(t, func(ctx context.Context) (*mongoq.Reservation, error) { return q.Reserve(ctx, opts...) })
}

// ended waits for the call to return.
func (p *pending[T]) ended(t testing.TB) (T, error) {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(soon):
		require.FailNow(t, "the call did not return")
	}
	return p.got, p.err
}

// result is what the call returned without an error.
func (p *pending[T]) result(t testing.TB) T {
	t.Helper()
	got, err := p.ended(t)
	require.NoError(t, err)
	return got
}

// awaitSleep returns when that many wait in line in this process and whoever serves them sleeps.
func awaitSleep(t testing.TB, store *mongoq.Store, queue string, waiters int) {
	t.Helper()
	require.Eventually(t, func() bool {
		n, _, asleep := mongoq.Line(store, queue)
		return n == waiters && asleep
	}, soon, 2*time.Millisecond)
}

// awaitRest waits until the claimer of a queue sleeps, after a look, and hears what others ring.
func awaitRest(t testing.TB, store *mongoq.Store, queue string) {
	t.Helper()
	require.Eventually(t, func() bool { return mongoq.Hears(store) && mongoq.Rests(store, queue) }, soon, 2*time.Millisecond)
}

// requireNobody checks that nobody is left in line, and that nobody serves it any more.
func requireNobody(t testing.TB, store *mongoq.Store, queue string) {
	t.Helper()
	require.Eventually(t, func() bool {
		n, serving, _ := mongoq.Line(store, queue)
		return n == 0 && !serving
	}, soon, 2*time.Millisecond)
}

// requireEmpty checks that the store holds no envelope at all.
func requireEmpty(t testing.TB, db *mongo.Database) {
	t.Helper()
	require.Zero(t, docs(t, db))
}

// takers are the calls that wait, each with what ends its envelopes.
var takers = []struct {
	name string
	take func(context.Context, *mongoq.Queue) ([]*mongoq.Envelope, error)
}{
	{"Reserve", func(ctx context.Context, q *mongoq.Queue) ([]*mongoq.Envelope, error) {
		r, err := q.Reserve(ctx)
		if err != nil {
			return nil, err
		}
		return []*mongoq.Envelope{&r.Envelope}, r.Commit(context.WithoutCancel(ctx))
	}},
	{"Pop", func(ctx context.Context, q *mongoq.Queue) ([]*mongoq.Envelope, error) {
		e, err := q.Pop(ctx)
		if err != nil {
			return nil, err
		}
		return []*mongoq.Envelope{e}, nil
	}},
	{"ReserveMany", func(ctx context.Context, q *mongoq.Queue) ([]*mongoq.Envelope, error) {
		rs, err := q.ReserveMany(ctx, 7)
		if err != nil {
			return nil, err
		}
		var es []*mongoq.Envelope
		for _, r := range rs {
			es = append(es, &r.Envelope)
		}
		return es, q.CommitMany(context.WithoutCancel(ctx), rs)
	}},
}

// tally notes what was delivered, from many goroutines.
type tally struct {
	mu   sync.Mutex
	got  map[bson.ObjectID]int
	errs []error
}

func (c *tally) note(es []*mongoq.Envelope, err error) (delivered int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.got == nil {
		c.got = map[bson.ObjectID]int{}
	}
	if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		c.errs = append(c.errs, err)
	}
	for _, e := range es {
		c.got[e.ID]++
		if e.Retries != 0 {
			c.errs = append(c.errs, fmt.Errorf("%s was delivered with %d retries: %v", e.ID.Hex(), e.Retries, e.Failures))
		}
	}
	return len(c.got)
}

func (c *tally) requireOnce(t testing.TB, n int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Empty(t, c.errs)
	require.Len(t, c.got, n)
	for id, times := range c.got {
		require.Equal(t, 1, times, "deliveries of %s", id.Hex())
	}
}

// pushFrom pushes n envelopes from several goroutines at once.
func pushFrom(t testing.TB, q *mongoq.Queue, goroutines, n int) (wait func()) {
	t.Helper()
	errs := make([]error, goroutines)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range n / goroutines {
				if _, err := q.Push(context.Background(), g*n+i); err != nil {
					errs[g] = err
					return
				}
			}
		})
	}
	return func() {
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	}
}

func TestWhatManyPushComesOutOnceEach(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, taker := range takers {
			const n = 250
			q := newQueue(t, store, taker.name)
			var c tally
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					for ctx.Err() == nil {
						if c.note(taker.take(ctx, q)) == n {
							cancel()
						}
					}
				})
			}
			pushFrom(t, q, 50, n)()
			wg.Wait()
			cancel()
			c.requireOnce(t, n)
			require.Equal(t, "0000", sizes(t, q))
			requireNobody(t, store, taker.name)
		}
		requireEmpty(t, db)
	})
}

func TestAnEndedWaitLeavesNobodyInLine(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		ends := []struct {
			name  string
			after time.Duration
			err   error
		}{
			{"timeout", 30 * time.Millisecond, context.DeadlineExceeded},
			{"cancel", 30 * time.Millisecond, context.Canceled},
			{"ended before", 0, context.Canceled},
		}
		for _, taker := range takers {
			for _, end := range ends {
				name := taker.name + ", " + end.name
				q := newQueue(t, store, name, mongoq.QueueConfig{PollInterval: time.Minute})
				later := push(t, q, "later", mongoq.Delay(time.Hour))
				timeout := time.Hour
				if errors.Is(end.err, context.DeadlineExceeded) {
					timeout = end.after
				}
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				if errors.Is(end.err, context.Canceled) {
					time.AfterFunc(end.after, cancel)
				}
				if end.after == 0 {
					cancel()
				}
				begun := time.Now()
				_, err := taker.take(ctx, q)
				cancel()
				require.ErrorIs(t, err, end.err, name)
				require.Less(t, time.Since(begun), soon, name)
				requireNobody(t, store, name)

				// A hidden consumer would take this.
				id := push(t, q, "now")
				require.Equal(t, "2110", sizes(t, q), name)
				r := tryReserve(t, q)
				require.Equal(t, id, r.ID, name)
				require.Equal(t, 1, r.Deliveries, name)
				untouched, err := q.Get(t.Context(), later)
				require.NoError(t, err)
				require.Zero(t, untouched.Deliveries, name)
			}
		}
	})
}

func TestAWaitEndsWhileItsClaimIsUnderWay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		lossy := newLossy()
		store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})

		// The server has given the envelope when the only one who wants it leaves.
		id := push(t, q, "x")
		held := lossy.HoldReply("findAndModify")
		first := beginReserve(t, q)
		<-held.Reached()
		first.cancel()
		_, err := first.ended(t)
		require.ErrorIs(t, err, context.Canceled)
		held.Release()
		requireNobody(t, store, "q")
		require.Eventually(t, func() bool { return sizes(t, q) == "1100" }, soon, 5*time.Millisecond, "it is released")
		r := tryReserve(t, q)
		require.Equal(t, id, r.ID)
		require.Zero(t, r.Retries)
		require.Empty(t, r.Failures)
		require.NoError(t, r.Commit(t.Context()))

		// Another one waits behind it.
		id = push(t, q, "y")
		held = lossy.HoldReply("findAndModify")
		first = beginReserve(t, q)
		<-held.Reached()
		next := beginReserve(t, q)
		require.Eventually(t, func() bool {
			n, _, _ := mongoq.Line(store, "q")
			return n == 2
		}, soon, time.Millisecond)
		first.cancel()
		_, err = first.ended(t)
		require.ErrorIs(t, err, context.Canceled)
		held.Release()
		r = next.result(t)
		require.Equal(t, id, r.ID)
		require.Zero(t, r.Retries)
		require.NoError(t, r.Commit(t.Context()))
		requireNobody(t, store, "q")
		requireEmpty(t, db)
	})
}

func TestImpatientWaitersLoseNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		var all sync.WaitGroup
		for _, taker := range takers {
			all.Go(func() {
				const n, waiters, attempts = 120, 16, 40
				q, err := store.Queue(taker.name, mongoq.QueueConfig{PollInterval: time.Minute})
				if err != nil {
					t.Error(err)
					return
				}
				var c tally
				pushed := pushFrom(t, q, 4, n)
				var wg sync.WaitGroup
				for range waiters {
					wg.Go(func() {
						for range attempts {
							ctx, cancel := context.WithTimeout(context.Background(), rand.N(8*time.Millisecond))
							c.note(taker.take(ctx, q))
							cancel()
						}
					})
				}
				wg.Wait()
				pushed()
				// What nobody was there for long enough to take is there still.
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				for c.note(nil, nil) < n && ctx.Err() == nil {
					c.note(taker.take(ctx, q))
				}
				c.requireOnce(t, n)
			})
		}
		all.Wait()
		for _, taker := range takers {
			requireNobody(t, store, taker.name)
		}
		requireEmpty(t, db)
	})
}

func TestWaitersGetTheLeaseTheyAskedFor(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute, Lease: 50 * time.Second})
		leases := []time.Duration{0, 70 * time.Second, 90 * time.Second, 0, 70 * time.Second}
		var waiting []*pending[*mongoq.Reservation]
		for i, lease := range leases {
			var opts []mongoq.ReserveOption
			if lease > 0 {
				opts = append(opts, mongoq.LeaseFor(lease))
			}
			waiting = append(waiting, beginReserve(t, q, opts...))
			awaitSleep(t, store, "q", i+1)
		}
		for i := range leases {
			push(t, q, i)
		}
		seen := map[int]bool{}
		for i, w := range waiting {
			r := w.result(t)
			want := leases[i]
			if want == 0 {
				want = 50 * time.Second
			}
			require.InDelta(t, want, r.When.Sub(r.Reserved), float64(5*time.Millisecond)) // as far as its clock is known
			seen[payloadOf[int](t, &r.Envelope)] = true
		}
		require.Len(t, seen, len(leases))
	})
}

// One who asks and does not wait is answered even if others, who want another lease, wait before it.
func TestTryReserveIsAnsweredBesideAWaiterWithAnotherLease(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
		first := beginReserve(t, q)
		awaitSleep(t, store, "q", 1)
		try := begin(t, func(ctx context.Context) (*mongoq.Reservation, error) {
			return q.TryReserve(ctx, mongoq.LeaseFor(5*time.Minute))
		})
		_, err := try.ended(t)
		require.ErrorIs(t, err, mongoq.ErrEmpty)

		push(t, q, "x")
		require.Equal(t, "x", payloadOf[string](t, &first.result(t).Envelope))
	})
}

func TestAnIdleWaiterSleepsUntilSomethingFallsDue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, s := spied(t, db)
		store := openStore(t, own)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: 10 * time.Second})
		id := push(t, q, "x", mongoq.Delay(time.Second))
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		s.forget()

		r := reserve(t, q)
		require.Equal(t, id, r.ID)
		requireOnTime(t, e.When, r)
		require.NoError(t, r.Commit(t.Context()))

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = q.Reserve(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.LessOrEqual(t, len(s.names()), 20, "calls in two seconds, of them: %v", s.names()[:min(30, len(s.names()))])
	})
}

// requireOnTime checks that an envelope was delivered when it was due, not before.
func requireOnTime(t testing.TB, due time.Time, r *mongoq.Reservation) {
	t.Helper()
	require.False(t, r.Reserved.Before(due), "early by %v", due.Sub(r.Reserved))
	require.Less(t, r.Reserved.Sub(due), soon/2)
}

func TestDelayedEnvelopesComeOnTimeTheSoonestFirst(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{PollInterval: time.Minute})
		second := push(t, q, "2 s", mongoq.Delay(2*time.Second))
		first := push(t, q, "1 s", mongoq.Delay(time.Second))
		for _, id := range []bson.ObjectID{first, second} {
			e, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			r := reserve(t, q)
			require.Equal(t, id, r.ID)
			requireOnTime(t, e.When, r)
		}
	})
}
