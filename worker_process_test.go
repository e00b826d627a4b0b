package mongoq_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"go.uber.org/goleak"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// These tests run workers in processes of their own: the test's binary again, told by its environment to be a child,
// which runs TestChildProcess only. A child says what happens in lines on its standard output, is told to stop by a
// line on its standard input, and ends with its parent, whose end of that pipe then closes.

const childVariable = "MONGOQ_TEST_CHILD"

// childSpec is what a child is told.
type childSpec struct {
	Role        string
	URI, DB     string
	Lease       time.Duration
	Concurrency int
	Command     string // that is held
	Back        bool   // on its way back
}

// childSays is a line of a child.
type childSays struct {
	What   string        `json:"what"`
	ID     bson.ObjectID `json:"id,omitzero"`
	At     int64         `json:"at,omitempty"` // in ns since 1970, by the clock of the machine that all share
	Sent   int64         `json:"sent,omitempty"`
	N      float64       `json:"n,omitempty"`
	Text   string        `json:"text,omitempty"`
	Lost   bool          `json:"lost,omitempty"`
	Delivs int           `json:"delivs,omitempty"`
}

// child is a process under test.
type child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{}

	mu          sync.Mutex
	said        []childSays
	other, errs strings.Builder // what else it says
}

// spawn starts a child. It is killed when the test ends, if it has not ended by itself.
func spawn(t testing.TB, db *mongo.Database, spec childSpec) *child {
	t.Helper()
	spec.URI, spec.DB = mongotest.URI(t, kindOf(t, db)), db.Name()
	data, err := json.Marshal(spec)
	require.NoError(t, err)
	c := &child{ended: make(chan struct{})}
	c.cmd = exec.CommandContext(context.Background(), os.Args[0], "-test.run=^TestChildProcess$", "-test.count=1", "-test.timeout=5m")
	c.cmd.Env = append(os.Environ(), childVariable+"="+string(data))
	c.cmd.Stderr = &c.errs
	c.stdin, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	go func() {
		defer close(c.ended)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var said childSays
			line, ours := strings.CutPrefix(lines.Text(), "@")
			c.mu.Lock()
			if ours && json.Unmarshal([]byte(line), &said) == nil {
				c.said = append(c.said, said)
			} else {
				fmt.Fprintln(&c.other, lines.Text())
			}
			c.mu.Unlock()
		}
		_ = c.cmd.Wait()
	}()
	t.Cleanup(func() {
		c.signal(syscall.SIGKILL)
		<-c.ended
		if t.Failed() {
			t.Logf("the child %s:\n%s%s", spec.Role, c.other.String(), c.errs.String())
		}
	})
	return c
}

func (c *child) signal(s syscall.Signal) { _ = c.cmd.Process.Signal(s) }

// dies kills the child, and waits until the server, too, has ended what it was doing for it: a write goes on without
// the client that sent it.
func (c *child) dies(t testing.TB, db *mongo.Database) {
	t.Helper()
	c.signal(syscall.SIGKILL)
	await(t, c.ended, "the child did not end")
	require.Eventually(t, func() bool { // it closes a connection behind what came by it
		cur, err := db.Client().Database("admin").Aggregate(t.Context(), bson.A{
			bson.D{{Key: "$currentOp", Value: bson.D{{Key: "idleConnections", Value: true}}}},
			bson.D{{Key: "$match", Value: bson.D{{Key: "appName", Value: childName(db.Name())}}}},
		})
		require.NoError(t, err)
		var open []bson.Raw
		require.NoError(t, cur.All(t.Context(), &open))
		return len(open) == 0
	}, late, 5*time.Millisecond, "the server still has connections of the child")
}

// childName is how a child calls itself to the server.
func childName(db string) string { return "child of " + db }

// heard gives what the child has said so far of this kind.
func (c *child) heard(what string) []childSays {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.said), func(s childSays) bool { return s.What != what })
}

// hears waits until the child has said something n times.
func (c *child) hears(t testing.TB, what string, n int) []childSays {
	t.Helper()
	require.Eventually(t, func() bool { return len(c.heard(what)) >= n }, 2*late, 2*time.Millisecond, "the child should say %q %d times", what, n)
	return c.heard(what)
}

// ends tells the child to stop, unless it has ended by itself, and waits for its end.
func (c *child) ends(t testing.TB) {
	t.Helper()
	_, _ = io.WriteString(c.stdin, "stop\n")
	await(t, c.ended, "the child did not end")
	require.Equal(t, 0, c.cmd.ProcessState.ExitCode())
}

// TestChildProcess is what a child runs. It is no test of its own.
func TestChildProcess(t *testing.T) {
	t.Parallel()
	data := os.Getenv(childVariable)
	if data == "" {
		t.Skip("runs in child processes only")
	}
	var spec childSpec
	require.NoError(t, json.Unmarshal([]byte(data), &spec))
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
		if line != "stop\n" {
			os.Exit(3) // the parent is gone
		}
		stop()
	}()
	var mu sync.Mutex
	say := func(s childSays) {
		data, err := json.Marshal(s)
		if err != nil {
			panic(err)
		}
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf("@%s\n", data)
	}
	map[string]func(context.Context, *testing.T, childSpec, func(childSays)){
		"starts": childStarts, "holds": childHolds, "ledger": childLedger, "idle": childIdle, "leaks": childLeaks,
		"joins": childJoins, "redrives": childRedrives, "files": childFiles,
	}[spec.Role](ctx, t, spec, say)
}

// childQueue opens the child's queue.
func childQueue(t *testing.T, spec childSpec, opts ...*options.ClientOptions) (*mongo.Database, *mongoq.Queue) {
	t.Helper()
	client, err := mongo.Connect(append([]*options.ClientOptions{options.Client().ApplyURI(spec.URI).SetAppName(childName(spec.DB))}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Disconnect(context.Background())) })
	db := client.Database(spec.DB)
	return db, newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{
		Lease: spec.Lease, PollInterval: time.Minute, Retry: retries(1000),
	})
}

// childRuns runs a worker until the child is told to stop.
func childRuns(ctx context.Context, t *testing.T, spec childSpec, q *mongoq.Queue, h mongoq.Handler, say func(childSays)) {
	t.Helper()
	w, err := q.Worker(h, mongoq.WorkerConfig{Concurrency: spec.Concurrency, OnEvent: func(e mongoq.Event) {
		if e.Kind != mongoq.EventReserved && spec.Role != "ledger" {
			say(childSays{What: string(e.Kind), ID: e.ID})
		}
	}})
	require.NoError(t, err)
	say(childSays{What: "runs"})
	require.NoError(t, w.Run(ctx))
}

// childStarts says when each job is begun. The payload is when it was pushed.
func childStarts(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	_, q := childQueue(t, spec)
	childRuns(ctx, t, spec, q, func(_ context.Context, r *mongoq.Reservation) error {
		at := time.Now().UnixNano()
		sent, _ := r.Payload.AsInt64OK()
		say(childSays{What: "begun", ID: r.ID, At: at, Sent: sent})
		return nil
	}, say)
}

// childHolds holds the jobs whose payload is "hold" until their context ends, and says what it is told then.
func childHolds(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	_, q := childQueue(t, spec)
	childRuns(ctx, t, spec, q, func(ctx context.Context, r *mongoq.Reservation) error {
		say(childSays{What: "begun", ID: r.ID})
		if what, _ := r.Payload.StringValueOK(); what != "hold" {
			return nil
		}
		<-ctx.Done()
		lost := errors.Is(context.Cause(ctx), mongoq.ErrLeaseLost)
		err := r.Commit(context.WithoutCancel(ctx))
		say(childSays{What: "told", ID: r.ID, Lost: lost && errors.Is(err, mongoq.ErrLeaseLost), Text: fmt.Sprint(context.Cause(ctx), "; ", err)})
		return nil
	}, say)
}

// entry is a line of the ledger: one run of a job.
type entry struct {
	Job        bson.ObjectID `bson:"job"`
	Deliveries int           `bson:"deliveries"`
	Begun      int64         `bson:"begun"`
	Ended      int64         `bson:"ended"`
	Process    int           `bson:"process"`
}

// childLedger runs jobs that do nothing, some of them for a while, and writes down when each began and ended.
func childLedger(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	db, q := childQueue(t, spec)
	var mu sync.Mutex
	var entries []any
	write := func() {
		mu.Lock()
		some := entries
		entries = nil
		mu.Unlock()
		if len(some) > 0 {
			_, err := db.Collection("ledger").InsertMany(context.Background(), some)
			require.NoError(t, err)
		}
	}
	childRuns(ctx, t, spec, q, func(_ context.Context, r *mongoq.Reservation) error {
		e := entry{Job: r.ID, Deliveries: r.Deliveries, Begun: time.Now().UnixNano(), Process: os.Getpid()}
		switch n, _ := r.Payload.AsInt64OK(); {
		case n%1000 == 1: // only heartbeats keep the lease
			_ = lasting(context.Background(), spec.Lease*3/2)
		case n%100 == 0:
			_ = lasting(context.Background(), 20*time.Millisecond)
		}
		e.Ended = time.Now().UnixNano()
		mu.Lock()
		entries = append(entries, e)
		mu.Unlock()
		return nil
	}, say)
	write()
	say(childSays{What: "written"})
}

// childIdle measures what a worker on an empty queue costs.
func childIdle(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	var calls atomic.Int64
	var names sync.Map
	monitor := &event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		calls.Add(1)
		n, _ := names.LoadOrStore(e.CommandName, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
	}}
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI).SetMonitor(monitor))
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Disconnect(context.Background())) }()
	store := openStore(t, client.Database(spec.DB))
	q := newQueue(t, store, "q") // as it is by default
	w := run(t, q, idle)
	require.Eventually(t, func() bool { return mongoq.Hears(store) }, soon, time.Millisecond)
	push(t, q, "x")
	w.awaits(t, mongoq.EventCommitted, 1)
	awaitSleep(t, store, "q", 1)
	cpu := func() time.Duration {
		var u syscall.Rusage
		require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	names.Clear()
	before, used, began := calls.Load(), cpu(), time.Now()
	require.NoError(t, lasting(ctx, 5*time.Second))
	took := time.Since(began).Seconds()
	made, spent := calls.Load()-before, cpu()-used
	text := ""
	names.Range(func(name, n any) bool {
		text += fmt.Sprintf("%s %d, ", name, n.(*atomic.Int64).Load())
		return true
	})
	say(childSays{What: "calls", N: float64(made) / took, Text: text})
	say(childSays{What: "cpu", N: spent.Seconds() * 1000 / took})
	require.NoError(t, w.ends(t))
}

// childLeaks starts and stops workers, many at a time, and looks for goroutines that stay.
func childLeaks(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	before := goleak.IgnoreCurrent()
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI))
	require.NoError(t, err)
	store, err := mongoq.Open(ctx, client.Database(spec.DB), mongoq.Config{Logger: slog.New(&logbook{})})
	require.NoError(t, err)
	var pushed, ran atomic.Int64
	errs := make([]error, 10)
	var all sync.WaitGroup
	for g := range errs {
		all.Go(func() { errs[g] = startAndStop(ctx, store, 50, &pushed, &ran) })
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	require.NoError(t, store.Close(ctx))
	require.NoError(t, client.Disconnect(ctx))
	require.NoError(t, goleak.Find(before))
	say(childSays{What: "clean", N: float64(pushed.Load()), At: ran.Load()})
}

// startAndStop runs workers on two queues, one after the other, each for as long as chance has it.
func startAndStop(ctx context.Context, store *mongoq.Store, times int, pushed, ran *atomic.Int64) error {
	q, err := store.Queue("q", mongoq.QueueConfig{Lease: time.Minute})
	if err != nil {
		return err
	}
	also, err := store.Queue("also", mongoq.QueueConfig{Lease: time.Minute})
	if err != nil {
		return err
	}
	for range times {
		ctx, stop := context.WithCancel(ctx)
		limit := rand.Int64N(5) // jobs after which it stops
		var mine atomic.Int64
		h := func(context.Context, *mongoq.Reservation) error {
			ran.Add(1)
			if mine.Add(1) == limit {
				stop()
			}
			return nil
		}
		w, err := q.Worker(h, mongoq.WorkerConfig{Concurrency: 1 + rand.IntN(5), Also: []mongoq.Source{{Queue: also, Handler: h}}})
		if err != nil {
			stop()
			return err
		}
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		for i := range 3 {
			if _, err := []*mongoq.Queue{q, also}[i%2].Push(ctx, i); err == nil {
				pushed.Add(1)
			}
		}
		if rand.IntN(2) == 0 { // or others take what this one waits for
			_ = lasting(ctx, time.Duration(rand.IntN(10))*time.Millisecond)
		}
		stop()
		if err := <-ended; err != nil {
			return err
		}
	}
	return nil
}

func TestWorkersStartAndStopWithoutALeak(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	c := spawn(t, db, childSpec{Role: "leaks"})
	clean := c.hears(t, "clean", 1)[0]
	c.ends(t)
	t.Logf("500 workers started and stopped; %.0f pushed, %d run", clean.N, clean.At)

	// Each ran once, or waits as if nobody had ever touched it.
	for _, q := range []string{"q", "also"} {
		queue := newQueue(t, openStore(t, db), q)
		s, err := queue.Stats(t.Context())
		require.NoError(t, err)
		require.Zero(t, s.Reserved)
		clean.At += s.Total
	}
	// A push whose context ended may have been stored though it was not acknowledged.
	require.GreaterOrEqual(t, clean.At, int64(clean.N))
	n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "retries", Value: bson.D{{Key: "$gt", Value: 0}}}})
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestAnIdleWorkerHardlyAsksTheServer(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	c := spawn(t, db, childSpec{Role: "idle"})
	calls, cpu := c.hears(t, "calls", 1)[0], c.hears(t, "cpu", 1)[0]
	t.Logf("%.2f server calls a second (%s), %.2f ms of CPU a second", calls.N, calls.Text, cpu.N)
	require.LessOrEqual(t, calls.N, 1.2, calls.Text)
}

// percentile is the value below which p of a hundred lie.
func percentile(all []time.Duration, p int) time.Duration {
	slices.Sort(all)
	return all[min(len(all)*p/100, len(all)-1)]
}

func TestAWorkerInAnotherProcessStartsAtOnce(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q")
	c := spawn(t, db, childSpec{Role: "starts", Lease: 30 * time.Second})
	c.hears(t, "runs", 1)
	push(t, q, time.Now().UnixNano())
	c.hears(t, "begun", 1)
	had := 1
	for _, rate := range []int{20, 300} {
		pushes := rate * 3 / 2
		next := time.NewTicker(time.Second / time.Duration(rate))
		for range pushes {
			<-next.C
			push(t, q, time.Now().UnixNano())
		}
		next.Stop()
		var took []time.Duration
		for _, s := range c.hears(t, "begun", had+pushes)[had:] {
			took = append(took, time.Duration(s.At-s.Sent))
		}
		had += pushes
		t.Logf("push to start in another process, %d a second: p50 %v, p99 %v, most %v",
			rate, percentile(took, 50), percentile(took, 99), percentile(took, 100))
		require.Less(t, percentile(took, 50), pulse, "only the poll, once a minute, could be so late")
	}
	c.ends(t)
}

func TestJobsOfAKilledProcessStartElsewhere(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: lease, Retry: retries(1000)})
	c := spawn(t, db, childSpec{Role: "holds", Lease: lease, Concurrency: 20})
	c.hears(t, "runs", 1)
	held := pushAll(t, q, []any{"hold", "hold", "hold", "hold", "hold"})
	quick := pushAll(t, q, []any{"quick", "quick", "quick", "quick", "quick"})
	c.hears(t, "begun", len(held)+len(quick))
	c.hears(t, "committed", len(quick))

	// Another is idle meanwhile.
	var mu sync.Mutex
	begun := map[bson.ObjectID]time.Time{}
	w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
		mu.Lock()
		defer mu.Unlock()
		begun[r.ID] = time.Now()
		return nil
	})
	require.NoError(t, lasting(t.Context(), lease)) // heartbeats keep what the child holds
	require.Empty(t, w.told())
	killed := time.Now()
	c.signal(syscall.SIGKILL)
	events := w.awaits(t, mongoq.EventCommitted, len(held))
	for _, e := range events {
		require.Equal(t, 1, e.Retries)
	}
	require.NoError(t, w.ends(t))
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, begun, len(held))
	for _, id := range held {
		require.Contains(t, begun, id)
		t.Logf("began elsewhere %v after the kill, under a lease of %v", begun[id].Sub(killed), lease)
		require.Less(t, begun[id].Sub(killed), lease+time.Second+4*time.Second)
	}
	requireEmpty(t, db)
}

func TestAHolderThatWasPausedForTooLongIsToldThatItLost(t *testing.T) {
	t.Parallel()
	const lease = time.Second
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: lease, Retry: retries(1000), Retention: time.Hour})
	c := spawn(t, db, childSpec{Role: "holds", Lease: lease, Concurrency: 5})
	c.hears(t, "runs", 1)
	ids := pushAll(t, q, []any{"hold", "hold", "hold"})
	c.hears(t, "begun", len(ids))
	c.signal(syscall.SIGSTOP)
	w := run(t, q, func(_ context.Context, r *mongoq.Reservation) error {
		return r.Commit(context.Background(), mongoq.Result("the second"))
	})
	w.awaits(t, mongoq.EventCommitted, len(ids))
	c.signal(syscall.SIGCONT)
	for _, s := range c.hears(t, "told", len(ids)) {
		require.True(t, s.Lost, s.Text)
	}
	c.hears(t, "lease-lost", len(ids))
	c.ends(t)
	for _, id := range ids {
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 2, e.Deliveries)
		require.Equal(t, "the second", e.Result.StringValue())
	}
}

// standstill is the longest for which a server has stored nothing, or this process has not run, until ctx ends.
func standstill(ctx context.Context, db *mongo.Database) (longest time.Duration) {
	probe := db.Collection("probe", options.Collection().SetWriteConcern(&writeconcern.WriteConcern{W: "majority", Journal: &journaled}))
	for last := time.Now(); ctx.Err() == nil; _ = lasting(ctx, 20*time.Millisecond) {
		_, err := probe.UpdateByID(background, 1, bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: 1}}}}, upsert)
		longest = max(longest, time.Since(last))
		if err == nil {
			last = time.Now()
		}
	}
	return longest
}

var journaled = true

// Two processes share 20,000 jobs, some of which last longer than the lease, and each process stands still now and then, for
// less than the lease: no job runs twice.
func TestNoJobRunsTwiceAtOnceThoughProcessesPause(t *testing.T) {
	t.Parallel()
	const lease = 10 * time.Second
	for tries := 1; ; tries++ {
		twice, still := runsOfPausingProcesses(t, lease)
		if twice == "" {
			return
		}
		// Where the machine itself stands still for long, leases end.
		require.Greater(t, still, lease*2/5, "though the server was there at all times, %s", twice)
		require.Less(t, tries, 3, "the machine stands still for up to %v; %s", still, twice)
	}
}

// runsOfPausingProcesses says which job ran twice, and for how long the machine stood still at the most.
func runsOfPausingProcesses(t *testing.T, lease time.Duration) (twice string, still time.Duration) {
	t.Helper()
	const n = 20_000
	db := mongotest.Database(t, mongotest.ReplicaSet)
	q := newQueue(t, openStore(t, db), "q")
	pushAll(t, q, ints(n))
	spec := childSpec{Role: "ledger", Lease: lease, Concurrency: 20}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var pausing sync.WaitGroup
	pausing.Go(func() { still = standstill(ctx, db) })
	children := []*child{spawn(t, db, spec), spawn(t, db, spec)}
	var pauses atomic.Int64
	for _, c := range children {
		c.hears(t, "runs", 1)
		pausing.Go(func() {
			for lasting(ctx, time.Duration(20+rand.IntN(300))*time.Millisecond) == nil {
				c.signal(syscall.SIGSTOP)
				_ = lasting(ctx, time.Duration(20+rand.IntN(700))*time.Millisecond)
				c.signal(syscall.SIGCONT)
				pauses.Add(1)
			}
		})
	}
	began := time.Now()
	require.Eventually(t, func() bool {
		s, err := q.Stats(t.Context())
		return err == nil && s.Total == 0
	}, 4*late, 50*time.Millisecond)
	took := time.Since(began)
	stop()
	pausing.Wait()
	for _, c := range children {
		c.ends(t)
		require.NotEmpty(t, c.heard("written"))
	}

	cur, err := db.Collection("ledger").Find(t.Context(), bson.D{})
	require.NoError(t, err)
	var ledger []entry
	require.NoError(t, cur.All(t.Context(), &ledger))
	runs, byProcess := map[bson.ObjectID][]entry{}, map[int]int{}
	for _, e := range ledger {
		runs[e.Job] = append(runs[e.Job], e)
		byProcess[e.Process]++
	}
	t.Logf("%d jobs in %v, over %d pauses; runs by process: %v; the server stood still for up to %v", n, took, pauses.Load(), byProcess, still)
	require.Len(t, runs, n)
	require.Len(t, byProcess, 2)
	for id, entries := range runs {
		slices.SortFunc(entries, func(a, b entry) int { return int(a.Begun - b.Begun) })
		for i, e := range entries[1:] {
			if e.Begun < entries[i].Ended {
				return fmt.Sprintf("%s ran twice at once: %v", id.Hex(), entries), still
			}
		}
		if len(entries) > 1 {
			twice = fmt.Sprintf("%s ran again: %v", id.Hex(), entries)
		}
	}
	return twice, still
}
