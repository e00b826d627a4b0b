package mongoq_test

import (
	"context"
	"errors"
	"fmt"
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

// impatient is a client that gives a claim up after a second: one with a Timeout of its own.
func impatient(lossy *mongotest.Lossy) *options.ClientOptions {
	return options.Client().SetDialer(lossy).SetTimeout(20 * time.Second)
}

// claims are the two ways to claim, with the command that does it.
var claims = []struct {
	name, command string
	n             int
	try           func(context.Context, *mongoq.Queue, ...mongoq.ReserveOption) ([]*mongoq.Reservation, error)
}{
	{"one", "findAndModify", 1, func(ctx context.Context, q *mongoq.Queue, opts ...mongoq.ReserveOption) ([]*mongoq.Reservation, error) {
		r, err := q.TryReserve(ctx, opts...)
		if err != nil {
			return nil, err
		}
		return []*mongoq.Reservation{r}, nil
	}},
	{"many", "update", 3, func(ctx context.Context, q *mongoq.Queue, opts ...mongoq.ReserveOption) ([]*mongoq.Reservation, error) {
		return q.ReserveMany(ctx, 3, opts...)
	}},
}

// takeAll waits for n envelopes.
func takeAll(t testing.TB, q *mongoq.Queue, n int) []*mongoq.Reservation {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	var all []*mongoq.Reservation
	for len(all) < n {
		rs, err := q.ReserveMany(ctx, n-len(all))
		require.NoError(t, err)
		all = append(all, rs...)
	}
	return all
}

// deliveriesOf counts how often the envelopes of a queue were claimed so far.
func deliveriesOf(t testing.TB, db *mongo.Database, q string) map[bson.ObjectID]int {
	t.Helper()
	cur, err := db.Collection("mongoq").Find(t.Context(), bson.D{{Key: "q", Value: q}})
	require.NoError(t, err)
	var all []struct {
		ID         bson.ObjectID `bson:"_id"`
		Deliveries int           `bson:"deliveries"`
	}
	require.NoError(t, cur.All(t.Context(), &all))
	counts := map[bson.ObjectID]int{}
	for _, e := range all {
		counts[e.ID] = e.Deliveries
	}
	return counts
}

// A claim that the server runs long after it was given up takes envelopes for nobody: they are given back.
func TestAClaimThatRunsLateIsGivenBack(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var all sync.WaitGroup
		for _, claim := range claims {
			lossy := newLossy()
			store := openStore(t, anotherClient(t, db, impatient(lossy)))
			cfg := mongoq.QueueConfig{Lease: time.Hour, PollInterval: time.Minute}
			q := newQueue(t, store, claim.name, cfg)
			there := newQueue(t, openStore(t, db), claim.name, cfg)
			if claim.n > 1 { // candidates have to be there, and those with an id of their own are not claimed by their count
				for i := range claim.n {
					push(t, there, i, mongoq.ID(bson.NewObjectID()))
				}
			}
			late := lossy.HoldRequest(claim.command)
			call := begin(t, func(ctx context.Context) ([]*mongoq.Reservation, error) { return claim.try(ctx, q) })
			awaitHeld(t, late)
			all.Go(func() {
				rs, err := call.ended(t)
				if claim.n == 1 {
					require.ErrorIs(t, err, mongoq.ErrEmpty)
					push(t, there, "x")
				} else {
					require.NoError(t, err)
					for _, r := range append(rs, takeAll(t, there, claim.n-len(rs))...) {
						require.NoError(t, r.Release(t.Context()))
					}
				}
				before := deliveriesOf(t, db, claim.name)
				late.Release() // it takes what is there; nobody else wants it
				for _, r := range takeAll(t, there, claim.n) {
					require.Zero(t, r.Retries, claim.name)
					require.Empty(t, r.Failures, claim.name)
					// Its own claim, this one, and on a machine that stands still one that was given up.
					require.GreaterOrEqual(t, r.Deliveries, before[r.ID]+2, "%s: the late claim has taken nothing", claim.name)
					require.NoError(t, r.Commit(t.Context()))
				}
			})
		}
		all.Wait()
		requireEmpty(t, db)
	})
}

// Whom a claim was given up for may hold the envelope by the next attempt, and lose it. The late claim does not make
// that reservation valid again.
func TestAClaimThatRunsLateRevivesNoReservation(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		lossy := newLossy()
		store := openStore(t, anotherClient(t, db, impatient(lossy)))
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
		there := newQueue(t, openStore(t, db), "q")
		id := push(t, there, "x")
		late := lossy.HoldRequest("findAndModify")
		call := begin(t, func(ctx context.Context) (*mongoq.Reservation, error) {
			return q.TryReserve(ctx, mongoq.LeaseFor(brief))
		})
		awaitHeld(t, late)
		r := call.result(t)
		require.Equal(t, id, r.ID)
		require.Eventually(t, func() bool { // its lease ends
			es, err := there.Peek(t.Context(), 1)
			return err == nil && len(es) == 1
		}, soon, 10*time.Millisecond)
		late.Release()
		require.EqualValues(t, 2, numberOf(storedNow(t, db, id), "deliveries"), "the late claim has taken nothing")
		require.ErrorIs(t, r.Commit(t.Context()), mongoq.ErrLeaseLost)
		again := reserve(t, there)
		require.Equal(t, id, again.ID)
		require.NoError(t, again.Commit(t.Context()))
	})
}

// A claim whose answer comes too late has taken what it took for nobody.
func TestAClaimWhoseAnswerComesLateIsGivenBack(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var waiting []*pending[[]*mongoq.Reservation]
		for _, claim := range claims {
			lossy := newLossy()
			store := openStore(t, anotherClient(t, db, impatient(lossy)))
			q := newQueue(t, store, claim.name, mongoq.QueueConfig{Lease: time.Hour, PollInterval: time.Minute})
			for i := range claim.n {
				push(t, q, i)
			}
			held := lossy.HoldReply(claim.command)
			waiting = append(waiting, begin(t, func(ctx context.Context) ([]*mongoq.Reservation, error) {
				var all []*mongoq.Reservation
				for len(all) < claim.n {
					rs, err := q.ReserveMany(ctx, claim.n-len(all))
					if err != nil {
						return nil, err
					}
					all = append(all, rs...)
				}
				return all, nil
			}))
			awaitHeld(t, held)
		}
		for _, w := range waiting {
			for _, r := range w.result(t) {
				require.Zero(t, r.Retries)
				require.Equal(t, 2, r.Deliveries)
				require.NoError(t, r.Commit(t.Context()))
			}
		}
		requireEmpty(t, db)
	})
}

// A server that takes longer for a claim than the claim may take.
func TestASlowClaim(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Faulty(t, kind)
		cfg := mongoq.QueueConfig{Lease: time.Hour, PollInterval: time.Minute}
		for _, claim := range claims {
			q := newQueue(t, openStore(t, db), claim.name, cfg)
			there := newQueue(t, openStore(t, mongotest.Faulty(t, kind).Client().Database(db.Name())), claim.name, cfg)
			for i := range claim.n {
				push(t, q, i)
			}
			heal := mongotest.Fail(t, db, mongotest.Times(1), bson.D{
				{Key: "failCommands", Value: bson.A{claim.command}}, {Key: "namespace", Value: db.Name() + ".mongoq"},
				{Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 1500},
			})
			first := begin(t, func(ctx context.Context) ([]*mongoq.Reservation, error) { return claim.try(ctx, q) })
			got, err := first.ended(t)
			if !errors.Is(err, mongoq.ErrEmpty) {
				require.NoError(t, err)
			}
			require.Positive(t, heal())
			for _, r := range append(got, takeAll(t, there, claim.n-len(got))...) { // in another process
				require.Zero(t, r.Retries)
				require.NoError(t, r.Commit(t.Context()), "nobody else has it")
			}
		}
		requireEmpty(t, db)
	})
}

// After an answer was lost the driver has no connection for a while. A claim goes on then, and what the first attempt
// took is looked for until it is found.
func TestAnAbandonedClaimIsLookedForUntilItIsFound(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		cfg := mongoq.QueueConfig{Lease: time.Hour, PollInterval: time.Minute}
		there := openStore(t, db)
		for i, claim := range claims {
			for _, lose := range []string{"the claim's", "the claim's and the look's"} {
				name := fmt.Sprint(claim.name, lose)
				for i := range claim.n {
					push(t, newQueue(t, there, name, cfg), i)
				}
				lossy := newLossy()
				store := openStore(t, anotherClient(t, db, faultClient(true, newMet()), options.Client().SetDialer(lossy)))
				q := newQueue(t, store, name, cfg)
				lossy.LoseReply(claim.command, 1)
				if lose != "the claim's" {
					lossy.LoseReply("update", 1) // it has released them, which nobody has seen
				}
				var rs []*mongoq.Reservation
				if i == 0 {
					rs = []*mongoq.Reservation{reserve(t, q)}
				} else {
					rs = takeAll(t, q, claim.n)
				}
				for _, r := range rs {
					require.Zero(t, r.Retries, name)
					require.Equal(t, 2, r.Deliveries, name)
				}
				require.NoError(t, q.CommitMany(t.Context(), rs))
			}
		}
		requireEmpty(t, db)
	})
}

// An abandoned claim is looked for in spite of a server that refuses once.
func TestARefusalDoesNotEndTheLookForAnAbandonedClaim(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		for _, f := range []fault{failing(codeUnauthorized), failing(codeShuttingDown), closedConnection} {
			lossy := newLossy()
			s := faultyStage(t, kind, true, options.Client().SetDialer(lossy))
			q := s.queue(t)
			id := push(t, q, "x")
			drain(s.met)
			lossy.LoseReply("findAndModify", 1)
			heal := mongotest.Fail(t, s.db, mongotest.Times(1), f.on(s.db, "update"))
			w := beginReserve(t, q)
			awaitFailed(t, s.met, "findAndModify")
			awaitFailed(t, s.met, "update")
			heal()
			r := w.result(t)
			require.Equal(t, id, r.ID, f.name)
			require.Zero(t, r.Retries, f.name)
			require.NoError(t, r.Commit(t.Context()))
			require.NoError(t, s.store.Close(t.Context())) // or its looks go on, and meet the next fault
		}
	})
}

// warnings keeps what is logged as a warning or worse.
type warnings struct {
	slog.Handler
	mu   sync.Mutex
	said []string
}

func (*warnings) Enabled(context.Context, slog.Level) bool { return true }
func (w *warnings) WithAttrs([]slog.Attr) slog.Handler     { return w }
func (w *warnings) WithGroup(string) slog.Handler          { return w }

func (w *warnings) Handle(_ context.Context, r slog.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.Level >= slog.LevelWarn {
		w.said = append(w.said, r.Message)
	}
	return nil
}

func (w *warnings) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.said...)
}

// Signals that the server does not let a store list, make, count or read cost one warning; those who wait poll.
func TestSignalsThatAreRefused(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		for _, command := range []string{"listCollections", "create", "find", "getMore"} {
			db := mongotest.Faulty(t, kind)
			other := openStore(t, mongotest.Faulty(t, kind).Client().Database(db.Name()))
			var mode any = mongotest.Always
			refusal := bson.D{{Key: "failCommands", Value: bson.A{command}}, {Key: "errorCode", Value: codeUnauthorized}}
			if command == "listCollections" {
				mode = mongotest.Skip(1) // that for the validator
			} else {
				refusal = append(refusal, bson.E{Key: "namespace", Value: db.Name() + ".mongoq.signals"})
			}
			if command == "create" {
				require.NoError(t, db.Collection("mongoq.signals").Drop(t.Context()))
			}
			heal := mongotest.Fail(t, db, mode, refusal)
			log := &warnings{}
			store := openStore(t, db, mongoq.Config{Logger: slog.New(log)})
			q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: 100 * time.Millisecond})
			there := newQueue(t, other, "q")
			for i := range 3 {
				w := beginReserve(t, q)
				awaitSleep(t, store, "q", 1)
				push(t, there, i)
				r := w.result(t)
				require.Equal(t, i, payloadOf[int](t, &r.Envelope))
				require.NoError(t, r.Commit(t.Context()))
			}
			require.NotZero(t, heal(), command)
			if command != "getMore" { // which says nothing as long as signals come in between
				require.Len(t, log.all(), 1, "%s: %v", command, log.all())
			}
		}
	})
}

// ledger is what those who push and consume through a server's failures were told.
type ledger struct {
	mu                           sync.Mutex
	pushed, delivered, committed map[int]bool
	wrong                        []string
}

func (l *ledger) note(set map[int]bool, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	set[n] = true
}

func (l *ledger) counts() (pushed, committed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pushed), len(l.committed)
}

// deliver notes what was delivered, and commits it.
func (l *ledger) deliver(ctx context.Context, r *mongoq.Reservation) {
	var n int
	if err := r.Decode(&n); err != nil {
		n = -1
	}
	l.mu.Lock()
	l.delivered[n] = true
	if l.committed[n] {
		l.wrong = append(l.wrong, fmt.Sprintf("%d was delivered after its commit, retries %d", n, r.Retries))
	}
	l.mu.Unlock()
	if r.Commit(ctx) == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.committed[n] {
			l.wrong = append(l.wrong, fmt.Sprintf("%d was committed twice, retries %d", n, r.Retries))
		}
		l.committed[n] = true
	}
}

// work pushes and consumes from several goroutines until ctx ends.
func (l *ledger) work(ctx context.Context, q *mongoq.Queue, goroutines int) (wait func()) {
	var all sync.WaitGroup
	var last atomic.Int64
	for range goroutines {
		all.Go(func() {
			for ctx.Err() == nil {
				n := int(last.Add(1))
				if _, err := q.Push(ctx, n); err == nil {
					l.note(l.pushed, n)
				}
				patient, cancel := context.WithTimeout(ctx, time.Second)
				r, err := q.Reserve(patient)
				cancel()
				if err == nil {
					l.deliver(ctx, r)
				}
			}
		})
	}
	return all.Wait
}

// outage has a queue worked on while fail befalls the server, and requires that nothing acknowledged was lost.
func outage(t *testing.T, server *mongotest.Server, goroutines int, fail func()) {
	t.Helper()
	client, err := mongo.Connect(options.Client().ApplyURI(server.URI()).SetHeartbeatInterval(500 * time.Millisecond))
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Disconnect(context.Background()) })
	store := openStore(t, client.Database("outage"), mongoq.Config{Logger: slog.New(&warnings{})})
	q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: 2 * time.Second, PollInterval: 200 * time.Millisecond, DeadLetter: mongoq.NoDeadLetter})
	idle := newQueue(t, store, "idle", mongoq.QueueConfig{PollInterval: time.Minute})
	l := &ledger{pushed: map[int]bool{}, delivered: map[int]bool{}, committed: map[int]bool{}}

	// One waits through it all, and asks again if it is told of an error.
	waiting := begin(t, func(ctx context.Context) (*mongoq.Reservation, error) {
		for {
			if r, err := idle.Reserve(ctx); err == nil || ctx.Err() != nil {
				return r, err
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	wait := l.work(ctx, q, goroutines)
	more := func(n int) {
		p, c := l.counts()
		require.Eventually(t, func() bool {
			pushed, committed := l.counts()
			return pushed >= p+n && committed >= c+n
		}, 3*soon, time.Millisecond)
	}
	more(50)
	fail()
	more(50)
	cancel()
	wait()

	// What is left comes: at the latest when the leases of lost claims have ended.
	require.Eventually(t, func() bool {
		for {
			r, err := q.TryReserve(t.Context())
			if err != nil {
				return errors.Is(err, mongoq.ErrEmpty) && sizes(t, q) == "0000"
			}
			l.deliver(t.Context(), r)
		}
	}, 3*soon, 20*time.Millisecond)
	require.Empty(t, l.wrong)
	for n := range l.pushed {
		require.True(t, l.delivered[n], "%d was pushed, and never delivered", n)
	}
	push(t, idle, "x")
	require.Equal(t, "x", payloadOf[string](t, &waiting.result(t).Envelope))
	p, c := l.counts()
	t.Logf("%d pushes and %d commits were acknowledged", p, c)
}

func TestAServerThatIsKilledAndStartedAgain(t *testing.T) {
	t.Parallel()
	server := mongotest.Private(t, mongotest.Options{ReplicaSet: 1})
	outage(t, server, 4, func() {
		server.Node(0).Kill()
		require.NoError(t, server.Node(0).Restart(t.Context()))
	})
}

func TestAPrimaryThatIsKilled(t *testing.T) {
	t.Parallel()
	server := mongotest.Private(t, mongotest.Options{ReplicaSet: 3})
	outage(t, server, 8, func() { server.Node(0).Kill() })
}
