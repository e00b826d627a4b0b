package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
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

// brief is a lease that is meant to lapse.
const brief = 300 * time.Millisecond

var errFailed = errors.New("it failed")

// retries allows n retries without a wait.
func retries(n uint64) func() backoff.BackOff {
	return func() backoff.BackOff { return backoff.WithMaxRetries(backoff.NewConstantBackOff(0), n) }
}

// storedBytes is the document under an id, byte for byte.
func storedBytes(t testing.TB, db *mongo.Database, id bson.ObjectID) bson.Raw {
	t.Helper()
	raw, err := db.Collection("mongoq").FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	require.NoError(t, err)
	return raw
}

// requireSameDoc compares documents byte for byte, and shows them readably.
func requireSameDoc(t testing.TB, want, got bson.Raw, msg ...any) {
	t.Helper()
	require.Equal(t, want.String(), got.String(), msg...)
	require.Equal(t, want, got, msg...)
}

// verbs are what a holder can do with an envelope of q.
var verbs = []struct {
	name string
	run  func(ctx context.Context, q *mongoq.Queue, r *mongoq.Reservation) error
}{
	{"commit", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error { return r.Commit(ctx) }},
	{"commit of many", func(ctx context.Context, q *mongoq.Queue, r *mongoq.Reservation) error {
		return q.CommitMany(ctx, []*mongoq.Reservation{r})
	}},
	{"rollback", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.Rollback(ctx, errFailed)
	}},
	{"rollback for good", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.Rollback(ctx, backoff.Permanent(errFailed), mongoq.Payload("changed"))
	}},
	{"release", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error { return r.Release(ctx) }},
	{"extend", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.Extend(ctx, time.Hour)
	}},
	{"move", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.MoveToQ(ctx, "elsewhere")
	}},
	{"dead-letter", func(ctx context.Context, _ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.DeadLetter(ctx, errFailed)
	}},
}

func TestConcurrentClaimsHaveOneWinner(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var queues []*mongoq.Queue
		for range 4 {
			queues = append(queues, newQueue(t, openStore(t, anotherClient(t, db)), "q"))
		}
		for range 15 {
			id := push(t, queues[0], "x")
			var winners []*mongoq.Reservation
			for len(winners) == 0 { // once, but for a machine so slow that a claim is given up and released
				var mu sync.Mutex
				var errs []error
				var wg sync.WaitGroup
				for _, q := range queues {
					for range 3 {
						wg.Go(func() {
							r, err := q.TryReserve(t.Context())
							mu.Lock()
							defer mu.Unlock()
							if err == nil {
								winners = append(winners, r)
							} else if !errors.Is(err, mongoq.ErrEmpty) {
								errs = append(errs, err)
							}
						})
					}
				}
				wg.Wait()
				require.Empty(t, errs)
			}
			require.Len(t, winners, 1)
			require.Equal(t, id, winners[0].ID)
			require.Zero(t, winners[0].Retries)
			require.NoError(t, winners[0].Commit(t.Context()))
		}
		requireEmpty(t, db)
	})
}

func TestSeveralProcessesShareAQueue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 300
		var c tally
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for i := range 3 {
			q := newQueue(t, openStore(t, anotherClient(t, db)), "q", mongoq.QueueConfig{PollInterval: 20 * time.Millisecond})
			if i == 0 {
				pushFrom(t, q, 10, n)()
			}
			for k := range 6 {
				wg.Go(func() {
					for ctx.Err() == nil {
						if c.note(takers[k%len(takers)].take(ctx, q)) == n {
							cancel()
						}
					}
				})
			}
		}
		wg.Wait()
		c.requireOnce(t, n)
		requireEmpty(t, db)
	})
}

func TestALapsedLeaseIsAFailureOfALostConsumer(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		id := push(t, q, "x", mongoq.Headers(map[string]string{"k": "v"}))
		first := tryReserve(t, q, mongoq.LeaseFor(brief))
		require.Zero(t, first.Retries)
		require.Equal(t, 1, first.Deliveries)
		require.Equal(t, brief, first.When.Sub(first.Reserved))

		again := reserve(t, q)
		require.Equal(t, id, again.ID)
		require.Equal(t, 1, again.Retries)
		require.Equal(t, 2, again.Deliveries)
		require.False(t, again.Reserved.Before(first.When), "before the lease ended")
		require.Len(t, again.Failures, 1)
		require.True(t, again.Failures[0].Lost)
		require.Equal(t, 1, again.Failures[0].Retries)
		require.Equal(t, again.Reserved, again.Failures[0].At)
		require.NotEmpty(t, again.Failures[0].Msg)
		require.Equal(t, "x", payloadOf[string](t, &again.Envelope))
		require.Equal(t, map[string]string{"k": "v"}, again.Headers)
		require.NoError(t, again.Commit(t.Context()))
	})
}

func TestALapsedLeaseThatNobodyTookCanStillBeSettled(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, retention := range []time.Duration{0, mongoq.KeepForever} {
			for _, verb := range verbs {
				q := newQueue(t, store, verb.name+retention.String(), mongoq.QueueConfig{Retention: retention})
				push(t, q, "x")
				r := tryReserve(t, q, mongoq.LeaseFor(time.Millisecond))
				require.Eventually(t, func() bool { return sizes(t, q) == "1100" }, soon, 2*time.Millisecond)
				require.NoError(t, verb.run(t.Context(), q, r), verb.name)
			}
		}
	})
}

func TestAStaleHolderChangesNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, retention := range []time.Duration{0, mongoq.KeepForever} {
			var queues []*mongoq.Queue
			var stale []*mongoq.Reservation
			for _, verb := range verbs {
				q := newQueue(t, store, verb.name+retention.String(), mongoq.QueueConfig{Retention: retention})
				push(t, q, "x")
				queues, stale = append(queues, q), append(stale, tryReserve(t, q, mongoq.LeaseFor(brief)))
			}
			for i, verb := range verbs {
				holder := reserve(t, queues[i])
				before := storedBytes(t, db, holder.ID)
				require.ErrorIs(t, verb.run(t.Context(), queues[i], stale[i]), mongoq.ErrLeaseLost, verb.name)
				require.ErrorIs(t, verb.run(t.Context(), queues[i], stale[i]), mongoq.ErrLeaseLost, verb.name)
				requireSameDoc(t, before, storedBytes(t, db, holder.ID), verb.name)
				require.NoError(t, holder.Commit(t.Context()), verb.name)
			}
		}
	})
}

func TestAStaleHolderOfWhatIsSettledChangesNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		settlings := []struct {
			name      string
			retention time.Duration
			settle    func(*mongoq.Reservation) error
			gone      bool
		}{
			{"committed", 0, func(r *mongoq.Reservation) error { return r.Commit(t.Context()) }, true},
			{"kept", time.Hour, func(r *mongoq.Reservation) error { return r.Commit(t.Context(), mongoq.Result("done")) }, false},
			{"dead", 0, func(r *mongoq.Reservation) error { return r.DeadLetter(t.Context(), errFailed) }, false},
			{"moved", 0, func(r *mongoq.Reservation) error { return r.MoveToQ(t.Context(), "elsewhere") }, false},
			{"waiting", 0, func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errFailed) }, false},
		}
		for _, s := range settlings {
			var queues []*mongoq.Queue
			var stale []*mongoq.Reservation
			for _, verb := range verbs {
				q := newQueue(t, store, s.name+" "+verb.name, mongoq.QueueConfig{Retention: s.retention})
				push(t, q, "x")
				queues, stale = append(queues, q), append(stale, tryReserve(t, q, mongoq.LeaseFor(brief)))
			}
			for i, verb := range verbs {
				msg := verb.name + " of what was " + s.name
				require.NoError(t, s.settle(reserve(t, queues[i])), msg)
				if s.gone {
					require.ErrorIs(t, verb.run(t.Context(), queues[i], stale[i]), mongoq.ErrLeaseLost, msg)
					_, err := store.Get(t.Context(), stale[i].ID)
					require.ErrorIs(t, err, mongoq.ErrNotFound, msg)
					continue
				}
				before := storedBytes(t, db, stale[i].ID)
				require.ErrorIs(t, verb.run(t.Context(), queues[i], stale[i]), mongoq.ErrLeaseLost, msg)
				requireSameDoc(t, before, storedBytes(t, db, stale[i].ID), msg)
			}
		}
		// In each dead-letter queue there is one at the most.
		n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "dead", Value: bson.D{{Key: "$exists", Value: true}}}})
		require.NoError(t, err)
		require.EqualValues(t, len(verbs), n)
	})
}

func TestASettledReservationRefusesEveryVerb(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		kept := newQueue(t, store, "kept", mongoq.QueueConfig{Retention: time.Hour})
		gone := newQueue(t, store, "gone")
		for _, q := range []*mongoq.Queue{kept, gone} {
			id := push(t, q, "x")
			r := tryReserve(t, q)
			require.NoError(t, r.Commit(t.Context(), mongoq.Result("done")))
			for _, verb := range verbs {
				require.ErrorIs(t, verb.run(t.Context(), q, r), mongoq.ErrLeaseLost, verb.name)
			}
			if q == gone {
				requireGone(t, store, id)
				continue
			}
			before := storedBytes(t, db, id)
			for _, verb := range verbs {
				require.ErrorIs(t, verb.run(t.Context(), q, r), mongoq.ErrLeaseLost, verb.name)
				requireSameDoc(t, before, storedBytes(t, db, id), verb.name)
			}
		}
	})
}

func requireGone(t testing.TB, store *mongoq.Store, id bson.ObjectID) {
	t.Helper()
	_, err := store.Get(t.Context(), id)
	require.ErrorIs(t, err, mongoq.ErrNotFound)
}

// A commit in a transaction does not settle the reservation, so that here the stored guard alone protects what is
// finished.
func TestWhatIsFinishedIsNeverTouchedAgain(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
	for _, verb := range verbs {
		id := push(t, q, "x")
		r := tryReserve(t, q)
		session, err := db.Client().StartSession()
		require.NoError(t, err)
		_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) { return nil, r.Commit(ctx) })
		session.EndSession(t.Context())
		require.NoError(t, err)
		before := storedBytes(t, db, id)
		require.NotZero(t, before.Lookup("processed").DateTime())
		require.ErrorIs(t, verb.run(t.Context(), q, r), mongoq.ErrLeaseLost, verb.name)
		requireSameDoc(t, before, storedBytes(t, db, id), verb.name)
	}
}

func TestExtendMakesTheLeaseLast(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{PollInterval: 50 * time.Millisecond})
		id := push(t, q, "x")
		r := tryReserve(t, q, mongoq.LeaseFor(2*time.Second))
		require.NoError(t, r.Extend(t.Context(), time.Hour))
		require.WithinDuration(t, r.Reserved.Add(time.Hour), rawDoc(t, db, id)["when"].(bson.DateTime).Time(), time.Minute)

		ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(2500*time.Millisecond)) // past the first lease
		defer cancel()
		_, err := q.Reserve(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Zero(t, e.Retries)
		require.Equal(t, 1, e.Deliveries)

		// A shorter one ends sooner.
		require.NoError(t, r.Extend(t.Context(), brief))
		again := reserve(t, q)
		require.Equal(t, 1, again.Retries)
		require.ErrorIs(t, r.Extend(t.Context(), time.Hour), mongoq.ErrLeaseLost)
		require.ErrorIs(t, again.Extend(t.Context(), 0), mongoq.ErrInvalidOption)
		require.NoError(t, again.Commit(t.Context()))
	})
}

func TestAConsumerThatDiesOverAndOverBringsItsEnvelopeToTheDeadLetters(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: 200 * time.Millisecond, Retry: retries(2)})
		dead := newQueue(t, store, "q.dead", mongoq.QueueConfig{Lease: time.Minute})
		id := push(t, q, "poison")
		for i := range 3 {
			r := reserve(t, q) // and it is never heard of again
			require.Equal(t, id, r.ID)
			require.Equal(t, i, r.Retries)
			require.Equal(t, i+1, r.Deliveries)
		}
		beginReserve(t, q) // the next that asks gets nothing
		r := reserve(t, dead)
		require.Equal(t, id, r.ID)
		require.Equal(t, 3, r.Retries)
		require.Equal(t, "poison", payloadOf[string](t, &r.Envelope))
		require.Equal(t, mongoq.DeadLost, r.Dead.Kind)
		require.Equal(t, "q", r.Dead.From)
		require.NotEmpty(t, r.Dead.Msg)
		require.Len(t, r.Failures, 3)
		for _, f := range r.Failures {
			require.True(t, f.Lost)
		}
		require.Equal(t, "0000", sizes(t, q))
	})
}

// An open transaction that has touched an envelope under a lapsed lease must not hold up those behind it.
func TestClaimsPassOverWhatAnOpenTransactionHolds(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: time.Minute})
	head := push(t, q, "head")
	r := tryReserve(t, q, mongoq.LeaseFor(brief))
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(context.Background())
	require.NoError(t, session.StartTransaction())
	require.NoError(t, r.Commit(mongo.NewSessionContext(t.Context(), session)))

	require.Eventually(t, func() bool {
		due, err := q.Peek(t.Context(), 1)
		require.NoError(t, err)
		return len(due) == 1 // its lease has ended
	}, soon, 10*time.Millisecond)
	behind := push(t, q, "behind")
	require.Equal(t, behind, reserve(t, q).ID)
	require.NoError(t, session.AbortTransaction(t.Context()))
	again := reserve(t, q)
	require.Equal(t, head, again.ID)
	require.Equal(t, 1, again.Retries)
}

// So many may be held that a claim tries no others: the next one does.
func TestClaimsPassOverManyThatAnOpenTransactionHolds(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: time.Minute})
	const held = 12
	pushAll(t, q, ints(held))
	rs, err := q.ReserveMany(t.Context(), held, mongoq.LeaseFor(brief))
	require.NoError(t, err)
	require.Len(t, rs, held)
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(context.Background())
	require.NoError(t, session.StartTransaction())
	for _, r := range rs {
		require.NoError(t, r.Rollback(mongo.NewSessionContext(t.Context(), session), errFailed))
	}
	require.Eventually(t, func() bool {
		due, err := q.Peek(t.Context(), held)
		require.NoError(t, err)
		return len(due) == held // their leases have ended
	}, soon, 10*time.Millisecond)
	behind := push(t, q, "behind")
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), late)
		defer cancel()
		r, err := q.Reserve(ctx)
		if err != nil {
			require.NoError(t, ctx.Err(), "it is hidden behind those that are held")
			return false
		}
		require.Equal(t, behind, r.ID)
		return true
	}, late, time.Millisecond)
	require.NoError(t, session.AbortTransaction(t.Context()))
	takeAll(t, q, held)
}

// A claim whose reading of what it got is refused must not leave that to wait for the end of its lease.
func TestAClaimOfSeveralThatCannotReadWhatItGotGivesItBack(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Faulty(t, kind, options.Client().SetRetryReads(false))
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Hour})
		for i := range 5 {
			push(t, q, i, mongoq.ID(bson.NewObjectID())) // a claim reads what may be another under its id
		}
		_, err := q.Stats(t.Context()) // the knowledge of what is paused is fresh
		require.NoError(t, err)
		const notPrimaryOrSecondary = 13436
		// The find of the candidates passes.
		heal := mongotest.Fail(t, db, mongotest.Skip(1), bson.D{
			{Key: "failCommands", Value: bson.A{"find"}}, {Key: "namespace", Value: db.Name() + ".mongoq"}, {Key: "errorCode", Value: notPrimaryOrSecondary},
		})
		many := begin(t, func(ctx context.Context) ([]*mongoq.Reservation, error) { return q.ReserveMany(ctx, 5) })
		_, err = many.ended(t)
		require.Error(t, err)
		require.Positive(t, heal())
		require.Eventually(t, func() bool { return sizes(t, q) == "5500" }, 2*soon, 50*time.Millisecond, "they wait for the end of a lease")
		e, err := q.Peek(t.Context(), 1)
		require.NoError(t, err)
		require.Positive(t, e[0].Deliveries, "they were not claimed")
	})
}

// Between the look for candidates and their claim, one may be removed and pushed anew under its id.
func TestAClaimOfSeveralHandsOutWhatItClaimed(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		lossy := newLossy()
		store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
		q := newQueue(t, store, "q")
		beginReserve(t, newQueue(t, store, "other", mongoq.QueueConfig{PollInterval: time.Minute})) // the signals are listened to
		awaitSleep(t, store, "other", 1)
		far := newQueue(t, openStore(t, db), "q")
		push(t, q, "first")
		id := push(t, q, "old", mongoq.ID(bson.NewObjectID()))
		_, err := q.Stats(t.Context()) // it knows what is paused
		require.NoError(t, err)

		held := lossy.HoldReply("find")
		many := begin(t, func(ctx context.Context) ([]*mongoq.Reservation, error) { return q.ReserveMany(ctx, 2) })
		<-held.Reached()
		require.NoError(t, far.Remove(t.Context(), id))
		_, err = far.Push(t.Context(), "new", mongoq.ID(id))
		require.NoError(t, err)
		held.Release()

		rs := many.result(t)
		if len(rs) == 1 { // the new one was not taken, and follows
			require.Equal(t, "first", payloadOf[string](t, &rs[0].Envelope))
			rs = append(rs, reserve(t, q))
		}
		require.ElementsMatch(t, []string{"first", "new"}, payloads[string](t, rs))
	})
}

// usedMuch is more claims than it takes to put dividers into a queue, and usedSome more than it takes to look from a bound.
const usedMuch, usedSome = 600, 60

// workThrough has so many be claimed and committed, as seen by those who claim from the queue here.
func workThrough(t testing.TB, q *mongoq.Queue, n int) {
	t.Helper()
	require.NoError(t, q.CommitMany(t.Context(), reserveAll(t, q, n)))
	_, err := q.TryReserve(t.Context())
	require.ErrorIs(t, err, mongoq.ErrEmpty)
}

// bounded has so many be claimed, and requires that the claimer of the queue, once it serves nobody, looks from a bound on.
func bounded(t testing.TB, store *mongoq.Store, q *mongoq.Queue, n int) {
	t.Helper()
	workThrough(t, q, n)
	require.Eventually(t, func() bool { return !mongoq.LooksFrom(store, q.Name()).IsZero() }, soon, time.Millisecond, "it looks from the head")
}

// What comes with a time that has passed lies below where a busy claimer looks, and is there for one who sleeps all the
// same, at once.
func TestABusyQueueHidesNothingThatIsDue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const while = 300 * time.Millisecond // by which it is late
		store := openStore(t, db)
		tests := map[string]func(t *testing.T, q *mongoq.Queue) (happen func()){
			"slow push": func(t *testing.T, q *mongoq.Queue) func() {
				lossy := newLossy()
				far := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
				held := lossy.HoldRequest("insert")
				p := begin(t, func(ctx context.Context) (bson.ObjectID, error) { return newQueue(t, far, q.Name()).Push(ctx, "x") })
				<-held.Reached()
				return func() {
					held.Release()
					p.result(t)
				}
			},
			"given back": func(t *testing.T, q *mongoq.Queue) func() {
				push(t, q, "x")
				r := tryReserve(t, q)
				return func() { mongoq.GiveBack(t.Context(), store, r) }
			},
		}
		if kindOf(t, db) == mongotest.ReplicaSet {
			tests["push in a transaction"] = func(t *testing.T, q *mongoq.Queue) func() {
				session, ctx := begun(t, db)
				_, err := q.Push(ctx, "x")
				require.NoError(t, err)
				return func() { require.NoError(t, session.CommitTransaction(t.Context())) }
			}
		}
		for name, prepare := range tests {
			for _, n := range []int{usedSome, usedMuch} {
				name := fmt.Sprint(name, " after ", n)
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					q := newQueue(t, store, name, mongoq.QueueConfig{Lease: time.Minute, PollInterval: time.Minute})
					happen := prepare(t, q)
					require.NoError(t, lasting(t.Context(), while))
					bounded(t, store, q, n)
					waits := beginReserve(t, q)
					awaitSleep(t, store, name, 1)
					began := time.Now()
					happen()
					require.Equal(t, "x", payloadOf[string](t, &waits.result(t).Envelope))
					require.Less(t, time.Since(began), pulse)
				})
			}
		}
	})
}

func TestABusyQueueKeepsItsOrder(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute})
		bounded(t, store, q, usedMuch)
		for i, prio := range []int{2, 2, 2} {
			setDue(t, db, push(t, q, fmt.Sprint("old ", i), mongoq.Priority(prio)), time.Duration(i-10)*time.Second)
		}
		push(t, q, "new", mongoq.Priority(2))
		push(t, q, "urgent", mongoq.Priority(1))
		mongoq.Missed(store, "q") // nobody has rung for what was changed by hand

		rs, err := q.ReserveMany(t.Context(), 2)
		require.NoError(t, err)
		got := payloads[string](t, rs)
		for range 3 {
			got = append(got, payloadOf[string](t, &tryReserve(t, q).Envelope))
		}
		require.Equal(t, []string{"urgent", "old 0", "old 1", "old 2", "new"}, got)
	})
}

// What is pushed together, in a transaction that lasts, may be seen first by another process, which takes the first.
func TestABusyQueueHidesNothingThatIsBehindWhatAnotherTook(t *testing.T) {
	t.Parallel()
	s, lossy := lossyStage(t, mongotest.Database(t, mongotest.ReplicaSet), false)
	q := newQueue(t, s.store, "q", mongoq.QueueConfig{Lease: time.Minute, PollInterval: time.Minute})
	session, ctx := begun(t, s.db)
	_, err := q.PushMany(ctx, []any{"first", mongoq.With("urgent", mongoq.Priority(1)), "last"})
	require.NoError(t, err)
	require.NoError(t, lasting(t.Context(), 300*time.Millisecond))
	bounded(t, s.store, q, usedMuch)
	waits := beginReserve(t, q)
	awaitSleep(t, s.store, "q", 1)
	far := newQueue(t, openStore(t, anotherClient(t, s.db)), "q")

	look := lossy.HoldReply("find") // for what was pushed
	awaitHeld(t, look)
	require.NoError(t, session.CommitTransaction(t.Context()))
	rs, err := far.ReserveMany(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, []string{"urgent", "first"}, payloads[string](t, rs))
	require.NoError(t, far.CommitMany(t.Context(), rs))
	look.Release()
	require.Equal(t, "last", payloadOf[string](t, &waits.result(t).Envelope))
}

// A priority that is no plain number, written by hand, hides nothing that stands behind it.
func TestABusyQueueLooksBehindAnOddPriority(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute})
		bounded(t, store, q, usedMuch)
		require.NoError(t, q.CommitMany(t.Context(), reserveAll(t, q, 30))) // enough to read the bounds anew
		one, err := bson.ParseDecimal128("1")
		require.NoError(t, err)
		insertRaw(t, db, []any{bson.D{
			{Key: "q", Value: "q"}, {Key: "when", Value: time.Now().Add(-time.Hour)}, {Key: "prio", Value: one}, {Key: "payload", Value: "odd"},
		}})
		setDue(t, db, push(t, q, "old", mongoq.Priority(1)), -time.Minute)
		push(t, q, "new", mongoq.Priority(1))
		mongoq.Missed(store, "q") // nobody has rung for what was changed by hand
		for _, want := range []string{"old", "new"} {
			require.Equal(t, want, payloadOf[string](t, &tryReserve(t, q).Envelope))
		}
	})
}

// One who waits does not ask without end for what it cannot see.
func TestAWaiterOfABusyQueueDoesNotSpin(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, s := spied(t, db)
		store := openStore(t, own)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute, PollInterval: time.Minute})
		push(t, q, "x")
		r := tryReserve(t, q)
		require.NoError(t, lasting(t.Context(), 300*time.Millisecond))
		bounded(t, store, q, usedMuch)
		mongoq.GiveBack(t.Context(), store, r)
		s.forget()
		require.Equal(t, r.ID, reserve(t, q).ID)
		require.LessOrEqual(t, len(s.names()), 20, "calls: %v", s.names()[:min(30, len(s.names()))])
	})
}

// eachKind runs f once for each kind of server.
func eachKind(t *testing.T, f func(t *testing.T, kind mongotest.Kind)) {
	t.Helper()
	for _, kind := range []mongotest.Kind{mongotest.ReplicaSet, mongotest.Standalone} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			f(t, kind)
		})
	}
}
