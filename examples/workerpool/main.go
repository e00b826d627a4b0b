// Command workerpool is a producer and a pool of handlers, as a service would run them: progress once a second, and a
// clean stop. Ctrl-C (SIGINT, or SIGTERM) lets the running jobs end, stores what they came to, and gives back what was
// not begun; a second Ctrl-C ends the program at once, and what it held is delivered again when the leases end.
//
// It uses the server that MONGODB_URI names, and there the database mongoq_workerpool; what one run leaves, the next
// one does. Without MONGODB_URI it starts a mongod for as long as it runs.
//
//	go run ./examples/workerpool           # for five seconds
//	go run ./examples/workerpool -for 0    # until Ctrl-C
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v4"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Picture is a job: a picture that needs a thumbnail.
type Picture struct {
	Name string `bson:"name"`
	Size int    `bson:"size"`
}

// config is what the flags say.
type config struct {
	runFor      time.Duration
	rate        int
	concurrency int
}

func main() {
	var cfg config
	flag.DurationVar(&cfg.runFor, "for", 5*time.Second, "how long to run; 0: until Ctrl-C")
	flag.IntVar(&cfg.rate, "rate", 100, "pictures pushed a second")
	flag.IntVar(&cfg.concurrency, "concurrency", 8, "handlers at once")
	flag.Parse()
	if err := start(cfg); err != nil {
		fmt.Fprintln(os.Stderr, "workerpool:", err)
		os.Exit(1)
	}
}

func start(cfg config) error {
	if cfg.rate < 1 {
		return fmt.Errorf("-rate must be at least 1, got %d", cfg.rate)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C is not caught any more: it ends the program

	if os.Getenv("MONGODB_URI") == "" {
		fmt.Println("MONGODB_URI is not set: this program brings its own server")
	}
	client, disconnect, err := mongotest.Connect(ctx, func(what string) { fmt.Println("  " + what) })
	if err != nil {
		return err
	}
	defer disconnect()
	return serve(ctx, client.Database("mongoq_workerpool"), cfg, os.Stdout)
}

// serve runs the producer and the pool until ctx ends, or for as long as cfg says.
func serve(ctx context.Context, db *mongo.Database, cfg config, out io.Writer) (err error) {
	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	pictures, err := store.Queue("pictures", mongoq.QueueConfig{
		Lease: 10 * time.Second, // extended for as long as a handler runs
		Retry: func() backoff.BackOff {
			return backoff.WithMaxRetries(backoff.NewConstantBackOff(200*time.Millisecond), 5)
		},
	})
	if err != nil {
		return err
	}

	if cfg.runFor > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.runFor)
		defer cancel()
	}
	p := &progress{out: out, began: time.Now()}
	pool, err := pictures.Worker(mongoq.Handle(thumbnail), mongoq.WorkerConfig{
		Concurrency:  cfg.concurrency,
		Timeout:      5 * time.Second,
		DrainTimeout: 10 * time.Second,
		OnEvent:      p.note,
		Middleware:   []mongoq.Middleware{mongoq.Logging(slog.New(slog.DiscardHandler))}, // slog.Default() in a service
	})
	if err != nil {
		return err
	}

	var others sync.WaitGroup
	others.Go(func() { produce(ctx, pictures, cfg.rate, p) })
	others.Go(func() { p.report(ctx, pictures) })
	context.AfterFunc(ctx, func() { p.tell("stopping: the jobs that run may end, nothing new is begun") })
	err = pool.Run(ctx) // until ctx ends; what was being done is done then, and stored
	others.Wait()
	if err != nil {
		return err
	}
	left, err := pictures.Stats(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	p.tell("stopped: %d pushed, %d done, %d failures retried; %d wait for the next run, %d are held", p.pushed.Load(), p.done.Load(), p.failed.Load(), left.Total, left.Reserved)
	return nil
}

// thumbnail is the work: it takes a while, and fails now and then.
func thumbnail(ctx context.Context, p Picture) error {
	select {
	case <-time.After(time.Duration(10+p.Size%50) * time.Millisecond):
	case <-ctx.Done(): // the job's timeout, its lost lease, or a drain that lasts too long
		return context.Cause(ctx)
	}
	if rand.IntN(20) == 0 {
		return fmt.Errorf("%s: out of colour", p.Name)
	}
	return nil
}

// produce pushes pictures at a steady rate until ctx ends.
func produce(ctx context.Context, q *mongoq.Queue, rate int, p *progress) {
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		_, err := q.Push(ctx, Picture{Name: fmt.Sprintf("picture-%d.jpg", n), Size: n})
		switch {
		case err == nil:
			p.pushed.Add(1)
		case ctx.Err() == nil:
			p.tell("a push failed: %v", err)
		}
	}
}

// progress counts what happens. The events of a worker are made for metrics.
type progress struct {
	out   io.Writer
	began time.Time

	pushed, done, failed, dead atomic.Int64
	waited, ran                atomic.Int64 // in all, in ns

	mu sync.Mutex // one line at a time
}

func (p *progress) note(e mongoq.Event) {
	switch e.Kind {
	case mongoq.EventCommitted:
		p.done.Add(1)
		p.waited.Add(int64(e.Waited))
		p.ran.Add(int64(e.Ran))
	case mongoq.EventFailed:
		p.failed.Add(1)
	case mongoq.EventDeadLettered:
		p.dead.Add(1)
	}
}

func (p *progress) report(ctx context.Context, q *mongoq.Queue) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s, err := q.Stats(ctx)
		if err != nil {
			continue
		}
		n := max(p.done.Load(), 1)
		p.tell("%d pushed, %d done, %d failed, %d dead; %d wait, %d are held; a job waited %v and ran %v",
			p.pushed.Load(), p.done.Load(), p.failed.Load(), p.dead.Load(), s.Ready+s.Scheduled, s.Reserved,
			time.Duration(p.waited.Load()/n).Round(time.Millisecond), time.Duration(p.ran.Load()/n).Round(time.Millisecond))
	}
}

func (p *progress) tell(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, "%5.2f s  %s\n", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}
