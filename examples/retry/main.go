// Command retry calls HTTP endpoints by a queue, so that a call survives an endpoint that is ill. The program starts
// the endpoints itself, on the loopback address:
//
//   - /flaky answers 503 until it heals: it is called again after the queue's backoff until it does;
//   - /busy answers 429 and says when to come back: RetryIn waits that long;
//   - /closed answers 425 before it opens: Snooze calls again later, and no failure counts;
//   - /broken answers 500 for ever: when the backoff gives up, the call is a dead letter;
//   - /gone answers 410: no retry would help, so the call is a dead letter at once.
//
// It uses the server that MONGODB_URI names, and there the database mongoq_retry, which it drops first. Without
// MONGODB_URI it starts a mongod for as long as it runs.
//
//	go run ./examples/retry
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v4"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Call is a job: an endpoint to call.
type Call struct {
	URL string `bson:"url"`
}

func main() {
	if err := start(); err != nil {
		fmt.Fprintln(os.Stderr, "retry:", err)
		os.Exit(1)
	}
}

func start() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if os.Getenv("MONGODB_URI") == "" {
		fmt.Println("MONGODB_URI is not set: this program brings its own server")
	}
	client, disconnect, err := mongotest.Connect(ctx, func(what string) { fmt.Println("  " + what) })
	if err != nil {
		return err
	}
	defer disconnect()
	db := client.Database("mongoq_retry")
	if err := db.Drop(ctx); err != nil {
		return fmt.Errorf("dropping what the last run left: %w", err)
	}
	return callAll(ctx, db, os.Stdout)
}

// fiveRetries waits 0.1 s, 0.2 s, 0.4 s and so on, up to a second, each a fifth more or less, then gives up. The
// default, mongoq.DefaultRetry, is more patient: 25 retries, from 1 s to 1 h.
func fiveRetries() backoff.BackOff {
	return backoff.WithMaxRetries(backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(100*time.Millisecond),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0.2),
		backoff.WithMaxInterval(time.Second),
		backoff.WithMaxElapsedTime(0),
	), 5)
}

// callAll calls every endpoint until it answers or is given up.
func callAll(ctx context.Context, db *mongo.Database, out io.Writer) (err error) {
	base, closeEndpoints, err := serveEndpoints()
	if err != nil {
		return err
	}
	defer closeEndpoints()
	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	calls, err := store.Queue("calls", mongoq.QueueConfig{Retry: fiveRetries})
	if err != nil {
		return err
	}

	paths := []string{"/flaky", "/busy", "/closed", "/broken", "/gone"}
	story := &story{out: out, began: time.Now(), left: len(paths), over: make(chan struct{})}
	worker, err := calls.Worker(mongoq.Handle(call), mongoq.WorkerConfig{
		Timeout:    2 * time.Second, // of each call
		Middleware: []mongoq.Middleware{story.middleware},
		OnEvent:    story.note,
	})
	if err != nil {
		return err
	}
	for _, path := range paths {
		if _, err := calls.Push(ctx, Call{URL: base + path}); err != nil {
			return err
		}
	}

	working, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-story.over:
		case <-ctx.Done():
		}
		stop()
	}()
	if err := worker.Run(working); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return nil // Ctrl-C: what is left is in the queue
	}

	fmt.Fprintln(out, "\nThe dead letters, for somebody to look at and, once mended, to Redrive:")
	for e, err := range calls.DeadLetters().List(ctx) {
		if err != nil {
			return err
		}
		var c Call
		if err := e.Decode(&c); err != nil {
			return err
		}
		fmt.Fprintf(out, "  %s: kind %q after %d failures, the last: %s\n", c.URL, e.Dead.Kind, len(e.Failures), e.Dead.Msg)
	}
	return nil
}

// call is the work. What it returns says what becomes of the job.
func call(ctx context.Context, c Call) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL, nil)
	if err != nil {
		return backoff.Permanent(err) // no URL: it will never be one
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err // nobody answers: again, after the backoff
	}
	defer res.Body.Close()
	switch code := res.StatusCode; {
	case code < 300:
		return nil
	case code == http.StatusTooManyRequests:
		after, err := strconv.Atoi(res.Header.Get("Retry-After"))
		if err != nil {
			return errors.New(res.Status)
		}
		return mongoq.RetryIn(time.Duration(after)*time.Second, errors.New(res.Status))
	case code == http.StatusTooEarly:
		return mongoq.Snooze(300 * time.Millisecond)
	case code >= 400 && code < 500:
		return backoff.Permanent(errors.New(res.Status))
	default:
		return errors.New(res.Status)
	}
}

// story prints what happens, and knows when it is over.
type story struct {
	out   io.Writer
	began time.Time
	over  chan struct{}

	mu   sync.Mutex
	left int
}

func (s *story) tell(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, "%5.2f s  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

func (s *story) middleware(next mongoq.Handler) mongoq.Handler {
	return func(ctx context.Context, r *mongoq.Reservation) error {
		err := next(ctx, r)
		var c Call
		if r.Decode(&c) == nil {
			answer := "answered"
			if err != nil {
				answer = err.Error()
			}
			s.tell("%s, failures so far: %d: %s", c.URL, r.Retries, answer)
		}
		return err
	}
}

// note counts the calls that are over.
func (s *story) note(e mongoq.Event) {
	if e.Kind != mongoq.EventCommitted && e.Kind != mongoq.EventDeadLettered {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left--; s.left == 0 {
		close(s.over)
	}
}
