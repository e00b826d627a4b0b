package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
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

// late bounds what takes a few seconds by itself, on a machine that has other things to do.
const late = time.Minute

// running is a worker at work, with what it told.
type running struct {
	stop context.CancelFunc
	done chan struct{}
	err  error
	log  *logbook

	mu     sync.Mutex
	events []mongoq.Event
}

// run starts a worker of the queue, and stops it when the test ends.
func run(t testing.TB, q *mongoq.Queue, h mongoq.Handler, cfgs ...mongoq.WorkerConfig) *running {
	t.Helper()
	w := &running{done: make(chan struct{}), log: &logbook{}}
	cfg := only(cfgs)
	cfg.Logger = slog.New(w.log)
	told := cfg.OnEvent
	cfg.OnEvent = func(e mongoq.Event) {
		if told != nil {
			told(e)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.events = append(w.events, e)
	}
	worker, err := q.Worker(h, cfg)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	t.Cleanup(func() {
		stop()
		<-w.done
	})
	go func() {
		defer close(w.done)
		w.err = worker.Run(ctx)
	}()
	return w
}

// ends stops the worker and gives what Run returned.
func (w *running) ends(t testing.TB) error {
	t.Helper()
	w.stop()
	await(t, w.done, "Run did not return")
	return w.err
}

// told gives the events of these kinds so far, or all.
func (w *running) told(kinds ...mongoq.EventKind) []mongoq.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(kinds) == 0 {
		return slices.Clone(w.events)
	}
	var some []mongoq.Event
	for _, e := range w.events {
		if slices.Contains(kinds, e.Kind) {
			some = append(some, e)
		}
	}
	return some
}

// awaits waits until n events of a kind were told, and gives them.
func (w *running) awaits(t testing.TB, kind mongoq.EventKind, n int) []mongoq.Event {
	t.Helper()
	require.Eventually(t, func() bool { return len(w.told(kind)) >= n }, late, 2*time.Millisecond,
		"%d events of the kind %s", n, kind)
	return w.told(kind)
}

// await waits for a channel to close or to bring something.
func await[T any](t testing.TB, c <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(late):
		require.FailNow(t, what)
	}
	return v
}

// logbook keeps what is logged.
type logbook struct {
	mu      sync.Mutex
	records []slog.Record
}

func (l *logbook) Enabled(context.Context, slog.Level) bool { return true }
func (l *logbook) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logbook) WithGroup(string) slog.Handler            { return l }

func (l *logbook) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, r)
	return nil
}

// from gives what was logged at this level and above, as "LEVEL message".
func (l *logbook) from(level slog.Level) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lines []string
	for _, r := range l.records {
		if r.Level >= level {
			lines = append(lines, r.Level.String()+" "+r.Message)
		}
	}
	return lines
}

// attrs gives the attributes of the first record with this message, as text.
func (l *logbook) attrs(message string) map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		if r.Message != message {
			continue
		}
		m := map[string]string{}
		r.Attrs(func(a slog.Attr) bool {
			m[a.Key] = a.Value.String()
			return true
		})
		return m
	}
	return nil
}

// rest is a policy whose failures come back when nobody looks any more, and end after n.
func rest(n uint64) func() backoff.BackOff {
	return func() backoff.BackOff { return backoff.WithMaxRetries(backoff.NewConstantBackOff(time.Hour), n) }
}

// ints are payloads 0 to n-1.
func ints(n int) []any {
	all := make([]any, n)
	for i := range all {
		all[i] = i
	}
	return all
}

func pushAll(t testing.TB, q *mongoq.Queue, payloads []any, opts ...mongoq.PushOption) []bson.ObjectID {
	t.Helper()
	ids, err := q.PushMany(t.Context(), payloads, opts...)
	require.NoError(t, err)
	return ids
}

// idle is a handler that does nothing.
func idle(context.Context, *mongoq.Reservation) error { return nil }

// until is a handler that lasts until it may finish, or its context ends.
func until(begun chan<- struct{}, finish <-chan struct{}) mongoq.Handler {
	return func(ctx context.Context, _ *mongoq.Reservation) error {
		begun <- struct{}{}
		select {
		case <-finish:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func TestAWorkerIsConfiguredByRules(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.Standalone)
	store := openStore(t, db)
	q := newQueue(t, store, "q")
	stranger := newQueue(t, openStore(t, db), "q")
	bad := []struct {
		name    string
		handler mongoq.Handler
		cfg     mongoq.WorkerConfig
		rule    string
	}{
		{"no handler", nil, mongoq.WorkerConfig{}, "needs a queue and a handler"},
		{"concurrency", idle, mongoq.WorkerConfig{Concurrency: -1}, "Concurrency must be >= 1, got -1"},
		{"timeout", idle, mongoq.WorkerConfig{Timeout: -1}, "Timeout must be >= 0, got -1ns"},
		{"drain", idle, mongoq.WorkerConfig{DrainTimeout: -time.Second}, "DrainTimeout must be >= 0, got -1s"},
		{"weight", idle, mongoq.WorkerConfig{Weight: -2}, "Weight must be >= 1, got -2"},
		{"weight of another", idle, mongoq.WorkerConfig{Also: []mongoq.Source{{Queue: q, Handler: idle, Weight: -1}}}, "Weight must be >= 1, got -1"},
		{"no other queue", idle, mongoq.WorkerConfig{Also: []mongoq.Source{{Handler: idle}}}, "queue 1 needs a queue and a handler"},
		{"no other handler", idle, mongoq.WorkerConfig{Also: []mongoq.Source{{Queue: q}}}, "queue 1 needs a queue and a handler"},
		{"no function", mongoq.Handle[string](nil), mongoq.WorkerConfig{}, "needs a queue and a handler"},
		{"no middleware", idle, mongoq.WorkerConfig{Middleware: []mongoq.Middleware{nil}}, "Middleware must not be nil"},
		{"middleware that makes none", idle, mongoq.WorkerConfig{
			Middleware: []mongoq.Middleware{func(mongoq.Handler) mongoq.Handler { return nil }},
		}, "nor make a nil handler"},
		{"another store", idle, mongoq.WorkerConfig{Also: []mongoq.Source{{Queue: stranger, Handler: idle}}}, "must be of one store"},
	}
	for _, c := range bad {
		w, err := q.Worker(c.handler, c.cfg)
		require.ErrorIs(t, err, mongoq.ErrInvalidOption, c.name)
		require.ErrorContains(t, err, c.rule, c.name)
		require.Nil(t, w, c.name)
	}
}

func TestAWorkerRunsOnceAtATimeAndAgain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		begun := make(chan struct{})
		w, err := q.Worker(func(context.Context, *mongoq.Reservation) error {
			begun <- struct{}{}
			return nil
		}, mongoq.WorkerConfig{})
		require.NoError(t, err)
		for range 3 {
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- w.Run(ctx) }()
			push(t, q, "x")
			await(t, begun, "nothing was begun")
			require.ErrorIs(t, w.Run(ctx), mongoq.ErrInvalidOption)
			stop()
			require.NoError(t, await(t, ended, "Run did not return"))
			require.Equal(t, "0000", sizes(t, q))
		}
	})
}

func TestAWorkerIsRefusedWhereItCannotRun(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	w, err := newQueue(t, store, "q").Worker(idle, mongoq.WorkerConfig{})
	require.NoError(t, err)

	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(t.Context())
	require.ErrorIs(t, w.Run(mongo.NewSessionContext(t.Context(), session)), mongoq.ErrInTransaction)

	require.NoError(t, store.Close(t.Context()))
	require.ErrorIs(t, w.Run(t.Context()), mongoq.ErrClosed)
}

// A crowd notes how many are in it at once.
type crowd struct{ now, most atomic.Int64 }

func (c *crowd) enter() {
	n := c.now.Add(1)
	for {
		most := c.most.Load()
		if n <= most || c.most.CompareAndSwap(most, n) {
			return
		}
	}
}

func (c *crowd) leave() { c.now.Add(-1) }

func TestConcurrencyIsReachedAndNeverExceeded(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const handlers, each = 7, 150
		store := openStore(t, db)
		a, b := newQueue(t, store, "a"), newQueue(t, store, "b")
		pushAll(t, a, ints(each))
		pushAll(t, b, ints(each))
		var c crowd
		var arrived atomic.Int64
		full := make(chan struct{})
		h := func(ctx context.Context, _ *mongoq.Reservation) error {
			c.enter()
			defer c.leave()
			if n := arrived.Add(1); n == handlers {
				close(full)
			}
			select { // the first wait for each other
			case <-full:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
		w := run(t, a, h, mongoq.WorkerConfig{Concurrency: handlers, Also: []mongoq.Source{{Queue: b, Handler: h}}})
		w.awaits(t, mongoq.EventCommitted, 2*each)
		require.NoError(t, w.ends(t))
		require.EqualValues(t, handlers, c.most.Load())
		require.Empty(t, w.log.from(slog.LevelWarn))
		requireEmpty(t, db)
	})
}

// starts notes which queue's jobs are begun, in order.
type starts struct {
	takes time.Duration // each job

	mu  sync.Mutex
	all []string
}

func (s *starts) handle(_ context.Context, r *mongoq.Reservation) error {
	s.mu.Lock()
	s.all = append(s.all, r.Q)
	s.mu.Unlock()
	if s.takes > 0 {
		_ = lasting(context.Background(), s.takes)
	}
	return nil
}

// among counts a queue's share of the first n.
func (s *starts) among(n int, queue string) (count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.all[:n] {
		if q == queue {
			count++
		}
	}
	return count
}

// sharings are the ways in which two queues share a worker.
var sharings = []struct {
	concurrency, each int
	takes             time.Duration
}{{1, 300, 0}, {1, 150, 2 * time.Millisecond}, {8, 600, 0}, {8, 600, 2 * time.Millisecond}}

// share runs a worker over two full queues until both are empty, and counts how many of the first starts, as many as
// one queue holds, were of the first queue.
func share(t *testing.T, cfg mongoq.WorkerConfig, weight int, verdict func(t *testing.T, first, each int)) {
	for _, c := range sharings {
		t.Run(fmt.Sprintf("%d handlers, %v", c.concurrency, c.takes), func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				store := openStore(t, db)
				a, b := newQueue(t, store, "a"), newQueue(t, store, "b")
				pushAll(t, a, ints(c.each))
				pushAll(t, b, ints(c.each))
				s := starts{takes: c.takes}
				cfg := cfg
				cfg.Concurrency, cfg.Also = c.concurrency, []mongoq.Source{{Queue: b, Handler: s.handle, Weight: weight}}
				w := run(t, a, s.handle, cfg)
				w.awaits(t, mongoq.EventCommitted, 2*c.each)
				require.NoError(t, w.ends(t))
				first := s.among(c.each, "a")
				t.Logf("%d of the first %d starts were of the first queue", first, c.each)
				verdict(t, first, c.each)
				requireEmpty(t, db)
			})
		})
	}
}

func TestQueuesShareAWorkerByWeight(t *testing.T) {
	t.Parallel()
	share(t, mongoq.WorkerConfig{Weight: 4}, 1, func(t *testing.T, first, each int) {
		// While both have something, four of five, give or take much.
		require.Greater(t, first, each*60/100)
		require.Less(t, first, each*95/100)
	})
}

func TestStrictOrderServesTheFirstQueueFirst(t *testing.T) {
	t.Parallel()
	share(t, mongoq.WorkerConfig{Strict: true}, 1, func(t *testing.T, first, each int) {
		// The first claims of both may come in any order; after that the first queue always has something.
		require.GreaterOrEqual(t, first, each*90/100)
	})
}

func TestEventsTellTheWayOfEachJob(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: retries(1)})
		pushAll(t, q, ints(200))
		fails := push(t, q, "fails")
		w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
			if r.ID == fails {
				return errFailed
			}
			return nil
		})
		w.awaits(t, mongoq.EventCommitted, 200)
		w.awaits(t, mongoq.EventDeadLettered, 1)
		require.NoError(t, w.ends(t))

		// Each is told when it is stored, so that the next delivery may be told of before.
		way := map[bson.ObjectID][]string{}
		for _, e := range w.told() {
			require.Equal(t, "q", e.Q)
			require.GreaterOrEqual(t, e.Waited, time.Duration(0))
			require.Less(t, e.Waited, late)
			way[e.ID] = append(way[e.ID], fmt.Sprintln(e.Kind, e.Retries, errors.Is(e.Err, errFailed), e.Ran > 0))
		}
		require.Len(t, way, 201)
		for id, events := range way {
			want := []string{"reserved 0 false false\n", "committed 0 false true\n"}
			if id == fails {
				want = []string{"reserved 0 false false\n", "failed 0 true true\n", "reserved 1 false false\n", "dead-lettered 1 true true\n"}
			}
			require.ElementsMatch(t, want, events)
		}
	})
}

// What an envelope waited counts from when it was due, not from its push.
func TestADelayIsNoQueueWait(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		id := push(t, q, "x", mongoq.Delay(time.Hour))
		// An hour later:
		_, err := db.Collection("mongoq").UpdateByID(t.Context(), id, bson.A{bson.D{{Key: "$set", Value: bson.D{
			{Key: "pushed", Value: bson.D{{Key: "$subtract", Value: bson.A{"$pushed", time.Hour.Milliseconds()}}}},
			{Key: "when", Value: bson.D{{Key: "$subtract", Value: bson.A{"$when", time.Hour.Milliseconds()}}}},
		}}}})
		require.NoError(t, err)
		w := run(t, q, idle)
		require.Less(t, w.awaits(t, mongoq.EventCommitted, 1)[0].Waited, late)
	})
}

// What a worker has fetched ahead must not wait for a handler that has become slow, while others have nothing to do.
func TestWhatWaitsBehindASlowHandlerGoesToAnotherWorker(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		here := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{PollInterval: 100 * time.Millisecond})
		there := newQueue(t, openStore(t, anotherClient(t, db)), "q", mongoq.QueueConfig{PollInterval: 100 * time.Millisecond})
		slow := make(chan struct{})
		release := sync.OnceFunc(func() { close(slow) })
		defer release()
		busy := make(chan struct{}, 10)
		h := func(_ context.Context, r *mongoq.Reservation) error {
			if r.Payload.Type == bson.TypeString {
				busy <- struct{}{}
				<-slow
			}
			return nil
		}
		w := run(t, here, h, mongoq.WorkerConfig{Concurrency: 1})
		pushAll(t, here, ints(2000)) // so many and so quick that it fetches ahead
		w.awaits(t, mongoq.EventCommitted, 2000)

		pushAll(t, here, []any{"slow"}, mongoq.Priority(1))
		await(t, busy, "the slow one was not begun")
		pushAll(t, here, ints(5))
		other := run(t, there, idle)
		other.awaits(t, mongoq.EventCommitted, 5)
		release()
		w.awaits(t, mongoq.EventCommitted, 2001)
	})
}

// A queue whose claim takes long must not hold up the jobs of another: they would be fetched and given back, again and
// again, while the handlers have nothing to do.
func TestASlowClaimHoldsUpNoOtherQueue(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	unstarted := -1
	for try := 0; try < 5 && unstarted != 0; try++ { // a machine that does other things, too, may hold up handlers by itself
		a, b := newQueue(t, store, fmt.Sprintf("a%d", try)), newQueue(t, store, fmt.Sprintf("b%d", try))
		push(t, b, "held")
		r := tryReserve(t, b, mongoq.LeaseFor(brief))
		session, err := db.Client().StartSession()
		require.NoError(t, err)
		require.NoError(t, session.StartTransaction())
		require.NoError(t, r.Commit(mongo.NewSessionContext(t.Context(), session))) // a claim waits a second for it
		require.Eventually(t, func() bool { return sizes(t, b) == "1100" }, soon, 10*time.Millisecond, "its lease does not end")
		pushAll(t, a, ints(20))

		w := run(t, a, idle, mongoq.WorkerConfig{Concurrency: 1, Also: []mongoq.Source{{Queue: b, Handler: idle}}})
		w.awaits(t, mongoq.EventCommitted, 20)
		unstarted = 0
		for _, e := range w.told() {
			if e.Kind == mongoq.EventReleased {
				unstarted++
			}
		}
		session.EndSession(context.Background())
	}
	require.Zero(t, unstarted, "given back unstarted, while the other queue's claim was waited for")
}

// troubled counts what a worker logs of a server that is away: "cannot claim", "claims again".
func troubled(w *running) (away, back int) {
	for _, line := range w.log.from(slog.LevelInfo) {
		switch line {
		case "WARN mongoq: the worker cannot claim; it goes on trying":
			away++
		case "INFO mongoq: the worker claims again":
			back++
		}
	}
	return away, back
}

func TestAWorkerOutlivesItsServer(t *testing.T) {
	t.Parallel()
	troubles := map[string]struct {
		nodes  int
		breaks func(t *testing.T, n *mongotest.Node) (mend func())
		least  int // times that the worker says it is away
	}{
		"killed": {1, func(t *testing.T, n *mongotest.Node) func() {
			n.Kill()
			return func() { require.NoError(t, n.Restart(context.Background())) }
		}, 1},
		"paused": {1, func(t *testing.T, n *mongotest.Node) func() {
			require.NoError(t, n.Pause())
			return func() { require.NoError(t, n.Resume()) }
		}, 1},
		"another primary": {3, func(t *testing.T, n *mongotest.Node) func() { // which there may be before anybody has missed it
			tellNode(t, n, bson.D{{Key: "replSetStepDown", Value: 60}})
			return func() {}
		}, 0},
	}
	for way, trouble := range troubles {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			server := mongotest.Private(t, mongotest.Options{ReplicaSet: trouble.nodes})
			cfg := mongoq.QueueConfig{Lease: 3 * time.Second, PollInterval: time.Minute, Retry: retries(100)}
			// A client that gives up sooner than by default says sooner that the server is away.
			here := clientOf(t, server, options.Client().SetServerSelectionTimeout(2*time.Second))
			q := newQueue(t, openStore(t, here, mongoq.Config{Logger: slog.New(&logbook{})}), "q", cfg)
			elsewhere := newQueue(t, openStore(t, clientOf(t, server), mongoq.Config{Logger: slog.New(&logbook{})}), "q", cfg)

			var mu sync.Mutex
			ran := map[bson.ObjectID]int{}
			w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
				mu.Lock()
				defer mu.Unlock()
				ran[r.ID]++
				return nil
			})
			// Somebody pushes all the while, and notes what was acknowledged.
			enough := make(chan struct{})
			pushing := begin(t, func(ctx context.Context) (acked []bson.ObjectID, _ error) {
				for {
					attempt, cancel := context.WithTimeout(ctx, time.Second)
					if id, err := elsewhere.Push(attempt, "x"); err == nil {
						acked = append(acked, id)
					}
					cancel()
					select {
					case <-time.After(5 * time.Millisecond):
					case <-enough:
						return acked, nil
					case <-ctx.Done():
						return acked, nil
					}
				}
			})
			w.awaits(t, mongoq.EventCommitted, 20)
			broken := time.Now()
			mend := sync.OnceFunc(trouble.breaks(t, server.Node(0)))
			defer mend()
			require.Eventually(t, func() bool { away, _ := troubled(w); return away >= trouble.least }, late, 5*time.Millisecond, "nobody said that the server is away")
			said := time.Since(broken)
			mend()
			mended := time.Now()
			n := len(w.told(mongoq.EventCommitted))
			w.awaits(t, mongoq.EventCommitted, n+20)
			again := time.Since(mended)
			close(enough)
			acked := pushing.result(t)
			require.Eventually(t, func() bool {
				s, err := q.Stats(context.Background())
				return err == nil && s.Total == 0
			}, late, 20*time.Millisecond)

			// Signals are heard again: this does not wait for the poll.
			last := push(t, elsewhere, "last")
			acked = append(acked, last)
			require.Eventually(t, func() bool {
				mu.Lock()
				defer mu.Unlock()
				return ran[last] > 0
			}, soon, 2*time.Millisecond)
			require.NoError(t, w.ends(t))
			mu.Lock()
			defer mu.Unlock()
			twice := 0
			for _, id := range acked {
				require.NotZero(t, ran[id], "an acknowledged push was lost")
				if ran[id] > 1 {
					twice++
				}
			}
			away, back := troubled(w)
			t.Logf("said to be away after %v, 20 jobs done %v after its return; %d pushes acknowledged, %d ran twice", said, again, len(acked), twice)
			require.GreaterOrEqual(t, away, trouble.least)
			require.LessOrEqual(t, away, 1, "%v", w.log.from(slog.LevelInfo))
			require.Equal(t, away, back, "%v", w.log.from(slog.LevelInfo))
		})
	}
}

// A worker with nothing to do says that its server is there again when it is, not when something comes.
func TestAnIdleWorkerSaysThatItsServerIsBack(t *testing.T) {
	t.Parallel()
	db := mongotest.Faulty(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	q := newQueue(t, store, "q")
	w := run(t, q, idle)
	awaitSleep(t, store, "q", 1)
	for n := 1; n <= 2; n++ {
		heal := mongotest.Fail(t, db, mongotest.Always, bson.D{
			{Key: "failCommands", Value: bson.A{"find", "findAndModify"}}, {Key: "errorCode", Value: 13}, // Unauthorized
			{Key: "namespace", Value: db.Name() + ".mongoq"},
		})
		mongoq.Ring(store, "q")
		require.Eventually(t, func() bool { away, _ := troubled(w); return away == n }, late, 5*time.Millisecond)
		heal()
		require.Eventually(t, func() bool { _, back := troubled(w); return back == n }, late, 5*time.Millisecond)
		awaitSleep(t, store, "q", 1)
	}
	push(t, q, "x")
	w.awaits(t, mongoq.EventCommitted, 1)
}

func TestHowFarAWorkerFetchesAhead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		latency, step time.Duration
		done          []int
		least, most   int // ahead
		refill        int // at most
	}{
		"nothing is known":                  {5 * time.Millisecond, 5 * time.Millisecond, nil, 0, 0, 0},
		"one was done, fast":                {5 * time.Millisecond, 2 * time.Millisecond, []int{1}, 1, 4, 2},
		"slow jobs":                         {5 * time.Millisecond, time.Second, []int{1, 1, 1}, 0, 0, 0},
		"in bursts, by claims that last":    {90 * time.Millisecond, 50 * time.Millisecond, []int{4, 0, 0, 4, 0, 0, 4, 0, 0, 4, 0, 0}, 12, 32, 4},
		"as fast as claims let them":        {10 * time.Millisecond, 10 * time.Millisecond, []int{100, 100, 100, 100, 100}, 390, 410, 205},
		"faster than should be held":        {time.Second, 10 * time.Millisecond, []int{900, 900, 900, 900, 900, 900}, 2000, 2000, 1000},
		"it was fast, and then had nothing": {5 * time.Millisecond, 10 * time.Millisecond, []int{100, 100, 100, -1}, 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ahead, refill := mongoq.AheadAfter(c.latency, c.step, c.done...)
			require.GreaterOrEqual(t, ahead, c.least)
			require.LessOrEqual(t, ahead, c.most)
			require.LessOrEqual(t, refill, c.refill)
			require.GreaterOrEqual(t, refill, 0)
			if ahead > 0 {
				require.Less(t, refill, ahead)
			}
		})
	}
}

// Any weight is one.
func TestAHugeWeightIsAWeight(t *testing.T) {
	t.Parallel()
	store := openStore(t, mongotest.Database(t, mongotest.ReplicaSet))
	q, other := newQueue(t, store, "q"), newQueue(t, store, "other")
	w := run(t, q, idle, mongoq.WorkerConfig{Weight: math.MaxInt, Also: []mongoq.Source{{Queue: other, Handler: idle, Weight: math.MaxInt}}})
	push(t, q, "x")
	push(t, other, "y")
	w.awaits(t, mongoq.EventCommitted, 2)
}

// What is claimed beside other queues is for the handlers that are this queue's share: the rest would wait for them, and
// have to be given back.
func TestQueuesClaimNoMoreThanTheirShare(t *testing.T) {
	t.Parallel()
	store := openStore(t, mongotest.Database(t, mongotest.ReplicaSet))
	const handlers = 12
	finish := make(chan struct{})
	var busy atomic.Int64
	slow := func(context.Context, *mongoq.Reservation) error {
		busy.Add(1)
		<-finish
		return nil
	}
	cfg := mongoq.WorkerConfig{Concurrency: handlers}
	qs := []*mongoq.Queue{newQueue(t, store, "a"), newQueue(t, store, "b"), newQueue(t, store, "c"), newQueue(t, store, "d")}
	for _, q := range qs {
		pushAll(t, q, ints(handlers))
	}
	for _, q := range qs[1:] {
		cfg.Also = append(cfg.Also, mongoq.Source{Queue: q, Handler: slow})
	}
	w := run(t, qs[0], slow, cfg)
	require.Eventually(t, func() bool { return busy.Load() == handlers }, late, 2*time.Millisecond)
	// Each may have claimed once for its share, and one of them more before the others had theirs.
	require.LessOrEqual(t, len(w.told(mongoq.EventReserved)), 3*handlers)
	close(finish)
	w.awaits(t, mongoq.EventCommitted, len(qs)*handlers)
}

// clientOf is a database of a server of one's own, through a client of its own.
func clientOf(t testing.TB, server *mongotest.Server, opts ...*options.ClientOptions) *mongo.Database {
	t.Helper()
	c, err := mongo.Connect(append([]*options.ClientOptions{options.Client().ApplyURI(server.URI()).SetHeartbeatInterval(500 * time.Millisecond)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = c.Disconnect(ctx)
	})
	return c.Database("private")
}
