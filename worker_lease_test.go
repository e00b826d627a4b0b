package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
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

// steal puts another claim's token on an envelope, as if its lease had run out and somebody else had taken it.
func steal(t testing.TB, db *mongo.Database, id bson.ObjectID) {
	t.Helper()
	res, err := db.Collection("mongoq").UpdateByID(t.Context(), id, bson.A{bson.D{{Key: "$set", Value: bson.D{
		{Key: "lease", Value: bson.NewObjectID()},
		{Key: "deliveries", Value: bson.D{{Key: "$add", Value: bson.A{"$deliveries", 1}}}},
		{Key: "when", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", time.Hour.Milliseconds()}}}},
	}}}})
	require.NoError(t, err)
	require.EqualValues(t, 1, res.MatchedCount)
}

// lasting waits for d, or for ctx to end, and then gives the cause.
func lasting(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func TestHeartbeatsKeepTheLeasesOfSlowHandlers(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		// A machine that stalls for longer than a lease may lose one: then the next delivery has to last.
		const lease = 300 * time.Millisecond
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{
			Lease: lease, Retry: retries(100), DurableClaims: kindOf(t, db) == mongotest.ReplicaSet, PollInterval: 50 * time.Millisecond,
		})
		w := run(t, q, func(ctx context.Context, _ *mongoq.Reservation) error {
			return lasting(ctx, 5*lease+100*time.Millisecond)
		})
		ids := pushAll(t, q, ints(3))
		done := w.awaits(t, mongoq.EventCommitted, len(ids))
		require.NoError(t, w.ends(t))
		for _, e := range done {
			if e.Retries > 0 {
				t.Logf("a lease was lost %d times on this machine", e.Retries)
			}
		}
		requireEmpty(t, db)
	})
}

func TestWithoutHeartbeatsASlowHandlerIsToldThatItsLeaseIsLost(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: 300 * time.Millisecond, Retry: retries(100), Retention: time.Hour})
		again := make(chan struct{})
		causes, verbs := make(chan error, 1), make(chan error, 1)
		w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
			if r.Deliveries > 1 {
				close(again)
				return nil
			}
			<-ctx.Done()
			causes <- context.Cause(ctx)
			<-again // it goes on for all that, and somebody else has it
			verbs <- r.Commit(context.WithoutCancel(ctx), mongoq.Result("stale"))
			return nil
		}, mongoq.WorkerConfig{NoHeartbeat: true})
		id := push(t, q, "x")
		require.ErrorIs(t, await(t, causes, "the context did not end"), mongoq.ErrLeaseLost)
		require.ErrorIs(t, await(t, verbs, "it was not delivered again"), mongoq.ErrLeaseLost)
		w.awaits(t, mongoq.EventCommitted, 1)
		w.awaits(t, mongoq.EventLeaseLost, 1)
		require.NoError(t, w.ends(t))

		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 2, e.Deliveries)
		require.Equal(t, 1, e.Retries)
		require.True(t, e.Failures[0].Lost)
		require.Zero(t, e.Result)
		require.False(t, e.Processed.IsZero())
	})
}

// What a handler returns that has lost its lease is discarded, whatever it is.
func TestTheResultOfALostLeaseIsDiscarded(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{"nil": nil, "error": errFailed, "snooze": mongoq.Snooze(0)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: 1500 * time.Millisecond, Retry: retries(100)})
				begun, causes := make(chan *mongoq.Reservation, 1), make(chan error, 1)
				w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
					begun <- r
					<-ctx.Done()
					causes <- context.Cause(ctx)
					return err
				})
				id := push(t, q, "x")
				await(t, begun, "it was not begun")
				steal(t, db, id)
				stolen, left := time.Now(), storedBytes(t, db, id)
				require.ErrorIs(t, await(t, causes, "the context did not end"), mongoq.ErrLeaseLost)
				require.Less(t, time.Since(stolen), soon)
				require.Equal(t, mongoq.ErrLeaseLost, w.awaits(t, mongoq.EventLeaseLost, 1)[0].Err)
				require.NoError(t, w.ends(t))
				requireSameDoc(t, left, storedBytes(t, db, id))
			})
		})
	}
}

// A handler that notices nothing, since it is over before the next heartbeat, changes nothing either.
func TestALostLeaseThatNobodyNoticedIsRefused(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
			steal(t, db, r.ID)
			return nil
		})
		id := push(t, q, "x")
		w.awaits(t, mongoq.EventLeaseLost, 1)
		require.NoError(t, w.ends(t))
		require.Equal(t, "1001", sizes(t, q))
		require.Len(t, w.log.from(slog.LevelWarn), 1)
		require.Equal(t, id.Hex(), w.log.attrs(strings.TrimPrefix(w.log.from(slog.LevelWarn)[0], "WARN "))["id"])
	})
}

// An open transaction that has touched an envelope holds up its extension, not those of its neighbours.
func TestAnOpenTransactionDelaysNoOtherHeartbeat(t *testing.T) {
	t.Parallel()
	const lease = 6 * time.Second // a busy machine stands still for a second now and then
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: lease, Retry: retries(100)})
	const n = 30
	begun := make(chan bson.ObjectID, 2*n)
	finish := make(chan struct{})
	w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
		begun <- r.ID
		select {
		case <-finish:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}, mongoq.WorkerConfig{Concurrency: n})
	pushAll(t, q, ints(n))
	held := await(t, begun, "nothing was begun")
	for range n - 1 {
		await(t, begun, "not all were begun")
	}
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(t.Context())
	require.NoError(t, session.StartTransaction())
	_, err = db.Collection("mongoq").UpdateByID(mongo.NewSessionContext(t.Context(), session), held,
		bson.D{{Key: "$set", Value: bson.D{{Key: "touched", Value: true}}}})
	require.NoError(t, err)

	// The one that is held loses its lease in time, since nobody can extend it; the others go on past theirs.
	lost := w.awaits(t, mongoq.EventLeaseLost, 1)
	require.Equal(t, held, lost[0].ID)
	require.NoError(t, lasting(t.Context(), lease+lease/4))
	require.Len(t, w.told(mongoq.EventLeaseLost), 1, "others lost theirs, too")
	require.NoError(t, session.AbortTransaction(t.Context()))
	close(finish)
	for _, e := range w.awaits(t, mongoq.EventCommitted, n-1) {
		if e.ID != held {
			require.Zero(t, e.Retries)
		}
	}
}

// While a transaction that a verb has joined is open, nobody can extend the lease, nor claim the envelope. When it is
// aborted, the handler has the envelope still, unless somebody else is quicker, and keeps it.
func TestALeaseIsKeptWhenATransactionFails(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: lease, Retry: retries(100)})
	w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
		session, err := db.Client().StartSession()
		if err != nil {
			return err
		}
		defer session.EndSession(context.WithoutCancel(ctx))
		if err := session.StartTransaction(); err != nil {
			return err
		}
		if err := r.Commit(mongo.NewSessionContext(ctx, session)); err != nil {
			return err
		}
		if err := lasting(ctx, lease+lease/4); err != nil {
			return fmt.Errorf("while nobody could have it: %w", err)
		}
		if err := session.AbortTransaction(ctx); err != nil {
			return err
		}
		if err := lasting(ctx, 2*lease); err != nil {
			return fmt.Errorf("after the transaction: %w", err)
		}
		return r.Commit(ctx)
	}, mongoq.WorkerConfig{Concurrency: 1}) // no handler of it waits for another claim
	push(t, q, "x")
	committed := w.awaits(t, mongoq.EventCommitted, 1)[0]
	require.Equal(t, 1, committed.Deliveries)
	require.Zero(t, committed.Retries)
	require.Empty(t, w.told(mongoq.EventLeaseLost, mongoq.EventFailed))
}

// One whose envelope somebody else has got after its transaction failed is told, as any other.
func TestALeaseThatIsLostAfterATransactionFailed(t *testing.T) {
	t.Parallel()
	for _, silent := range []bool{false, true} {
		t.Run(fmt.Sprintf("without heartbeats: %v", silent), func(t *testing.T) {
			t.Parallel()
			db := mongotest.Database(t, mongotest.ReplicaSet)
			q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: 2 * time.Second, Retry: retries(100)})
			stolen := make(chan error, 1)
			w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
				failed := inTransaction(ctx, db, func(ctx context.Context) error {
					if err := r.Commit(ctx); err != nil {
						return err
					}
					return errFailed
				})
				if !errors.Is(failed, errFailed) {
					return failed
				}
				steal(t, db, r.ID)
				stolen <- lasting(ctx, late)
				return nil
			}, mongoq.WorkerConfig{NoHeartbeat: silent})
			push(t, q, "x")
			require.ErrorIs(t, await(t, stolen, "it was not told"), mongoq.ErrLeaseLost)
			w.awaits(t, mongoq.EventLeaseLost, 1)
			require.Eventually(t, func() bool {
				return slices.Contains(w.log.from(slog.LevelWarn), "WARN mongoq: a job has lost its lease; its handler was told")
			}, late, time.Millisecond)
			require.Empty(t, w.told(mongoq.EventCommitted))
		})
	}
}

// A claim whose answer took most of the lease is extended at once: the heart's next beat may come too late.
func TestALateClaimIsExtendedAtOnce(t *testing.T) {
	t.Parallel()
	const lease = 6 * time.Second
	db := mongotest.Database(t, mongotest.ReplicaSet)
	lossy := newLossy()
	store := openStore(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
	q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: lease, Retry: retries(100)})
	begun, finish := make(chan struct{}, 1), make(chan struct{})
	w := run(t, q, until(begun, finish))
	claim := lossy.HoldReply("findAndModify")
	defer claim.Release()
	id := push(t, q, "x")
	await(t, claim.Reached(), "it was not claimed")
	first := storedBytes(t, db, id).Lookup("when").Time()
	require.NoError(t, lasting(t.Context(), lease/2))
	claim.Release()
	await(t, begun, "it was not begun")
	began := time.Now()
	require.Eventually(t, func() bool { return storedBytes(t, db, id).Lookup("when").Time().After(first) }, late, time.Millisecond)
	took := time.Since(began)
	require.Less(t, took, lease/4, "a beat comes each third of the lease")
	close(finish)
	w.awaits(t, mongoq.EventCommitted, 1)
}

// What a majority holds is extended by a majority: else a failover undoes the extension, and another consumer gets it.
func TestHeartbeatsWaitForWhomClaimsWaitFor(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{true, false} {
		t.Run(fmt.Sprintf("durable: %v", durable), func(t *testing.T) {
			t.Parallel()
			db, wire := watched(t, mongotest.Database(t, mongotest.ReplicaSet))
			q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: 2 * time.Second, DurableClaims: durable})
			begun, finish := make(chan struct{}, 1), make(chan struct{})
			w := run(t, q, func(context.Context, *mongoq.Reservation) error {
				begun <- struct{}{}
				<-finish
				return nil
			})
			id := push(t, q, "x")
			await(t, begun, "nothing was begun")
			wire.take()
			first := storedNow(t, db, id).Lookup("when").Time()
			require.Eventually(t, func() bool { return storedNow(t, db, id).Lookup("when").Time().After(first) }, soon, 10*time.Millisecond)
			beats := wire.take("update")
			require.NotEmpty(t, beats)
			for _, c := range beats {
				require.Equal(t, durable, strings.Contains(c.writeConcern, "majority"), c.writeConcern)
			}
			close(finish)
			w.awaits(t, mongoq.EventCommitted, 1)
		})
	}
}

// A handler that has settled its envelope and goes on has not lost anything, nor is there anything to tell an operator.
func TestASettledEnvelopeIsNotLost(t *testing.T) {
	t.Parallel()
	const lease = 1500 * time.Millisecond
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var mu sync.Mutex
	ends := map[bson.ObjectID]error{}
	handler := func(verb func(context.Context, *mongoq.Reservation) error) mongoq.Handler {
		return func(ctx context.Context, r *mongoq.Reservation) error {
			err := verb(ctx, r)
			if err == nil {
				err = lasting(ctx, 2*lease)
			}
			mu.Lock()
			defer mu.Unlock()
			ends[r.ID] = err
			return nil
		}
	}
	names, kinds := map[bson.ObjectID]string{}, map[bson.ObjectID]mongoq.EventKind{}
	var sources []mongoq.Source
	for _, verb := range settlings {
		for _, way := range []string{"alone", "in a transaction", "into the history", "into the history in a transaction"} {
			cfg := mongoq.QueueConfig{Lease: lease, Retry: rest(9)}
			if strings.HasPrefix(way, "into the history") {
				cfg.Retention = time.Hour
				if verb.name != "commit" {
					continue
				}
			}
			do := verb.run
			if strings.HasSuffix(way, "in a transaction") {
				do = func(ctx context.Context, r *mongoq.Reservation) error {
					return inTransaction(ctx, db, func(ctx context.Context) error { return verb.run(ctx, r) })
				}
			}
			q := newQueue(t, store, verb.name+" "+way, cfg)
			id := push(t, q, "x")
			names[id], kinds[id] = q.Name(), verb.kind
			sources = append(sources, mongoq.Source{Queue: q, Handler: handler(do)})
		}
	}
	w := run(t, sources[0].Queue, sources[0].Handler, mongoq.WorkerConfig{Concurrency: len(sources), Also: sources[1:]})
	require.Eventually(t, func() bool { return len(w.told()) == 2*len(sources) }, late, 5*time.Millisecond)
	require.NoError(t, w.ends(t))
	mu.Lock()
	defer mu.Unlock()
	for id, name := range names {
		require.NoError(t, ends[id], name)
	}
	for _, e := range w.told() {
		if e.Kind != mongoq.EventReserved {
			require.Equal(t, kinds[e.ID], e.Kind, names[e.ID])
		}
	}
	require.Empty(t, w.log.from(slog.LevelWarn))
}

// What has lost its lease while it waited for a handler is not begun: somebody else may have it. If nobody has, it is given
// back, and has not failed.
func TestWhatIsLostBeforeItsHandlerIsNotBegun(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var dead, failed atomic.Int64
		lost := func() bool {
			store := openStore(t, db)
			a, b := newQueue(t, store, "a"), newQueue(t, store, "b")
			begun, finish := make(chan struct{}, 8), make(chan struct{})
			h := func(ctx context.Context, r *mongoq.Reservation) error {
				begun <- struct{}{}
				if ctx.Err() != nil {
					dead.Add(1)
				}
				failed.Add(int64(r.Retries))
				<-finish
				return nil
			}
			w := run(t, a, h, mongoq.WorkerConfig{Concurrency: 1, NoHeartbeat: true, Also: []mongoq.Source{{Queue: b, Handler: h}}})
			awaitSleep(t, store, "a", 1)
			awaitSleep(t, store, "b", 1)
			// One handler for two queues: while it is busy with one envelope, another waits.
			push(t, a, "x")
			await(t, begun, "it was not begun")
			id := push(t, b, "x")
			w.awaits(t, mongoq.EventReserved, 2)
			mongoq.Ahead(store, time.Minute) // its lease is over
			push(t, newQueue(t, store, "c"), "x")
			close(finish)
			require.Eventually(t, func() bool {
				return len(w.told(mongoq.EventLeaseLost, mongoq.EventReleased)) > 0
			}, late, time.Millisecond)
			mongoq.Ahead(store, -time.Minute)
			w.awaits(t, mongoq.EventCommitted, 2)
			require.NoError(t, w.ends(t))
			all := w.told(mongoq.EventLeaseLost)
			return slices.ContainsFunc(all, func(e mongoq.Event) bool { return e.ID == id })
		}
		for tries := 1; !lost(); tries++ { // on a slow machine it has waited for so long that it was given back before
			require.Less(t, tries, 5)
		}
		require.Zero(t, dead.Load(), "handlers were begun without a lease")
		require.Zero(t, failed.Load(), "what never began has failed")
	})
}

// Heartbeats go through errors that pass while the lease lasts.
func TestHeartbeatsOutliveErrorsThatPass(t *testing.T) {
	t.Parallel()
	db := mongotest.Faulty(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: 3 * time.Second, Retry: retries(100)})
	begun := make(chan struct{}, 8)
	finish := make(chan struct{})
	w := run(t, q, until(begun, finish))
	pushAll(t, q, ints(4))
	for range 4 {
		await(t, begun, "not all were begun")
	}
	heal := mongotest.Fail(t, db, mongotest.Times(3), bson.D{
		{Key: "failCommands", Value: bson.A{"update"}}, {Key: "closeConnection", Value: true},
	})
	require.NoError(t, lasting(t.Context(), 4*time.Second))
	require.Equal(t, 3, heal())
	close(finish)
	for _, e := range w.awaits(t, mongoq.EventCommitted, 4) {
		require.Zero(t, e.Retries)
	}
	require.Empty(t, w.told(mongoq.EventLeaseLost))
}

// A job keeps its lease until it is settled, not only until its handler ends: what is settled may have to wait.
func TestHeartbeatsKeepTheLeasesOfWhatWaitsToBeSettled(t *testing.T) {
	t.Parallel()
	const n = 5
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for _, retention := range []time.Duration{0, time.Hour} {
			s, lossy := lossyStage(t, db, true)
			q := newQueue(t, s.store, fmt.Sprint("q", retention), mongoq.QueueConfig{Lease: 6 * time.Second, Retention: retention})
			hold := "commit"
			if retention > 0 {
				hold = "release"
			}
			c := holdFlights(t, s, lossy, named(hold))
			ids := pushAll(t, q, ints(n))
			w := run(t, q, idle)
			awaitLine(t, s.store, n)
			require.NoError(t, q.Pause(t.Context())) // on a machine that stalls nobody else shall have them
			var first []time.Time
			for _, id := range ids {
				first = append(first, storedBytes(t, db, id).Lookup("when").Time())
			}
			require.Eventually(t, func() bool {
				for i, id := range ids {
					if now := storedNow(t, db, id); now == nil || !now.Lookup("when").Time().After(first[i]) {
						return false
					}
				}
				return true
			}, soon, 10*time.Millisecond, "their leases are not extended")
			c.goOn(t)
			w.awaits(t, mongoq.EventCommitted, n)
			require.NoError(t, w.ends(t))
			require.Empty(t, w.told(mongoq.EventLeaseLost, mongoq.EventUnsettled))
		}
	})
}

// What was refused is tried again soon, while most of the lease is left, and not a third of it later.
func TestAHeartbeatThatFailedIsRepeatedSoon(t *testing.T) {
	t.Parallel()
	const lease, failures = 6 * time.Second, 6 // of each attempt the statement for all, and that for one
	db := mongotest.Faulty(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: lease, Retry: retries(100)})
	begun, finish := make(chan struct{}, 1), make(chan struct{})
	w := run(t, q, until(begun, finish))
	id := push(t, q, "x")
	await(t, begun, "it was not begun")
	first := storedBytes(t, db, id).Lookup("when").Time()
	heal := mongotest.Fail(t, db, mongotest.Times(failures), bson.D{
		{Key: "failCommands", Value: bson.A{"update"}}, {Key: "errorCode", Value: 13}, // Unauthorized
		{Key: "namespace", Value: db.Name() + ".mongoq"},
	})
	require.Eventually(t, func() bool { return storedBytes(t, db, id).Lookup("when").Time().After(first) }, late, 5*time.Millisecond)
	require.Equal(t, failures, heal())
	close(finish)
	w.awaits(t, mongoq.EventCommitted, 1)
	require.Empty(t, w.told(mongoq.EventLeaseLost))
}

// A handler that shortens its lease has it extended in time all the same.
func TestAHandlerMayShortenItsLease(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: time.Minute, Retry: retries(100)})
	shortened := make(chan bson.ObjectID, 1)
	w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
		for range 2 { // the heart may look while the second is under way
			if err := r.Extend(ctx, 10*time.Second); err != nil {
				return err
			}
		}
		shortened <- r.ID
		for time.Until(storedBytes(t, db, r.ID).Lookup("when").Time()) < 30*time.Second {
			if err := lasting(ctx, 5*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	})
	push(t, q, "x")
	await(t, shortened, "it was not begun")
	w.awaits(t, mongoq.EventCommitted, 1)
	require.Empty(t, w.told(mongoq.EventLeaseLost))
}

// While the server is away nobody can extend a lease, nor tell that it is lost: its end, by the clock, is what counts.
func TestALeaseEndsInTimeWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	server := mongotest.Private(t, mongotest.Options{ReplicaSet: 1})
	db := clientOf(t, server)
	q := newQueue(t, openStore(t, db, mongoq.Config{Logger: slog.New(&logbook{})}), "q", mongoq.QueueConfig{Lease: lease, Retry: retries(100)})
	begun := make(chan struct{}, 8)
	var mu sync.Mutex
	var ended []time.Time
	w := run(t, q, func(ctx context.Context, r *mongoq.Reservation) error {
		if r.Deliveries > 1 {
			return nil
		}
		begun <- struct{}{}
		<-ctx.Done()
		mu.Lock()
		defer mu.Unlock()
		ended = append(ended, time.Now())
		return context.Cause(ctx)
	})
	pushAll(t, q, ints(3))
	for range 3 {
		await(t, begun, "not all were begun")
	}
	require.NoError(t, server.Node(0).Pause())
	away := time.Now()
	resume := sync.OnceFunc(func() { require.NoError(t, server.Node(0).Resume()) })
	defer resume()
	lost := w.awaits(t, mongoq.EventLeaseLost, 3)
	resume()
	for _, e := range lost {
		require.ErrorIs(t, e.Err, mongoq.ErrLeaseLost)
	}
	mu.Lock()
	for _, at := range ended {
		t.Logf("told %v after the server went away, under a lease of %v", at.Sub(away), lease)
		require.Less(t, at.Sub(away), lease+3*time.Second)
	}
	mu.Unlock()
	w.awaits(t, mongoq.EventCommitted, 3)
}
