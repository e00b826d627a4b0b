package mongoq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// pool is one run of a worker: an envelope goes from a source's buffer to a handler, and from there to be settled.
type pool struct {
	*Worker
	over    context.Context // Run's: nothing is begun after its end
	asked   context.Context // the one that Run was given, which ends a moment before
	sources []*source
	// patience is how long the handlers wait for the claim of one source while another has something: not until that has
	// to be given back.
	patience time.Duration

	mu        sync.Mutex
	wake      *sync.Cond // a source has got something, or the pool stops
	busy      int        // handlers that run, or wait for room to have a job settled
	stop      bool       // nothing new is begun
	abandoned bool       // handlers that still run count no more
	away      int        // sources whose claims fail

	handlers          sync.WaitGroup
	held              held
	beats             sync.WaitGroup
	beating           context.Context // ends when all jobs are settled
	rest              context.CancelFunc
	extending         atomic.Bool // leases are being extended
	extendingUnbegun  atomic.Bool // those of jobs whose handlers do not run
	extendingSettling atomic.Bool // those of jobs that are being settled
	extendingJoined   atomic.Bool // those that a transaction holds
	measuring         atomic.Bool // the server's clock is being read

	commits sync.WaitGroup
}

func newPool(ctx, asked context.Context, w *Worker) *pool {
	p := &pool{Worker: w, over: ctx, asked: asked}
	p.beating, p.rest = context.WithCancel(context.WithoutCancel(ctx))
	p.wake = sync.NewCond(&p.mu)
	p.held.jobs = map[*Reservation]*job{}
	p.held.rush = make(chan struct{}, 1)
	p.patience = longestHold
	for _, src := range w.sources {
		p.sources = append(p.sources, &source{
			w: p, q: src.Queue, handler: src.Handler, weight: src.Weight, filled: make(chan struct{}, 1),
		})
	}
	for _, src := range p.sources {
		p.patience = min(p.patience, src.hold()/4)
	}
	return p
}

// run works until the context ends, and drains.
func (w *pool) run() error {
	ctx := w.over
	base, cancelAll := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancelAll(nil)
	var fetchers sync.WaitGroup
	for range w.cfg.Concurrency {
		w.handlers.Go(func() { w.work(base) })
	}
	for _, src := range w.sources {
		fetchers.Go(func() { src.fetch(ctx) })
		fetchers.Go(func() { src.tend(ctx) })
	}
	w.beats.Go(w.beat)

	<-ctx.Done()
	w.mu.Lock()
	w.stop = true
	w.wake.Broadcast()
	w.mu.Unlock()
	unstarted := make(chan struct{})
	go func() { // beside the drain: it takes long while the server is away
		defer close(unstarted)
		fetchers.Wait()
		w.giveBackUnstarted()
	}()
	ended := make(chan struct{})
	go func() {
		w.handlers.Wait()
		close(ended)
	}()
	err := w.drain(ended, cancelAll)
	<-unstarted
	w.commits.Wait()
	w.rest()
	w.beats.Wait()
	return err
}

// errDrained is the cause of the contexts that a drain cancels.
var errDrained = errors.New("mongoq: the worker stops")

// drain waits for the handlers, and cancels those that last too long.
func (w *pool) drain(ended <-chan struct{}, cancelAll context.CancelCauseFunc) error {
	t := time.NewTimer(w.cfg.DrainTimeout)
	defer t.Stop()
	select {
	case <-ended:
		return nil
	case <-t.C:
	}
	cancelAll(errDrained)
	t.Reset(stubborn)
	select {
	case <-ended:
		return nil
	case <-t.C:
	}
	w.mu.Lock()
	w.abandoned = true
	ids := w.held.abandon()
	w.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	w.log.Error("mongoq: handlers ignored the end of their context and were abandoned", "jobs", len(ids))
	return &AbandonedError{IDs: ids}
}

// work is one handler's loop. A handler that ends its goroutine, by runtime.Goexit, is followed by another.
func (w *pool) work(base context.Context) {
	over := false
	defer func() {
		if !over {
			w.handlers.Go(func() { w.work(base) })
		}
	}()
	for {
		src, r := w.next()
		if r == nil {
			over = true
			return
		}
		began := time.Now()
		w.job(base, src, r)
		src.spent.Add(int64(time.Since(began)))
		src.done.Add(1)
	}
}

// next waits for something to do; nil: the pool stops.
func (w *pool) next() (*source, *Reservation) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for !w.stop && w.over.Err() == nil && w.asked.Err() == nil {
		src := w.choose()
		if src == nil {
			for _, src := range w.sources {
				src.nudge()
			}
			w.wake.Wait()
			continue
		}
		b := src.buffer[0]
		src.buffer = src.buffer[1:]
		if len(src.buffer) <= src.refill {
			src.nudge()
		}
		if w.held.gone(b.job, w.s.clock.guess()) { // in the buffer
			w.s.clock.distrust()
			w.commits.Go(func() {
				ev := b.r.event(EventLeaseLost)
				ev.Err = ErrLeaseLost
				w.tell(ev)
				// By the server's clock it may be ours still, and nothing has failed.
				w.s.giveBack(context.Background(), []*Reservation{b.r}, nil)
			})
			continue
		}
		w.busy++
		return src, b.r
	}
	return nil, nil
}

// job runs one handler and has what it came to settled behind it.
func (w *pool) job(base context.Context, src *source, r *Reservation) {
	ctx, cancel := context.WithCancelCause(base)
	j := w.held.begin(r, cancel)
	run := ctx
	if w.cfg.Timeout > 0 {
		var stop context.CancelFunc
		run, stop = context.WithTimeout(ctx, w.cfg.Timeout)
		defer stop()
	}
	began := time.Now()
	err := errGoexit
	defer func() {
		ran := time.Since(began)
		w.mu.Lock() // what a drain has not given up until now it waits for
		w.held.returned(j)
		abandoned := w.abandoned
		if !abandoned {
			w.commits.Add(1)
		}
		w.mu.Unlock()
		var p *PanicError
		if errors.As(err, &p) {
			w.log.Error("mongoq: a handler panicked", "queue", r.Q, "id", r.ID.Hex(), "panic", fmt.Sprint(p.Value), "stack", string(p.Stack))
		}
		if abandoned {
			cancel(nil)
			return
		}
		w.settleBehind(base, j, cancel, err, ran)
	}()
	err = protect(run, src.handler, r)
}

// errGoexit is the failure of a handler that ended its goroutine.
var errGoexit = errors.New("the handler ended its goroutine")

// settleBehind settles a job while its handler's goroutine goes on to the next.
func (w *pool) settleBehind(base context.Context, j *job, cancel context.CancelCauseFunc, err error, ran time.Duration) {
	w.s.behind <- struct{}{} // back-pressure: commits run behind the handlers, but not far
	w.mu.Lock()
	w.busy--
	w.mu.Unlock()
	over := func() {
		w.held.end(j)
		cancel(nil)
		<-w.s.behind
		w.commits.Done()
	}
	if err == nil && w.commitBehind(j, ran, over) {
		return
	}
	go func() {
		defer over()
		w.finish(base, j, err, ran)
	}()
}

// commitBehind commits a job whose handler has left that to the worker, without a goroutine that waits for it. It is false
// where there is more to do than that.
func (w *pool) commitBehind(j *job, ran time.Duration, over func()) bool {
	r := j.r
	if r.course != nil || !r.mu.tryLock() {
		return false
	}
	if r.settled || r.joined || r.tried[verbCommit] || j.lost.Load() {
		r.mu.unlock()
		return false
	}
	v := r.committing(commitSettings{})
	r.s.settles.post(v, v.alone, func(err error) {
		r.note(verbCommit, err)
		r.mu.unlock()
		if err == nil && w.cfg.OnEvent == nil {
			over()
			return
		}
		go func() {
			defer over()
			w.settled(r, EventCommitted, ran, err, nil)
		}()
	})
	return true
}

// finish settles a job by what its handler returned.
func (w *pool) finish(base context.Context, j *job, err error, ran time.Duration) {
	r := j.r
	ctx, cancel := detached(base, settleTimeout)
	defer cancel()
	ev := r.event("")
	ev.Ran, ev.Err = ran, err
	settled, joined, verb := r.state()
	switch {
	case settled && verb != "": // though its lease may have ended since
		ev.Kind = eventOf(verb)
		w.tell(ev)
		return
	case settled || j.lost.Load():
		ev.Kind, ev.Err = EventLeaseLost, ErrLeaseLost
		w.tell(ev)
		return
	case joined && err == nil:
		if ev.Kind = eventOf(verb); verb == "" { // the verb failed, and the handler made nothing of it
			ev.Kind = EventUnsettled
		}
		w.tell(ev)
		return
	}
	kind, serr := w.settle(ctx, r, err)
	w.settled(r, kind, ran, serr, err)
}

// settled tells what became of a job that was settled by what its handler returned: serr is the error of that.
func (w *pool) settled(r *Reservation, kind EventKind, ran time.Duration, serr, err error) {
	ev := r.event(kind)
	ev.Ran, ev.Err = ran, err
	switch {
	case errors.Is(serr, ErrLeaseLost):
		ev.Kind = EventLeaseLost
		if _, joined, _ := r.state(); !joined {
			w.log.Warn("mongoq: a job lost its lease before it was settled; its result is discarded", "queue", r.Q, "id", r.ID.Hex())
		}
	case serr != nil:
		ev.Kind, ev.Err = EventUnsettled, errors.Join(serr, err)
		w.log.Error("mongoq: what a job came to could not be stored; it is delivered again unless it was", "queue", r.Q, "id", r.ID.Hex(), "error", serr)
	case err == nil && r.course != nil:
		ev.To = r.course.leads()
	}
	w.tell(ev)
}

// settle commits, rolls back or releases.
func (w *pool) settle(ctx context.Context, r *Reservation, err error) (EventKind, error) {
	var again *retryIn
	var nap *snooze
	switch {
	case err == nil && r.course != nil:
		return r.course.settle(ctx, r)
	case err == nil:
		return EventCommitted, r.Commit(ctx)
	case errors.As(err, &nap):
		return EventReleased, r.Release(ctx, Delay(nap.d))
	case errors.As(err, &again):
		serr := r.Rollback(ctx, err, After(again.after))
		return r.failedAs(), serr
	}
	serr := r.Rollback(ctx, err)
	return r.failedAs(), serr
}

// failedAs tells a rollback from a dead-lettering.
func (r *Reservation) failedAs() EventKind {
	if _, _, verb := r.state(); verb == verbDeadLetter {
		return EventDeadLettered
	}
	return EventFailed
}

func eventOf(verb string) EventKind {
	switch verb {
	case verbCommit:
		return EventCommitted
	case verbRollback:
		return EventFailed
	case verbRelease:
		return EventReleased
	case verbMove:
		return EventMoved
	case verbFork:
		return EventForked
	case verbDeadLetter:
		return EventDeadLettered
	}
	return EventLeaseLost
}

func (w *pool) tell(e Event) {
	if w.cfg.OnEvent != nil {
		w.cfg.OnEvent(e)
	}
}

// giveBackUnstarted releases what was fetched and not begun.
func (w *pool) giveBackUnstarted() {
	w.mu.Lock()
	var rs []buffered
	for _, src := range w.sources {
		rs = append(rs, src.buffer...)
		src.buffer = nil
	}
	w.mu.Unlock()
	w.release(rs)
}

// release gives envelopes back, without a failure counted.
func (w *pool) release(all []buffered) {
	rs := make([]*Reservation, len(all))
	for i, b := range all {
		rs[i] = b.r
	}
	w.s.giveBack(context.Background(), rs, func(i int, err error) {
		ev := rs[i].event(EventReleased)
		switch {
		case errors.Is(err, ErrLeaseLost):
			ev.Kind, ev.Err = EventLeaseLost, err
		case err != nil:
			ev.Kind, ev.Err = EventUnsettled, err
		}
		w.held.end(all[i].job)
		w.tell(ev)
	})
}

// settleTimeout bounds the settling of one job: the attempts of a round, and then its own.
const settleTimeout = 2 * attempts * attemptTimeout

// troubles is the backoff of a worker that cannot reach the server.
func troubles() backoff.BackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond), backoff.WithMaxInterval(2*time.Second), backoff.WithMaxElapsedTime(0))
}
