package mongoq

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// job is an envelope that a worker holds: in a buffer, with a handler, or on its way to be settled.
type job struct {
	r    *Reservation
	stop context.CancelCauseFunc // of the handler's context; nil while it is not begun, and after it returned
	lost atomic.Bool
}

// held are the jobs of a worker.
type held struct {
	mu   sync.Mutex
	jobs map[*Reservation]*job
	rush chan struct{} // rings the heartbeat: a lease ends sooner than it did
}

func (h *held) add(r *Reservation) *job {
	j := &job{r: r}
	r.shortened = h.hasten
	h.mu.Lock()
	h.jobs[r] = j
	h.mu.Unlock()
	return j
}

func (h *held) hasten() {
	select {
	case h.rush <- struct{}{}:
	default:
	}
}

// begin gives a job its handler's context.
func (h *held) begin(r *Reservation, stop context.CancelCauseFunc) *job {
	h.mu.Lock()
	defer h.mu.Unlock()
	j := h.jobs[r]
	if j.stop = stop; j.lost.Load() {
		stop(ErrLeaseLost)
	}
	return j
}

// returned notes that a job's handler has ended.
func (h *held) returned(j *job) {
	h.mu.Lock()
	j.stop = nil
	h.mu.Unlock()
}

// gone tells whether a job that was not begun has lost its lease, and drops it then.
func (h *held) gone(j *job, now time.Time) bool {
	if !j.lost.Load() && now.Before(j.r.leaseEnd()) {
		return false
	}
	j.lost.Store(true)
	h.end(j)
	return true
}

// all are the jobs, and whether their handlers run.
func (h *held) all() (jobs []*job, begun []bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	jobs, begun = make([]*job, 0, len(h.jobs)), make([]bool, 0, len(h.jobs))
	for _, j := range h.jobs {
		jobs, begun = append(jobs, j), append(begun, j.stop != nil)
	}
	return jobs, begun
}

func (h *held) end(j *job) {
	h.mu.Lock()
	delete(h.jobs, j.r)
	h.mu.Unlock()
}

// abandon gives up the jobs whose handlers run, and names them.
func (h *held) abandon() []bson.ObjectID {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ids []bson.ObjectID
	for r, j := range h.jobs {
		if j.stop != nil {
			ids = append(ids, r.ID)
			delete(h.jobs, r)
		}
	}
	return ids
}

// lose tells a job that its lease is lost: its handler's context ends at once, and its result is discarded. Not one that
// its handler has settled or, unless somebody else was seen to have the envelope, may have settled in a transaction.
func (h *held) lose(j *job, seen bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if busy, settled, joined := j.r.peek(); busy || settled || joined && !seen || j.lost.Swap(true) {
		return false
	}
	if j.stop != nil {
		j.stop(ErrLeaseLost)
	}
	return true
}

// beat extends the leases of a worker's jobs, each when a quarter of it has passed or not long after, until all are settled. A
// job whose lease ran out, since the server could not be reached or nobody extends it, has lost it: somebody else may have
// the envelope.
func (w *pool) beat() {
	tick := w.shortestLease() / 3
	t := time.NewTimer(tick)
	defer t.Stop()
	for {
		select {
		case <-w.beating.Done():
			return
		case <-t.C:
		case <-w.held.rush:
		}
		t.Reset(min(tick, w.beatOnce(tick)))
	}
}

func (w *pool) shortestLease() time.Duration {
	d := w.sources[0].q.cfg.Lease
	for _, src := range w.sources {
		d = min(d, src.q.cfg.Lease)
	}
	return d
}

// beatOnce extends what is due for it, and gives the time until the next beat: when the first lease ends or, where one is
// being extended, soon, since that may fail.
func (w *pool) beatOnce(tick time.Duration) time.Duration {
	next := time.Duration(1<<63 - 1)
	_, hi, sure := w.s.clock.current() // without asking: a lease ends in time while the server is away
	var due, dueUnbegun, settling, joined, lapsed []*job
	jobs, begun := w.held.all()
	for i, j := range jobs {
		left := j.r.leaseEnd().Sub(hi)
		busy, settled, isJoined := j.r.peek()
		switch {
		case busy: // it may not be settled then, or not for long
			if !w.cfg.NoHeartbeat && j.r.keepOff.Load() == 0 && left <= j.r.q.cfg.Lease*3/4 {
				settling = append(settling, j)
			}
			next = min(next, tick/8)
		case settled || j.lost.Load():
		case isJoined && left <= j.r.q.cfg.Lease*3/4: // as long as its transaction is open nobody else can have it
			joined = append(joined, j)
			next = min(next, tick/8)
		case left <= 0:
			if w.held.lose(j, false) {
				lapsed = append(lapsed, j)
			}
		case !w.cfg.NoHeartbeat && left <= j.r.q.cfg.Lease*3/4:
			if begun[i] {
				due = append(due, j)
			} else {
				dueUnbegun = append(dueUnbegun, j)
			}
			next = min(next, left, tick/8)
		case w.cfg.NoHeartbeat:
			next = min(next, left)
		default: // many become due one after the other
			next = min(next, max(left-j.r.q.cfg.Lease*3/4, tick/2))
		}
	}
	w.sayLost("mongoq: a job's lease has run out", lapsed)
	if !sure && len(jobs) > 0 { // the machine may have slept
		w.beside(&w.measuring, jobs, w.measure)
	}
	w.beside(&w.extending, due, w.extend)
	w.beside(&w.extendingUnbegun, dueUnbegun, w.extend) // which may be many, and be settled while that goes on
	w.beside(&w.extendingSettling, settling, func(jobs []*job) { w.extendSome(jobs) })
	w.beside(&w.extendingJoined, joined, w.extendEach)
	return max(next, time.Millisecond)
}

// sayLost warns of jobs that have lost their leases.
func (w *pool) sayLost(what string, jobs []*job) {
	rs := make([]*Reservation, len(jobs))
	for i, j := range jobs {
		rs[i] = j.r
	}
	warnOf(w.log, rs, what)
}

// measure reads the server's clock, and has the heart beat once it is known.
func (w *pool) measure([]*job) {
	ctx, cancel := context.WithTimeout(w.beating, time.Second)
	defer cancel()
	if _, _, err := w.s.clock.bounds(ctx); err == nil {
		w.held.hasten()
	}
}

// beside extends leases while the heart beats on, unless that is under way still.
func (w *pool) beside(underWay *atomic.Bool, due []*job, extend func([]*job)) {
	if len(due) == 0 || !underWay.CompareAndSwap(false, true) {
		return
	}
	w.beats.Go(func() {
		defer underWay.Store(false)
		extend(due)
	})
}

// extend extends many leases in few statements; one that an open transaction holds up, or that is lost, does not delay
// the others for long.
func (w *pool) extend(due []*job) { w.extendEach(w.extendSome(due)) }

// extendSome extends many leases in few statements, and gives those that it could not, unless they are settled.
func (w *pool) extendSome(due []*job) (left []*job) {
	for some := range slices.Chunk(due, settleRound) {
		all := make([]*extension, len(some))
		for i, j := range some {
			all[i] = &extension{r: j.r, d: j.r.q.cfg.Lease}
		}
		err := w.s.extendKnown(w.beating, all)
		for i, j := range some {
			if all[i].done {
				continue
			}
			if busy, settled, _ := j.r.peek(); err != nil || !busy && !settled { // else it is no matter any more
				left = append(left, j)
			}
		}
	}
	return left
}

// extendEach extends leases each by itself, side by side.
func (w *pool) extendEach(due []*job) {
	var all sync.WaitGroup
	var mu sync.Mutex
	var lost []*job
	room := make(chan struct{}, 32)
	for _, j := range due {
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			if busy, settled, _ := j.r.peek(); busy || settled || w.beating.Err() != nil { // meanwhile
				return
			}
			if w.extendOne(j) {
				mu.Lock()
				lost = append(lost, j)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	w.sayLost("mongoq: a job has lost its lease; its handler was told", lost)
}

// extendOne is true if the job was told that it has lost its lease.
func (w *pool) extendOne(j *job) (told bool) {
	ctx, cancel := context.WithTimeout(w.beating, extendTimeout(j.r.q.cfg.Lease))
	defer cancel()
	end := j.r.leaseEnd()
	lo, _, err := w.s.clock.bounds(ctx)
	if err != nil {
		return false // the next beat tries again, while the lease lasts
	}
	if w.cfg.NoHeartbeat { // only what a transaction may have settled comes here then
		return w.held.lose(j, w.takenByAnother(ctx, j.r))
	}
	n, err := (&extension{r: j.r, d: j.r.q.cfg.Lease}).write(ctx)
	switch {
	case err == nil && n == 1:
		j.r.extended(end, lo.Add(j.r.q.cfg.Lease))
	case err == nil:
		return w.held.lose(j, w.takenByAnother(ctx, j.r))
	case !errors.Is(err, context.DeadlineExceeded):
		w.log.Debug("mongoq: a lease could not be extended", "queue", j.r.Q, "id", j.r.ID.Hex(), "error", err)
	}
	return false
}

// takenByAnother tells whether somebody else has claimed the envelope since. One that the transaction of this holder has
// settled is gone, done, in another queue, or bears its mark.
func (w *pool) takenByAnother(ctx context.Context, r *Reservation) bool {
	e, err := w.s.found(ctx, r.ID, false)
	return err == nil && e != nil && e.Q == r.Q && e.Processed.IsZero() && e.lease != r.lease && e.last.lease != r.lease &&
		e.Deliveries > r.Deliveries
}
