package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// handled has a worker handle one envelope once, and gives what was told of it and how it is stored then.
func handled(t *testing.T, store *mongoq.Store, cfg mongoq.QueueConfig, h mongoq.Handler) (mongoq.Event, *mongoq.Envelope) {
	t.Helper()
	cfg.Retention = time.Hour
	q := newQueue(t, store, "q", cfg)
	var times atomic.Int64
	w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
		times.Add(1)
		return h(ctx, r)
	})
	id := push(t, q, "x")
	require.Eventually(t, func() bool { return len(w.told()) == 2 }, late, 2*time.Millisecond)
	require.NoError(t, w.ends(t))
	events := w.told()
	require.Len(t, events, 2)
	require.Equal(t, mongoq.EventReserved, events[0].Kind)
	require.EqualValues(t, 1, times.Load())
	e, err := store.Get(t.Context(), id)
	require.NoError(t, err)
	return events[1], e
}

func TestWhatAHandlerReturnsSettlesItsEnvelope(t *testing.T) {
	t.Parallel()
	const policy = time.Hour
	cases := []struct {
		name    string
		returns error
		retries uint64 // that the policy allows
		kind    mongoq.EventKind
		dead    mongoq.DeadKind
		failed  string        // the failure's text; empty: none counts
		wait    time.Duration // from the failure to when it is due again
	}{
		{"nil", nil, 1, mongoq.EventCommitted, "", "", 0},
		{"error", errFailed, 1, mongoq.EventFailed, "", "it failed", policy},
		{"error at the policy's end", errFailed, 0, mongoq.EventDeadLettered, mongoq.DeadRetries, "it failed", 0},
		{"permanent", backoff.Permanent(errFailed), 1, mongoq.EventDeadLettered, mongoq.DeadPermanent, "it failed", 0},
		{"wrapped permanent", fmt.Errorf("so: %w", backoff.Permanent(errFailed)), 1, mongoq.EventDeadLettered, mongoq.DeadPermanent, "so: it failed", 0},
		{"RetryIn", mongoq.RetryIn(2*time.Hour, errFailed), 1, mongoq.EventFailed, "", "it failed", 2 * time.Hour},
		{"wrapped RetryIn", fmt.Errorf("so: %w", mongoq.RetryIn(2*time.Hour, errFailed)), 1, mongoq.EventFailed, "", "so: it failed", 2 * time.Hour},
		{"RetryIn without an error", mongoq.RetryIn(2*time.Hour, nil), 1, mongoq.EventFailed, "", "retry", 2 * time.Hour},
		{"RetryIn at the policy's end", mongoq.RetryIn(2*time.Hour, errFailed), 0, mongoq.EventDeadLettered, mongoq.DeadRetries, "it failed", 0},
		{"RetryIn of a permanent error", mongoq.RetryIn(2*time.Hour, backoff.Permanent(errFailed)), 1, mongoq.EventDeadLettered, mongoq.DeadPermanent, "it failed", 0},
		{"Snooze", mongoq.Snooze(3 * time.Hour), 0, mongoq.EventReleased, "", "", 3 * time.Hour},
		{"wrapped Snooze", fmt.Errorf("so: %w", mongoq.Snooze(3*time.Hour)), 0, mongoq.EventReleased, "", "", 3 * time.Hour},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				store := openStore(t, db)
				ev, e := handled(t, store, mongoq.QueueConfig{Retry: rest(c.retries)}, func(context.Context, *mongoq.Reservation) error { return c.returns })
				require.Equal(t, c.kind, ev.Kind)
				require.Equal(t, c.returns, ev.Err)
				require.Equal(t, 1, e.Deliveries)
				require.Equal(t, c.returns == nil, !e.Processed.IsZero())
				require.Equal(t, c.returns != nil, e.Reserved.IsZero())
				if c.failed == "" {
					require.Zero(t, e.Retries)
					require.Empty(t, e.Failures)
				} else {
					require.Len(t, e.Failures, 1)
					require.Equal(t, c.failed, e.Failures[0].Msg)
				}
				switch {
				case c.dead != "":
					require.NotNil(t, e.Dead)
					require.Equal(t, c.dead, e.Dead.Kind)
					require.Equal(t, "q", e.Dead.From)
					require.Equal(t, "q.dead", e.Q)
				case c.failed != "":
					require.Nil(t, e.Dead)
					require.Equal(t, 1, e.Retries)
					require.Equal(t, c.wait, e.When.Sub(e.Failures[0].At))
				case c.wait > 0:
					require.WithinDuration(t, serverTime(t, db).Add(c.wait), e.When, late)
				}
			})
		})
	}
}

func TestShortWaitsOfHandlersEndByThemselves(t *testing.T) {
	t.Parallel()
	waits := map[string]func(attempt int) error{
		"RetryIn at once":   func(int) error { return mongoq.RetryIn(0, errFailed) },
		"RetryIn of minus":  func(int) error { return mongoq.RetryIn(-time.Hour, errFailed) },
		"RetryIn soon":      func(int) error { return mongoq.RetryIn(50*time.Millisecond, errFailed) },
		"Snooze at once":    func(int) error { return mongoq.Snooze(0) },
		"Snooze of minus":   func(int) error { return mongoq.Snooze(-time.Hour) },
		"Snooze for a bit":  func(int) error { return mongoq.Snooze(50 * time.Millisecond) },
		"one, then another": func(n int) error { return []error{mongoq.Snooze(0), mongoq.RetryIn(0, errFailed), mongoq.Snooze(0)}[n] },
	}
	for name, wait := range waits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				// The policy would wait an hour, and the poll a minute.
				q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: rest(9), PollInterval: time.Minute})
				w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
					if r.Deliveries <= 3 {
						return wait(r.Deliveries - 1)
					}
					return nil
				})
				push(t, q, "x")
				w.awaits(t, mongoq.EventCommitted, 1)
				require.NoError(t, w.ends(t)) // by when every event is told
				failed, released := len(w.told(mongoq.EventFailed)), len(w.told(mongoq.EventReleased))
				require.Equal(t, 3, failed+released)
				require.Equal(t, failed, w.told(mongoq.EventCommitted)[0].Retries, "a snooze counts no retry")
			})
		})
	}
}

// settlings are what a handler may do itself, and what is told of that.
var settlings = []struct {
	name string
	kind mongoq.EventKind
	run  func(context.Context, *mongoq.Reservation) error
}{
	{"commit", mongoq.EventCommitted, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Commit(ctx, mongoq.Result("done"))
	}},
	{"rollback", mongoq.EventFailed, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Rollback(ctx, errors.New("its own"), mongoq.After(7*time.Hour))
	}},
	{"release", mongoq.EventReleased, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Release(ctx, mongoq.Delay(7*time.Hour))
	}},
	{"move", mongoq.EventMoved, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.MoveToQ(ctx, "next", mongoq.Payload("moved"))
	}},
	{"dead-letter", mongoq.EventDeadLettered, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.DeadLetter(ctx, errors.New("its own"))
	}},
}

func TestWhatAHandlerSettledItselfIsLeftAlone(t *testing.T) {
	t.Parallel()
	returns := map[string]error{"nil": nil, "error": errFailed, "snooze": mongoq.Snooze(0)}
	for _, verb := range settlings {
		for name, err := range returns {
			t.Run(verb.name+" and "+name, func(t *testing.T) {
				t.Parallel()
				mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
					var left bson.Raw
					ev, e := handled(t, openStore(t, db), mongoq.QueueConfig{Retry: rest(9)}, func(ctx context.Context, r *mongoq.Reservation) error {
						if verr := verb.run(ctx, r); verr != nil {
							return verr
						}
						left = storedBytes(t, db, r.ID)
						return err
					})
					require.Equal(t, verb.kind, ev.Kind)
					require.Equal(t, err, ev.Err)
					requireSameDoc(t, left, storedBytes(t, db, e.ID))
				})
			})
		}
	}
}

// inTransaction runs f in a transaction on r's server.
func inTransaction(ctx context.Context, db *mongo.Database, f func(context.Context) error) error {
	session, err := db.Client().StartSession()
	if err != nil {
		return err
	}
	defer session.EndSession(ctx)
	_, err = session.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, f(ctx) })
	return err
}

func TestWhatAHandlerSettledInATransactionIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, verb := range settlings {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			db := mongotest.Database(t, mongotest.ReplicaSet)
			var left bson.Raw
			ev, e := handled(t, openStore(t, db), mongoq.QueueConfig{Retry: rest(9)}, func(ctx context.Context, r *mongoq.Reservation) error {
				err := inTransaction(ctx, db, func(ctx context.Context) error {
					if _, err := db.Collection("effects").InsertOne(ctx, bson.D{{Key: "_id", Value: r.ID}}); err != nil {
						return err
					}
					return verb.run(ctx, r)
				})
				left = storedBytes(t, db, r.ID)
				return err
			})
			require.Equal(t, verb.kind, ev.Kind)
			requireSameDoc(t, left, storedBytes(t, db, e.ID))
			n, err := db.Collection("effects").CountDocuments(t.Context(), bson.D{})
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
		})
	}
}

// A transaction that aborts has settled nothing: the handler's error rolls the envelope back as ever.
func TestAnAbortedTransactionRollsBackWithItsHandler(t *testing.T) {
	t.Parallel()
	for _, verb := range settlings {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			db := mongotest.Database(t, mongotest.ReplicaSet)
			ev, e := handled(t, openStore(t, db), mongoq.QueueConfig{Retry: rest(9)}, func(ctx context.Context, r *mongoq.Reservation) error {
				return inTransaction(ctx, db, func(ctx context.Context) error {
					return errors.Join(verb.run(ctx, r), errFailed)
				})
			})
			require.Equal(t, mongoq.EventFailed, ev.Kind)
			require.Equal(t, 1, e.Retries)
			require.Equal(t, "q", e.Q)
			require.Zero(t, e.Processed)
		})
	}
}

// blowUp is a name to look for in a stack.
func blowUp(v any) error { panic(v) }

// A long value leaves room for the stack in the failure list.
func TestAPanicWithALongValueKeepsItsStack(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.Standalone)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: rest(9)})
	id := push(t, q, "x")
	w := run(t, q, func(context.Context, *mongoq.Reservation) error { return blowUp(strings.Repeat("ü", 10_000)) })
	ev := w.awaits(t, mongoq.EventFailed, 1)[0]
	var p *mongoq.PanicError
	require.ErrorAs(t, ev.Err, &p)
	require.Len(t, p.Value, 20_000)
	e, err := q.Get(t.Context(), id)
	require.NoError(t, err)
	require.Contains(t, e.Failures[0].Msg, "panic: üü")
	require.Contains(t, e.Failures[0].Msg, "goroutine ")
}

func TestAPanicIsAFailureWithItsStack(t *testing.T) {
	t.Parallel()
	values := map[string]any{"text": "a bad day", "error": errFailed, "nil": nil, "odd": struct{ A int }{7}}
	for name, value := range values {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: rest(9), Retention: time.Hour})
				id := push(t, q, "x")
				w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
					if r.ID == id {
						return blowUp(value)
					}
					return nil
				}, mongoq.WorkerConfig{Concurrency: 1})
				ev := w.awaits(t, mongoq.EventFailed, 1)[0]
				var p *mongoq.PanicError
				require.ErrorAs(t, ev.Err, &p)
				if value != nil {
					require.Equal(t, value, p.Value)
				}
				require.Contains(t, string(p.Stack), "blowUp")
				push(t, q, "y") // the one handler is still there
				w.awaits(t, mongoq.EventCommitted, 1)
				require.NoError(t, w.ends(t))

				e, err := q.Get(t.Context(), id)
				require.NoError(t, err)
				require.Equal(t, 1, e.Retries)
				require.Len(t, e.Failures, 1)
				require.True(t, strings.HasPrefix(e.Failures[0].Msg, "panic: "+fmt.Sprint(p.Value)+"\n"), e.Failures[0].Msg)
				require.Contains(t, e.Failures[0].Msg, "blowUp", "the beginning of the stack shows where")

				logged := w.log.attrs("mongoq: a handler panicked")
				require.Equal(t, []string{"ERROR mongoq: a handler panicked"}, w.log.from(slog.LevelWarn))
				require.Equal(t, id.Hex(), logged["id"])
				require.Equal(t, "q", logged["queue"])
				require.Equal(t, fmt.Sprint(p.Value), logged["panic"])
				require.Contains(t, logged["stack"], "handler_test.go")
			})
		})
	}
}

// unwell is an error whose text cannot be had of a nil pointer.
type unwell struct{ text string }

func (e *unwell) Error() string { return e.text }

// A nil pointer in an error is no nil error, and asking it for its text panics: that is a failure of the handler, and must
// not end the process.
func TestAnErrorThatPanicsIsAFailure(t *testing.T) {
	t.Parallel()
	ev, e := handled(t, openStore(t, mongotest.Database(t, mongotest.ReplicaSet)), mongoq.QueueConfig{Retry: rest(9)}, func(context.Context, *mongoq.Reservation) error {
		var none *unwell
		return none
	})
	require.Equal(t, mongoq.EventFailed, ev.Kind)
	var p *mongoq.PanicError
	require.ErrorAs(t, ev.Err, &p)
	require.Equal(t, 1, e.Retries)
	require.Contains(t, e.Failures[0].Msg, "panic: ")
}

// A handler that ends its goroutine, as t.FailNow does, has failed: the pool must neither lose a handler, nor hold the
// envelope for ever.
func TestAHandlerThatEndsItsGoroutineHasFailed(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: retries(3), Lease: 2 * time.Second})
		w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
			if r.Deliveries == 1 {
				runtime.Goexit()
			}
			return nil
		}, mongoq.WorkerConfig{Concurrency: 1})
		pushAll(t, q, ints(3))
		w.awaits(t, mongoq.EventCommitted, 3)
		require.NoError(t, w.ends(t))
		requireEmpty(t, db)
	})
}

type letter struct {
	To   string `bson:"to"`
	Text string `bson:"text"`
}

func TestATypedHandlerGetsItsType(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		cfg := mongoq.QueueConfig{Retry: rest(9), Retention: time.Hour}
		letters, numbers := newQueue(t, store, "letters", cfg), newQueue(t, store, "numbers", cfg)
		got, sum := make(chan letter, 1), make(chan int, 1)
		w := run(t, letters, mongoq.Handle(func(_ context.Context, l letter) error {
			got <- l
			return nil
		}), mongoq.WorkerConfig{Also: []mongoq.Source{{Queue: numbers, Handler: mongoq.Handle(func(_ context.Context, n int) error {
			sum <- n
			return errFailed
		})}}})
		want := letter{To: "ada", Text: "welcome"}
		push(t, letters, want)
		require.Equal(t, want, await(t, got, "no letter came"))
		n := push(t, numbers, 42)
		require.Equal(t, 42, await(t, sum, "no number came"))
		odd := push(t, letters, "no letter at all")
		w.awaits(t, mongoq.EventDeadLettered, 1)
		w.awaits(t, mongoq.EventFailed, 1)
		require.NoError(t, w.ends(t))

		e, err := store.Get(t.Context(), n)
		require.NoError(t, err)
		require.Equal(t, "it failed", e.Failures[0].Msg)
		e, err = store.Get(t.Context(), odd)
		require.NoError(t, err)
		require.Equal(t, "letters.dead", e.Q)
		require.Equal(t, "no letter at all", payloadOf[string](t, e))
		require.Contains(t, e.Dead.Msg, "mongoq_test.letter")
		require.Empty(t, got, "the function saw what could not be decoded")
	})
}

func TestMiddlewareWrapsTheFirstOutermost(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q, also := newQueue(t, store, "q"), newQueue(t, store, "also")
		var mu sync.Mutex
		var steps []string
		step := func(s string) {
			mu.Lock()
			defer mu.Unlock()
			steps = append(steps, s)
		}
		around := func(name string) mongoq.Middleware {
			return func(next mongoq.Handler) mongoq.Handler {
				return func(ctx context.Context, r *mongoq.Reservation) error {
					step(name + " in")
					err := next(ctx, r)
					step(name + " out")
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		}
		w := run(t, q, func(context.Context, *mongoq.Reservation) error {
			step("q")
			return backoff.Permanent(errFailed)
		}, mongoq.WorkerConfig{
			Middleware: []mongoq.Middleware{around("a"), around("b")},
			Also: []mongoq.Source{{Queue: also, Handler: func(context.Context, *mongoq.Reservation) error {
				step("also")
				return backoff.Permanent(errFailed)
			}}},
		})
		for i, name := range []string{"q", "also"} {
			push(t, []*mongoq.Queue{q, also}[i], "x")
			w.awaits(t, mongoq.EventDeadLettered, i+1)
			mu.Lock()
			require.Equal(t, []string{"a in", "b in", name, "b out", "a out"}, steps)
			steps = nil
			mu.Unlock()
		}
		require.EqualError(t, w.told(mongoq.EventDeadLettered)[1].Err, "a: b: it failed")
	})
}

func TestLoggingTellsTheEndOfEachJob(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: rest(9)})
		var log logbook
		w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
			var what string
			if err := r.Decode(&what); err != nil {
				return err
			}
			switch what {
			case "fails":
				return errFailed
			case "sleeps":
				return mongoq.Snooze(time.Hour)
			}
			return nil
		}, mongoq.WorkerConfig{Middleware: []mongoq.Middleware{mongoq.Logging(slog.New(&log))}})

		id := push(t, q, "secret")
		w.awaits(t, mongoq.EventCommitted, 1)
		require.Equal(t, []string{"DEBUG mongoq: job done"}, log.from(slog.LevelDebug))
		done := log.attrs("mongoq: job done")
		require.Equal(t, id.Hex(), done["id"])
		require.Equal(t, "q", done["queue"])
		require.Equal(t, "0", done["retries"])
		require.Contains(t, done, "ran")

		push(t, q, "fails")
		w.awaits(t, mongoq.EventFailed, 1)
		require.Equal(t, []string{"WARN mongoq: job failed"}, log.from(slog.LevelInfo))
		require.Equal(t, "it failed", log.attrs("mongoq: job failed")["error"])

		push(t, q, "sleeps")
		w.awaits(t, mongoq.EventReleased, 1)
		require.Equal(t, []string{"WARN mongoq: job failed"}, log.from(slog.LevelInfo), "a snooze is no failure")
		require.NotContains(t, fmt.Sprint(log.attrs("mongoq: job done")), "secret")
	})
}

func TestATimeoutEndsAJobsContext(t *testing.T) {
	t.Parallel()
	const limit = 50 * time.Millisecond
	ways := map[string]mongoq.WorkerConfig{
		"of the worker":     {Timeout: limit},
		"of the middleware": {Middleware: []mongoq.Middleware{mongoq.Timeout(limit)}},
		"the shorter one":   {Timeout: time.Hour, Middleware: []mongoq.Middleware{mongoq.Timeout(limit)}},
	}
	for name, cfg := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: rest(9)})
				causes := make(chan error, 2)
				cfg.Concurrency = 1
				w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
					if r.Payload.Type == bson.TypeString {
						return ctx.Err() // each job has a time of its own
					}
					<-ctx.Done()
					causes <- context.Cause(ctx)
					return ctx.Err()
				}, cfg)
				push(t, q, 1)
				require.ErrorIs(t, await(t, causes, "the context did not end"), context.DeadlineExceeded)
				ev := w.awaits(t, mongoq.EventFailed, 1)[0]
				require.ErrorIs(t, ev.Err, context.DeadlineExceeded)
				require.Greater(t, ev.Ran, limit/2)
				push(t, q, "quick")
				w.awaits(t, mongoq.EventCommitted, 1)
			})
		})
	}
}

// What a handler returns counts, not how long it took.
func TestASuccessAfterTheTimeoutIsASuccess(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		w := run(t, q, func(ctx context.Context, _ *mongoq.Reservation) error {
			<-ctx.Done()
			return nil
		}, mongoq.WorkerConfig{Timeout: time.Millisecond})
		push(t, q, "x")
		w.awaits(t, mongoq.EventCommitted, 1)
		requireEmpty(t, db)
	})
}
