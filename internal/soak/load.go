package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

const (
	loadProcesses = 4
	loadHandlers  = 16 // of each
	loadBatch     = 1000
	loadQueues    = 10_000
	loadWaiting   = 1000
	sampleEvery   = 2 * time.Second
)

// load puts many jobs in, then has them handled, and watches whether memory and rates stay flat; then it has one process
// wait at many queues at once.
func load(ctx context.Context, cfg config, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "mongoq-load-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	server, err := mongotest.Start(ctx, mongotest.Options{ReplicaSet: 1, CacheMB: 1024, Progress: func(s string) { fmt.Fprintln(out, s) }})
	if err != nil {
		return err
	}
	defer server.Stop()
	conn, err := mongo.Connect(options.Client().ApplyURI(server.URI()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Disconnect(context.WithoutCancel(ctx)) }()
	db := conn.Database(dbName)
	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	if err := fill(ctx, store, cfg.load, out); err != nil {
		return err
	}
	if err := drainAll(ctx, db, server.URI(), dir, cfg.load, out); err != nil {
		return err
	}
	return crowd(ctx, db, store, min(loadQueues, max(cfg.load/100, 10)), min(loadWaiting, max(cfg.load/1000, 1)), out)
}

// fill pushes the jobs, each with a number of its own.
func fill(ctx context.Context, store *mongoq.Store, n int, out io.Writer) error {
	q, err := store.Queue(qWork, mongoq.QueueConfig{})
	if err != nil {
		return err
	}
	began, said := time.Now(), time.Now()
	for from := 0; from < n; from += loadBatch {
		batch := make([]any, min(loadBatch, n-from))
		for i := range batch {
			batch[i] = int32(from + i)
		}
		if _, err := q.PushMany(ctx, batch); err != nil {
			return err
		}
		if time.Since(said) > 5*sampleEvery {
			said = time.Now()
			fmt.Fprintf(out, "%6.1fs  %d in, %d MB here\n", time.Since(began).Seconds(), from+len(batch), rss(os.Getpid()))
		}
	}
	fmt.Fprintf(out, "in: %d in %.1f s, %.0f a second\n", n, time.Since(began).Seconds(), float64(n)/time.Since(began).Seconds())
	return nil
}

// numbersOf is the file in which a process keeps the numbers of the jobs that it handled, four bytes each.
func numbersOf(dir, proc string) string { return filepath.Join(dir, proc+".numbers") }

// load is a worker under load.
func (c *client) load(ctx context.Context) error {
	f, err := os.Create(numbersOf(c.spec.Dir, c.spec.Proc))
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<12)
	var mu sync.Mutex
	if !c.open(ctx) {
		return errors.New("the store could not be opened")
	}
	q, err := c.store.Queue(qWork, mongoq.QueueConfig{})
	if err != nil {
		return err
	}
	worker, err := q.Worker(func(_ context.Context, r *mongoq.Reservation) error {
		n, ok := r.Payload.Int32OK()
		if !ok {
			return fmt.Errorf("the payload is %v", r.Payload)
		}
		mu.Lock()
		defer mu.Unlock()
		_, err := w.Write(binary.LittleEndian.AppendUint32(nil, uint32(n)))
		return err
	}, mongoq.WorkerConfig{Concurrency: c.spec.Handlers})
	if err != nil {
		return err
	}
	if err := worker.Run(ctx); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return c.store.Close(context.Background())
}

// A sample is what was seen at one time.
type sample struct {
	at   time.Duration
	done int
	rss  int // of all workers, in MB
}

// drainAll runs the worker processes until all jobs are done.
func drainAll(ctx context.Context, db *mongo.Database, uri, dir string, n int, out io.Writer) error {
	var cmds []*exec.Cmd
	var stops []io.WriteCloser
	defer func() {
		for _, cmd := range cmds {
			_ = cmd.Process.Kill()
		}
	}()
	for i := range loadProcesses {
		cmd, stdin, err := start(clientSpec{Role: roleLoad, Proc: fmt.Sprintf("load%d", i), URI: uri, DB: dbName, Dir: dir, Calm: true, Handlers: loadHandlers})
		if err != nil {
			return err
		}
		cmds, stops = append(cmds, cmd), append(stops, stdin)
	}
	began := time.Now()
	var samples []sample
	for done := 0; ; {
		if err := pause(ctx, sampleEvery); err != nil {
			return err
		}
		left, err := leftOf(ctx, db)
		if err != nil {
			return err
		}
		s := sample{at: time.Since(began), done: n - int(left)}
		var line strings.Builder
		fmt.Fprintf(&line, "%6.1fs  %8d done, %6.0f a second; MB:", s.at.Seconds(), s.done, float64(s.done-done)/sampleEvery.Seconds())
		for _, cmd := range cmds {
			mb := rss(cmd.Process.Pid)
			s.rss += mb
			fmt.Fprintf(&line, " %d", mb)
		}
		fmt.Fprintf(out, "%s, mongod %d\n", line.String(), serverMemory(ctx, db))
		samples = append(samples, s)
		done = s.done
		if left == 0 {
			break
		}
	}
	took := time.Since(began)
	for i, cmd := range cmds {
		_, _ = io.WriteString(stops[i], "stop\n")
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("worker %d: %w", i, err)
		}
	}
	cmds = nil
	fmt.Fprintf(out, "out: %d in %.1f s, %.0f a second, by %d handlers in %d processes\n",
		n, took.Seconds(), float64(n)/took.Seconds(), loadProcesses*loadHandlers, loadProcesses)
	if err := eachOnce(dir, n, out); err != nil {
		return err
	}
	return flat(samples, out)
}

// leftOf is how many envelopes there are: all documents but the dividers of the one queue.
func leftOf(ctx context.Context, db *mongo.Database) (int64, error) {
	envs := db.Collection("mongoq")
	all, err := envs.EstimatedDocumentCount(ctx)
	if err != nil {
		return 0, err
	}
	dividers, err := envs.CountDocuments(ctx, bson.D{
		{Key: "q", Value: qWork}, {Key: "processed", Value: nil}, {Key: "prio", Value: bson.D{{Key: "$nin", Value: bson.A{1, 2, 3, 4}}}},
	})
	return all - dividers, err
}

// eachOnce reads which jobs were handled: each, and, where nothing fails, once.
func eachOnce(dir string, n int, out io.Writer) error {
	seen := make([]uint8, n)
	again := 0
	for i := range loadProcesses {
		data, err := os.ReadFile(numbersOf(dir, fmt.Sprintf("load%d", i)))
		if err != nil {
			return err
		}
		for ; len(data) >= 4; data = data[4:] {
			k := binary.LittleEndian.Uint32(data)
			if int(k) >= n {
				return fmt.Errorf("job %d was handled, and there are %d", k, n)
			}
			if seen[k]++; seen[k] > 1 {
				again++
			}
		}
	}
	lost := 0
	for _, times := range seen {
		if times == 0 {
			lost++
		}
	}
	fmt.Fprintf(out, "lost: %d; handled more than once: %d\n", lost, again)
	if lost+again > 0 {
		return fmt.Errorf("%d jobs were lost, %d handled more than once", lost, again)
	}
	return nil
}

// flat compares the second quarter of a run with the last but its end: rates and memory should be about the same.
func flat(samples []sample, out io.Writer) error {
	quarter := len(samples) / 4
	if quarter < 2 {
		fmt.Fprintln(out, "too short to tell whether it is flat")
		return nil
	}
	mean := func(from, to int) (rate, mb float64) {
		for _, s := range samples[from:to] {
			mb += float64(s.rss)
		}
		a, b := samples[from-1], samples[to-1]
		return float64(b.done-a.done) / (b.at - a.at).Seconds(), mb / float64(to-from)
	}
	last := len(samples) - 1
	rate1, mb1 := mean(quarter, 2*quarter)
	rate2, mb2 := mean(last-quarter, last)
	fmt.Fprintf(out, "second quarter: %.0f a second, %.0f MB; last: %.0f a second, %.0f MB\n", rate1, mb1, rate2, mb2)
	if rate2 < rate1/2 {
		return fmt.Errorf("the rate fell from %.0f to %.0f a second", rate1, rate2)
	}
	if mb2 > 1.5*mb1+10*loadProcesses {
		return fmt.Errorf("the memory of the workers grew from %.0f to %.0f MB", mb1, mb2)
	}
	return nil
}

// crowd has one process wait at many queues: some consumers wait, then all get a job, then all queues are gone through.
func crowd(ctx context.Context, db *mongo.Database, store *mongoq.Store, queues, waiting int, out io.Writer) error {
	qs := make([]*mongoq.Queue, queues)
	for i := range qs {
		var err error
		if qs[i], err = store.Queue(fmt.Sprintf("crowd%d", i), mongoq.QueueConfig{}); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	base := rss(os.Getpid())
	late := make(chan time.Duration, waiting)
	var all sync.WaitGroup
	var mu sync.Mutex
	var failed error
	note := func(err error) {
		if err != nil {
			mu.Lock()
			failed = errors.Join(failed, err)
			mu.Unlock()
		}
	}
	handle := func(q *mongoq.Queue) error {
		r, err := q.Reserve(ctx)
		if err != nil {
			return err
		}
		pushed, _ := r.Payload.AsInt64OK()
		took := time.Since(time.Unix(0, pushed))
		if err := r.Commit(ctx); err != nil {
			return err
		}
		select {
		case late <- took:
		default:
		}
		return nil
	}
	for i := range waiting {
		all.Go(func() { note(handle(qs[i])) })
	}
	if err := pause(ctx, 3*time.Second); err != nil { // for all to wait
		return err
	}
	before := commandsOf(ctx, db)
	if err := pause(ctx, 3*time.Second); err != nil {
		return err
	}
	idle := float64(commandsOf(ctx, db)-before) / 3
	fmt.Fprintf(out, "%d consumers wait at %d of %d queues in one process: %d goroutines, %d MB more, %.0f commands a second\n",
		waiting, waiting, queues, runtime.NumGoroutine(), rss(os.Getpid())-base, idle)
	for i := range waiting {
		if _, err := qs[i].Push(ctx, time.Now().UnixNano()); err != nil {
			return err
		}
	}
	all.Wait()
	if failed != nil {
		return failed
	}
	var took []time.Duration
	for range waiting {
		took = append(took, <-late)
	}
	slices.Sort(took)
	fmt.Fprintf(out, "from push to delivery: median %v, 99 %% %v, longest %v\n",
		took[len(took)/2].Round(time.Millisecond), took[len(took)*99/100].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))

	began := time.Now()
	for i := range waiting {
		all.Go(func() {
			for j := i; j < queues; j += waiting {
				if _, err := qs[j].Push(ctx, time.Now().UnixNano()); err != nil {
					note(err)
					return
				}
				if err := handle(qs[j]); err != nil {
					note(err)
					return
				}
			}
		})
	}
	all.Wait()
	if failed != nil {
		return failed
	}
	fmt.Fprintf(out, "a job through each of %d queues in %.1f s; %d MB more\n", queues, time.Since(began).Seconds(), rss(os.Getpid())-base)
	left, err := db.Collection("mongoq").CountDocuments(ctx, bson.D{{Key: "divider", Value: nil}})
	if err == nil && left > 0 {
		err = fmt.Errorf("%d envelopes are left", left)
	}
	return err
}

// rss is the resident memory of a process in MB.
func rss(pid int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, _ := strconv.Atoi(strings.Fields(rest)[0])
			return kb / 1024
		}
	}
	return 0
}

func serverStatus(ctx context.Context, db *mongo.Database) (s struct {
	Mem struct {
		Resident int `bson:"resident"`
	} `bson:"mem"`
	Network struct {
		Requests int64 `bson:"numRequests"`
	} `bson:"network"`
}) {
	_ = db.RunCommand(ctx, bson.D{{Key: "serverStatus", Value: 1}}).Decode(&s)
	return s
}

func serverMemory(ctx context.Context, db *mongo.Database) int {
	return serverStatus(ctx, db).Mem.Resident
}

func commandsOf(ctx context.Context, db *mongo.Database) int64 {
	return serverStatus(ctx, db).Network.Requests
}
