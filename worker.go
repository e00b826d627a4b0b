package mongoq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

const (
	defaultConcurrency  = 10
	defaultDrainTimeout = 20 * time.Second // what comes after it fits into the 30 s that Kubernetes gives
	// stubborn is how long a drain waits for handlers after it has cancelled them.
	stubborn = time.Second
	// commitsBehind is how many commits of a store's workers may be on their way behind the handlers.
	commitsBehind = 2 * settleRound
)

// WorkerConfig is what belongs to a worker. The zero value works.
type WorkerConfig struct {
	// Concurrency is how many handlers run at once, over all queues of the worker. The rule: >= 1.
	//
	// Defaults to 10.
	Concurrency int

	// Timeout ends the context of each job. Zero: none. The rule: >= 0.
	//
	// Defaults to 0.
	Timeout time.Duration

	// DrainTimeout is how long running handlers may go on when Run's context has ended, before theirs is cancelled. The
	// rule: >= 0; a nanosecond has them cancelled at once.
	//
	// Defaults to 20 s.
	DrainTimeout time.Duration

	// NoHeartbeat leaves leases as they are: a handler that runs longer than the queue's Lease loses its envelope.
	//
	// Defaults to false: leases are extended, when a quarter of them has passed, until the job is settled.
	NoHeartbeat bool

	// Middleware wraps the handlers, the first outermost.
	Middleware []Middleware

	// OnEvent is told what happens to each envelope. It is called by many goroutines, which wait for it.
	OnEvent func(Event)

	// Logger gets what an operator should know.
	//
	// Defaults to the store's.
	Logger *slog.Logger

	// Weight is the share of the worker's own queue among those of Also. The rule: >= 1.
	//
	// Defaults to 1.
	Weight int

	// Also are further queues of the worker, which share its Concurrency. A handler that is free takes from the queues
	// that have something, each as often as its weight says.
	Also []Source

	// Strict has a free handler take from the first queue that has something, in order: the worker's own, then Also.
	Strict bool
}

// Source is a further queue of a worker.
type Source struct {
	Queue   *Queue
	Handler Handler
	Weight  int // defaults to 1
}

// Worker is a pool of handlers for one or more queues.
type Worker struct {
	s       *Store
	cfg     WorkerConfig
	log     *slog.Logger
	sources []Source
	running atomic.Bool
}

// AbandonedError is returned by Run when handlers did not end though their contexts were cancelled. Their envelopes are
// delivered again when their leases end, but for those that a handler had settled itself.
type AbandonedError struct{ IDs []bson.ObjectID }

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("mongoq: %d handlers ignored the end of their context and were abandoned", len(e.IDs))
}

// Worker makes a pool of handlers for the queue. Nothing runs before Run.
func (q *Queue) Worker(h Handler, cfg WorkerConfig) (*Worker, error) {
	if cfg.Concurrency == 0 {
		cfg.Concurrency = defaultConcurrency
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = defaultDrainTimeout
	}
	if cfg.Logger == nil {
		cfg.Logger = q.s.log
	}
	switch {
	case cfg.Concurrency < 1:
		return nil, invalid("Concurrency must be >= 1, got %d", cfg.Concurrency)
	case cfg.Timeout < 0:
		return nil, invalid("Timeout must be >= 0, got %v", cfg.Timeout)
	case cfg.DrainTimeout < 0:
		return nil, invalid("DrainTimeout must be >= 0, got %v", cfg.DrainTimeout)
	}
	w := &Worker{s: q.s, cfg: cfg, log: cfg.Logger}
	for i, src := range append([]Source{{Queue: q, Handler: h, Weight: cfg.Weight}}, cfg.Also...) {
		if src.Weight == 0 {
			src.Weight = 1
		}
		switch {
		case src.Queue == nil || src.Handler == nil:
			return nil, invalid("a worker's queue %d needs a queue and a handler, got nil", i)
		case src.Queue.s != q.s:
			return nil, invalid("a worker's queues must be of one store, %q is of another", src.Queue.name)
		case src.Weight < 1:
			return nil, invalid("Weight must be >= 1, got %d", src.Weight)
		}
		handler := src.Handler
		for _, wrap := range slices.Backward(cfg.Middleware) {
			if wrap != nil {
				handler = wrap(handler)
			}
			if wrap == nil || handler == nil {
				return nil, invalid("Middleware must not be nil, nor make a nil handler")
			}
		}
		w.sources = append(w.sources, Source{Queue: src.Queue, Handler: handler, Weight: src.Weight})
	}
	return w, nil
}

// Run works until ctx ends. It then takes nothing more, gives back what was not begun, lets running handlers end
// within DrainTimeout, cancels those that don't, stores what they came to, and returns: nil, or an *AbandonedError with
// the envelopes of handlers that ignored their context. It goes on through a server that is away or changes, and logs
// that once. A worker runs once at a time: else ErrInvalidOption. Further errors: ErrClosed, ErrInTransaction.
func (w *Worker) Run(ctx context.Context) error {
	if !w.running.CompareAndSwap(false, true) {
		return invalid("a worker must not run twice at once")
	}
	defer w.running.Store(false)
	if err := w.s.open(); err != nil {
		return err
	}
	if inSession(ctx) {
		return ErrInTransaction
	}
	working, end := context.WithCancel(ctx)
	defer end()
	defer context.AfterFunc(w.s.life, end)()
	err := newPool(working, ctx, w).run()
	if closed := w.s.open(); closed != nil {
		return errors.Join(err, closed)
	}
	return err
}
