package mongoq

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
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
}

func (h *held) add(r *Reservation) *job {
	j := &job{r: r}
	h.mu.Lock()
	h.jobs[r] = j
	h.mu.Unlock()
	return j
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
// its handler has settled, or may have settled in a transaction.
func (h *held) lose(j *job) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if settled, joined := j.r.peek(); settled || joined || j.lost.Swap(true) {
		return false
	}
	if j.stop != nil {
		j.stop(ErrLeaseLost)
	}
	return true
}

// beat extends the leases of a worker's jobs, each at a third of its length, until stop closes. A job whose lease ran
// out, since the server could not be reached or nobody extends it, has lost it: somebody else may have the envelope.
func (w *pool) beat(stop <-chan struct{}) {
	tick := w.shortestLease() / 3
	t := time.NewTimer(tick)
	defer t.Stop()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
		}
		t.Reset(min(tick, w.beatOnce()))
	}
}

func (w *pool) shortestLease() time.Duration {
	d := w.sources[0].q.cfg.Lease
	for _, src := range w.sources {
		d = min(d, src.q.cfg.Lease)
	}
	return d
}

// beatOnce extends what is due for it and gives the time until the first lease of those that were not extended ends.
func (w *pool) beatOnce() time.Duration {
	next := time.Duration(1<<63 - 1)
	hi := w.s.clock.guess() // without asking: a lease ends in time while the server is away
	var due []*job
	w.held.mu.Lock()
	jobs := make([]*job, 0, len(w.held.jobs))
	for _, j := range w.held.jobs {
		jobs = append(jobs, j)
	}
	w.held.mu.Unlock()
	for _, j := range jobs {
		left := j.r.leaseEnd().Sub(hi)
		settled, _ := j.r.peek()
		switch {
		case settled || j.lost.Load():
		case left <= 0:
			if w.held.lose(j) {
				w.log.Warn("mongoq: a job's lease has run out", "queue", j.r.Q, "id", j.r.ID.Hex())
			}
		case !w.cfg.NoHeartbeat && left <= j.r.q.cfg.Lease*3/4:
			due = append(due, j)
			fallthrough
		default:
			next = min(next, left)
		}
	}
	if len(due) > 0 && w.extending.CompareAndSwap(false, true) {
		w.beats.Go(func() {
			defer w.extending.Store(false)
			w.extend(due)
		})
	}
	return max(next, time.Millisecond)
}

// extend extends many leases in few statements; one that an open transaction holds up, or that is lost, does not delay
// the others for long.
func (w *pool) extend(due []*job) {
	for len(due) > 0 {
		n := min(len(due), settleRound)
		w.extendSome(due[:n])
		due = due[n:]
	}
}

func (w *pool) extendSome(due []*job) {
	type group struct {
		in    *mongo.Collection
		token bson.ObjectID
		lease time.Duration
		p     ExpirePolicy
	}
	groups := map[group][]bson.ObjectID{}
	for _, j := range due {
		g := group{j.r.q.leases(), j.r.lease, j.r.q.cfg.Lease, j.r.q.cfg.OnExpire}
		groups[g] = append(groups[g], j.r.ID)
	}
	models := map[*mongo.Collection][]mongo.WriteModel{}
	for g, ids := range groups {
		models[g.in] = append(models[g.in], mongo.NewUpdateManyModel().SetFilter(holders(ids, g.token)).SetUpdate(extendUpdate(g.lease, g.p)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(max(w.shortestLease()/6, 50*time.Millisecond), time.Second))
	defer cancel()
	lo, _, err := w.s.clock.bounds(ctx)
	extended := int64(0)
	for c, models := range models {
		if err != nil {
			break
		}
		var res *mongo.BulkWriteResult
		if res, err = c.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false)); err == nil {
			extended += res.MatchedCount
		}
	}
	if err == nil && extended == int64(len(due)) {
		for _, j := range due {
			j.r.setLeaseEnd(lo.Add(j.r.q.cfg.Lease))
		}
		return
	}
	// Some are lost, settled meanwhile or held up: each by itself, side by side.
	var all sync.WaitGroup
	room := make(chan struct{}, 16)
	for _, j := range due {
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			w.extendOne(j)
		})
	}
	all.Wait()
}

func (w *pool) extendOne(j *job) {
	ctx, cancel := context.WithTimeout(context.Background(), min(max(j.r.q.cfg.Lease/6, 50*time.Millisecond), time.Second))
	defer cancel()
	lo, _, err := w.s.clock.bounds(ctx)
	if err != nil {
		return // the next beat tries again, while the lease lasts
	}
	n, err := updating(j.r.q.leases(), holder(j.r.ID, j.r.lease), extendUpdate(j.r.q.cfg.Lease, j.r.q.cfg.OnExpire))(ctx)
	switch {
	case err == nil && n == 1:
		j.r.setLeaseEnd(lo.Add(j.r.q.cfg.Lease))
	case err == nil:
		w.held.lose(j)
	case !errors.Is(err, context.DeadlineExceeded):
		w.log.Debug("mongoq: a lease could not be extended", "queue", j.r.Q, "id", j.r.ID.Hex(), "error", err)
	}
}
