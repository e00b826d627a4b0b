package mongoq_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Whatever makes an envelope takeable wakes the one who waits for it in this process, long before it would look by
// itself.
func TestWhatMakesAnEnvelopeTakeableWakesAWaiter(t *testing.T) {
	t.Parallel()
	cfg := mongoq.QueueConfig{
		PollInterval: time.Minute, Retention: time.Hour,
		Retry: func() backoff.BackOff { return backoff.WithMaxRetries(backoff.NewConstantBackOff(0), 1) },
	}
	fails := errors.New("it failed")
	// Each prepares what happens to a queue, and gives what makes it happen.
	causes := []struct {
		name    string
		prepare func(t *testing.T, store *mongoq.Store, db *mongo.Database, q *mongoq.Queue) func(context.Context) error
	}{
		{"push", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			return func(ctx context.Context) error { _, err := q.Push(ctx, "x"); return err }
		}},
		{"push of many", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := q.PushMany(ctx, []any{mongoq.With("later", mongoq.Delay(time.Hour)), "x"})
				return err
			}
		}},
		{"push with a delay", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "later", mongoq.Delay(time.Hour))
			return func(ctx context.Context) error {
				_, err := q.Push(ctx, "x", mongoq.Delay(200*time.Millisecond))
				return err
			}
		}},
		{"rollback", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			r := tryReserve(t, q)
			return func(ctx context.Context) error { return r.Rollback(ctx, fails, mongoq.After(0)) }
		}},
		{"release", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			r := tryReserve(t, q)
			return func(ctx context.Context) error { return r.Release(ctx) }
		}},
		{"release until a time", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			r := tryReserve(t, q)
			return func(ctx context.Context) error {
				return r.Release(ctx, mongoq.At(time.Now().Add(200*time.Millisecond)))
			}
		}},
		{"move", func(t *testing.T, store *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			from := newQueue(t, store, q.Name()+" from", cfg)
			push(t, from, "x")
			r := tryReserve(t, from)
			return func(ctx context.Context) error { return r.MoveToQ(ctx, q.Name()) }
		}},
		{"redrive", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), fails))
			return func(ctx context.Context) error { _, err := q.DeadLetters().Redrive(ctx); return err }
		}},
		{"replay", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			id := push(t, q, "x")
			require.NoError(t, tryReserve(t, q).Commit(t.Context()))
			return func(ctx context.Context) error { _, err := q.History().Replay(ctx, id); return err }
		}},
		{"resume", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			require.NoError(t, q.Pause(t.Context()))
			return q.Resume
		}},
		{"dead-letter", func(t *testing.T, store *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			return dying(t, store, q, cfg, func(ctx context.Context, r *mongoq.Reservation) error { return r.DeadLetter(ctx, fails) })
		}},
		{"rollback for good", func(t *testing.T, store *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			return dying(t, store, q, cfg, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Rollback(ctx, backoff.Permanent(fails))
			})
		}},
		{"expiry to the dead letters", func(t *testing.T, store *mongoq.Store, db *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			with := cfg
			with.DeadLetter, with.OnExpire = q.Name(), mongoq.ToDeadLetter
			from := newQueue(t, store, q.Name()+" from", with)
			expire(t, db, push(t, from, "x", mongoq.TTL(time.Hour)))
			return func(ctx context.Context) error { return emptied(from.TryReserve(ctx)) }
		}},
		{"setting aside", func(t *testing.T, store *mongoq.Store, db *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			with := cfg
			with.DeadLetter = q.Name()
			from := newQueue(t, store, q.Name()+" from", with)
			insertRaw(t, db, []any{bson.D{
				{Key: "q", Value: from.Name()}, {Key: "when", Value: time.UnixMilli(1)}, {Key: "prio", Value: 2},
				{Key: "payload", Value: "x"}, {Key: "retries", Value: "none"},
			}})
			return func(ctx context.Context) error { return emptied(from.TryReserve(ctx)) }
		}},
		{"lapse of a lease", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			tryReserve(t, q, mongoq.LeaseFor(400*time.Millisecond))
			return func(context.Context) error { return nil }
		}},
		{"extension to a shorter lease", func(t *testing.T, _ *mongoq.Store, _ *mongo.Database, q *mongoq.Queue) func(context.Context) error {
			push(t, q, "x")
			r := tryReserve(t, q)
			return func(ctx context.Context) error { return r.Extend(ctx, 200*time.Millisecond) }
		}},
	}
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, cause := range causes {
			t.Run(cause.name, func(t *testing.T) {
				t.Parallel()
				q := newQueue(t, store, cause.name, cfg)
				happen := cause.prepare(t, store, db, q)
				w := beginReserve(t, q)
				if cause.name != "lapse of a lease" { // which does not wait for us
					awaitSleep(t, store, q.Name(), 1)
				}
				require.NoError(t, happen(t.Context()))
				require.Equal(t, "x", payloadOf[string](t, &w.result(t).Envelope))
			})
		}
	})
}

// dying has an envelope of another queue, whose dead letters go to q, end by a verb.
func dying(t *testing.T, store *mongoq.Store, q *mongoq.Queue, cfg mongoq.QueueConfig, verb func(context.Context, *mongoq.Reservation) error) func(context.Context) error {
	t.Helper()
	cfg.DeadLetter = q.Name()
	from := newQueue(t, store, q.Name()+" from", cfg)
	push(t, from, "x")
	r := tryReserve(t, from)
	return func(ctx context.Context) error { return verb(ctx, r) }
}

// emptied wants a TryReserve to have found nothing.
func emptied(r *mongoq.Reservation, err error) error {
	if errors.Is(err, mongoq.ErrEmpty) {
		return nil
	}
	return errors.Join(errors.New("something was delivered"), err)
}

func TestPausedWaitersGoOnWaiting(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, taker := range takers {
			q := newQueue(t, store, taker.name, mongoq.QueueConfig{PollInterval: time.Minute})
			before := begin(t, func(ctx context.Context) ([]*mongoq.Envelope, error) { return taker.take(ctx, q) })
			awaitSleep(t, store, taker.name, 1)
			require.NoError(t, q.Pause(t.Context()))
			push(t, q, 1)
			push(t, q, 2)

			// A wait ends as usual, with its context, and nothing is taken meanwhile.
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			_, err := taker.take(ctx, q)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			_, err = q.TryReserve(t.Context())
			require.ErrorIs(t, err, mongoq.ErrQueuePaused)
			require.Equal(t, "2200", sizes(t, q))
			select {
			case <-before.done:
				require.FailNow(t, "a paused queue delivered")
			default:
			}

			after := begin(t, func(ctx context.Context) ([]*mongoq.Envelope, error) { return taker.take(ctx, q) })
			awaitSleep(t, store, taker.name, 2)
			require.NoError(t, q.Resume(t.Context()))
			require.NotEmpty(t, before.result(t))
			if taker.name == "ReserveMany" { // which took both
				push(t, q, 3)
			}
			require.NotEmpty(t, after.result(t))
			require.Equal(t, "0000", sizes(t, q))
			requireNobody(t, store, taker.name)
		}
	})
}

func TestAnotherStoresPauseHoldsHere(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		here := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
		there := newQueue(t, openStore(t, anotherClient(t, db)), "q")

		w := beginReserve(t, here)
		awaitSleep(t, store, "q", 1)
		require.NoError(t, there.Pause(t.Context()))
		require.Eventually(t, func() bool { // "within about a second"
			_, err := here.TryReserve(t.Context())
			return errors.Is(err, mongoq.ErrQueuePaused)
		}, soon, 20*time.Millisecond)
		push(t, here, "x", mongoq.Priority(1)) // the two know the server's clock within bounds of their own
		push(t, there, "y")
		require.Equal(t, "2200", sizes(t, here))

		// Its waiters look for the end of the pause each second.
		require.NoError(t, there.Resume(t.Context()))
		require.Equal(t, "x", payloadOf[string](t, &w.result(t).Envelope))
	})
}

// What happens in another process wakes a waiter, too.
func TestAnotherStoreWakesAWaiter(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		here := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
		there := newQueue(t, openStore(t, anotherClient(t, db)), "q")
		wakes := func(happen func(context.Context) error) *mongoq.Reservation {
			t.Helper()
			w := beginReserve(t, here)
			awaitSleep(t, store, "q", 1)
			require.NoError(t, happen(t.Context()))
			return w.result(t)
		}
		for range 3 {
			r := wakes(func(ctx context.Context) error { _, err := there.Push(ctx, "x"); return err })
			require.NoError(t, r.Commit(t.Context()))
		}
		r := wakes(func(ctx context.Context) error {
			_, err := there.Push(ctx, "x", mongoq.Delay(200*time.Millisecond))
			return err
		})
		require.NoError(t, r.Commit(t.Context()))
		push(t, there, "x")
		held := tryReserve(t, there)
		r = wakes(func(ctx context.Context) error { return held.Release(ctx) })
		require.NoError(t, r.MoveToQ(t.Context(), "elsewhere"))
		held = tryReserve(t, newQueue(t, openStore(t, anotherClient(t, db)), "elsewhere"))
		r = wakes(func(ctx context.Context) error { return held.MoveToQ(ctx, "q") })
		require.NoError(t, r.Commit(t.Context()))
	})
}
