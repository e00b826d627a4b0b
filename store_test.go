package mongoq_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestOpenRefusesWhatCannotBeACollection(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		_, err := mongoq.Open(t.Context(), nil, mongoq.Config{})
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		for _, name := range []string{"$x", "a$b", "a\x00b", "system.jobs", ".a", strings.Repeat("a", 121)} {
			_, err := mongoq.Open(t.Context(), db, mongoq.Config{Collection: name})
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
			require.ErrorContains(t, err, "Collection must be")
		}
		names, err := db.ListCollectionNames(t.Context(), bson.D{})
		require.NoError(t, err)
		require.Empty(t, names)
		works(t, openStore(t, db, mongoq.Config{Collection: strings.Repeat("a", 120)}))
	})
}

func TestOpenOfAnEndedContextFails(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := mongoq.Open(ctx, db, mongoq.Config{})
		require.ErrorIs(t, err, context.Canceled)
	})
}

// What promises something waits for a majority and its journal; a claim and an extension, whose loss costs a second
// delivery, do not.
func TestWritesAreMajorityWhateverTheClientSays(t *testing.T) {
	t.Parallel()
	no := false
	for name, opts := range map[string]*options.ClientOptions{
		"unacknowledged": options.Client().SetWriteConcern(writeconcern.Unacknowledged()),
		"one, unjournaled": options.Client().SetWriteConcern(&writeconcern.WriteConcern{W: 1, Journal: &no}).
			SetRetryWrites(false),
		"its default": options.Client(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				db, w := watched(t, db, opts)
				store := openStore(t, db)
				const majority, one = "majority", "1"
				expect := func(what string, want string, do func() error) {
					t.Helper()
					w.take()
					require.NoError(t, do(), what)
					writes := w.take("insert", "update", "delete", "findAndModify", "bulkWrite")
					require.NotEmpty(t, writes, what)
					for _, c := range writes {
						if want == majority {
							require.Contains(t, c.writeConcern, `"majority"`, "%s: %s", what, c.name)
							require.Contains(t, c.writeConcern, `"j": true`, "%s: %s", what, c.name)
						} else {
							require.Contains(t, c.writeConcern, `{"$numberInt":"1"}`, "%s: %s", what, c.name)
							require.NotContains(t, c.writeConcern, `"j"`, "%s: %s", what, c.name)
						}
					}
				}

				for _, retention := range []time.Duration{0, time.Hour} {
					q := newQueue(t, store, "q"+retention.String(), mongoq.QueueConfig{Retention: retention})
					var r *mongoq.Reservation
					var rs []*mongoq.Reservation
					claim := func() (err error) { r, err = q.TryReserve(t.Context()); return err }
					expect("push", majority, func() error { _, err := q.Push(t.Context(), "x"); return err })
					expect("push with an id", majority, func() error { _, err := q.Push(t.Context(), "x", mongoq.ID(bson.NewObjectID())); return err })
					expect("push many", majority, func() error { _, err := q.PushMany(t.Context(), []any{1, 2, 3, 4, 5}); return err })
					expect("claim", one, claim)
					expect("extend", one, func() error { return r.Extend(t.Context(), time.Minute) })
					expect("rollback", majority, func() error { return r.Rollback(t.Context(), errors.New("x"), mongoq.After(0)) })
					expect("claim", one, claim)
					expect("release", majority, func() error { return r.Release(t.Context()) })
					expect("claim", one, claim)
					expect("move", majority, func() error { return r.MoveToQ(t.Context(), q.Name()) })
					expect("claim", one, claim)
					expect("dead-letter", majority, func() error { return r.DeadLetter(t.Context(), errors.New("x")) })
					expect("redrive", majority, func() error { _, err := q.DeadLetters().Redrive(t.Context()); return err })
					expect("claim", one, claim)
					expect("commit", majority, func() error { return r.Commit(t.Context()) })
					expect("claim many", one, func() (err error) { rs, err = q.ReserveMany(t.Context(), 2); return err })
					expect("commit many", majority, func() error { return q.CommitMany(t.Context(), rs) })
					expect("pause", majority, func() error { return q.Pause(t.Context()) })
					expect("resume", majority, func() error { return q.Resume(t.Context()) })
					id := push(t, q, "x")
					expect("remove", majority, func() error { return q.Remove(t.Context(), id) })
					expect("purge", majority, func() error { _, err := q.Purge(t.Context()); return err })

					durable := newQueue(t, store, "durable", mongoq.QueueConfig{DurableClaims: true})
					_, err := durable.PushMany(t.Context(), []any{1, 2, 3})
					require.NoError(t, err)
					expect("durable claim", majority, func() (err error) { r, err = durable.TryReserve(t.Context()); return err })
					expect("durable extension", majority, func() error { return r.Extend(t.Context(), time.Minute) })
					expect("durable claim of many", majority, func() (err error) { _, err = durable.ReserveMany(t.Context(), 2); return err })
				}
			})
		})
	}
}

// A client that reads from secondaries would wait in vain here, where there is none.
func TestReadsGoToThePrimaryWhateverTheClientSays(t *testing.T) {
	t.Parallel()
	for _, pref := range []*readpref.ReadPref{readpref.Secondary(), readpref.SecondaryPreferred(), readpref.Nearest()} {
		t.Run(pref.Mode().String(), func(t *testing.T) {
			t.Parallel()
			db := mongotest.Database(t, mongotest.ReplicaSet)
			db, w := watched(t, db, options.Client().SetReadPreference(pref).SetServerSelectionTimeout(5*time.Second))
			store := openStore(t, db)
			works(t, store)
			q := newQueue(t, store, "q")
			id := push(t, q, "x", mongoq.ID(bson.NewObjectID()))
			push(t, q, "x", mongoq.ID(id))
			_, err := store.Get(t.Context(), id)
			require.NoError(t, err)
			require.NoError(t, q.Pause(t.Context()))
			require.NoError(t, q.Remove(t.Context(), id))
			for _, c := range w.take() {
				if c.name == "listCollections" {
					continue // the driver sends it to the primary, whatever it says
				}
				require.Contains(t, []string{"", "primary"}, c.readPref, c.name)
			}
		})
	}
}

func TestCloseAnswersThoseWhoWait(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		db, w := watched(t, db)
		store, err := mongoq.Open(t.Context(), db, mongoq.Config{})
		require.NoError(t, err)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Hour})
		push(t, q, "later", mongoq.Delay(time.Hour))
		paused := newQueue(t, store, "paused")
		require.NoError(t, paused.Pause(t.Context()))
		w.take()

		answers := make(chan error, 4)
		go func() { _, err := q.Reserve(t.Context()); answers <- err }()
		go func() { _, err := q.Pop(t.Context()); answers <- err }()
		go func() { _, err := q.ReserveMany(t.Context(), 3); answers <- err }()
		go func() { _, err := paused.Reserve(t.Context()); answers <- err }()
		require.Eventually(t, func() bool {
			n, serving, asleep := mongoq.Line(store, "q")
			stopped, _, _ := mongoq.Line(store, "paused")
			return n == 3 && serving && asleep && stopped == 1
		}, 10*time.Second, time.Millisecond)
		require.NoError(t, store.Close(t.Context()))
		for range cap(answers) {
			select {
			case err := <-answers:
				require.ErrorIs(t, err, mongoq.ErrClosed)
			case <-time.After(10 * time.Second):
				require.Fail(t, "one who waits got no answer")
			}
		}
		require.NoError(t, store.Close(t.Context()), "a second Close does nothing")

		// Nothing is left behind: the envelope waits, and another store has it.
		require.Equal(t, "1010", sizes(t, newQueue(t, openStore(t, db), "q")))
	})
}

func TestClosedStoreRefusesEveryCall(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		db, w := watched(t, db)
		store, err := mongoq.Open(t.Context(), db, mongoq.Config{})
		require.NoError(t, err)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		id := push(t, q, "held")
		r := tryReserve(t, q)
		push(t, q, "waits")
		require.NoError(t, store.Close(t.Context()))
		w.take()
		ctx := t.Context()
		for name, call := range map[string]func() error{
			"Store.Queue":         func() error { _, err := store.Queue("q", mongoq.QueueConfig{}); return err },
			"Store.Queues":        func() error { _, err := store.Queues(ctx); return err },
			"Store.Get":           func() error { _, err := store.Get(ctx, id); return err },
			"Push":                func() error { _, err := q.Push(ctx, "x"); return err },
			"PushMany":            func() error { _, err := q.PushMany(ctx, []any{"x"}); return err },
			"Pop":                 func() error { _, err := q.Pop(ctx); return err },
			"TryPop":              func() error { _, err := q.TryPop(ctx); return err },
			"Reserve":             func() error { _, err := q.Reserve(ctx); return err },
			"TryReserve":          func() error { _, err := q.TryReserve(ctx); return err },
			"ReserveMany":         func() error { _, err := q.ReserveMany(ctx, 2); return err },
			"Peek":                func() error { _, err := q.Peek(ctx, 1); return err },
			"Get":                 func() error { _, err := q.Get(ctx, id); return err },
			"Remove":              func() error { return q.Remove(ctx, id) },
			"Purge":               func() error { _, err := q.Purge(ctx); return err },
			"Pause":               func() error { return q.Pause(ctx) },
			"Resume":              func() error { return q.Resume(ctx) },
			"Stats":               func() error { _, err := q.Stats(ctx); return err },
			"Stats, exact":        func() error { _, err := q.Stats(ctx, mongoq.Exact()); return err },
			"DeadLetters.Purge":   func() error { _, err := q.DeadLetters().Purge(ctx); return err },
			"DeadLetters.Redrive": func() error { _, err := q.DeadLetters().Redrive(ctx); return err },
			"History.Replay":      func() error { _, err := q.History().Replay(ctx, id); return err },
			"DeadLetters.List": func() (last error) {
				for _, err := range q.DeadLetters().List(ctx) {
					last = err
				}
				return last
			},
			"History.List": func() (last error) {
				for _, err := range q.History().List(ctx) {
					last = err
				}
				return last
			},
		} {
			require.ErrorIs(t, call(), mongoq.ErrClosed, name)
		}
		require.Empty(t, w.take(), "nothing is sent")

		require.NoError(t, r.Commit(ctx), "what is held can still be settled")
		require.Equal(t, "1100", sizes(t, newQueue(t, openStore(t, db), "q")))
	})
}
