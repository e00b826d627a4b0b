package mongoq

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"
)

const (
	// farthest is how far a source fetches ahead of its handlers at the most.
	farthest = 2000
	// few is how many a claim should bring, if the handlers begin so many before long: a smaller one costs as much.
	few = 32
	// longestHold is how long an envelope may wait in a buffer; then others should have it.
	longestHold = time.Second
)

// source is one queue of a worker: it claims ahead of the handlers by what they are about to need.
type source struct {
	w       *pool
	q       *Queue
	handler Handler
	weight  int

	// Under the worker's lock:
	buffer []buffered
	had    float64            // jobs begun by its weight: its share so far
	dry    bool               // it has nothing, as far as is known
	ahead  int                // how many to have ready beside those that a free handler takes at once
	refill int                // with so many left it claims again
	need   chan struct{}      // rings the fetcher
	filled chan struct{}      // rings who tends the buffer
	slow   bool               // the handlers have become slow: what is fetched ahead waits for nothing
	quit   context.CancelFunc // ends the claim that waits

	done, spent atomic.Int64 // jobs, and the nanoseconds that handlers were busy with them
}

// buffered is an envelope that waits for a handler.
type buffered struct {
	r   *Reservation
	job *job
	at  time.Time
}

// nudge rings the fetcher; the worker's lock is held.
func (src *source) nudge() {
	if src.need == nil {
		return
	}
	select {
	case src.need <- struct{}{}:
	default:
	}
}

// choose is the source that a free handler takes from: the first that has something or, by weight, the one that has had
// the least of its share. One that has nothing yet, but may have, is waited for: its claim is under way, and not for
// long. The worker's lock is held.
func (w *pool) choose() *source {
	if len(w.sources) == 1 {
		return w.sources[0].ready()
	}
	var next *source
	for _, src := range w.sources {
		switch {
		case len(src.buffer) == 0 && src.dry:
		case w.cfg.Strict:
			return src.ready()
		case next == nil || src.had < next.had:
			next = src
		}
	}
	if next == nil || next.ready() == nil {
		return nil
	}
	next.had += 1 / float64(next.weight)
	return next
}

// ready is the source if it has something.
func (src *source) ready() *source {
	if len(src.buffer) == 0 {
		return nil
	}
	return src
}

// handlers is how many of the worker's are this source's, if every source that has something has its share. The worker's
// lock is held.
func (src *source) handlers() float64 {
	var all float64
	for _, other := range src.w.sources {
		switch {
		case src.w.cfg.Strict && other == src:
			return float64(src.w.cfg.Concurrency)
		case src.w.cfg.Strict && !other.dry:
			return 0 // that one comes first
		case other == src || !other.dry:
			all += float64(other.weight)
		}
	}
	return float64(src.w.cfg.Concurrency) * float64(src.weight) / all
}

// hold is how long an envelope may wait in the buffer: its lease runs meanwhile.
func (src *source) hold() time.Duration {
	return min(longestHold, max(src.q.cfg.Lease/4, 10*time.Millisecond))
}

// rejoin has a source that had nothing share from now on; what it did not take is forgone.
func (src *source) rejoin() {
	if !src.dry {
		return
	}
	src.dry = false
	least, found := 0.0, false
	for _, other := range src.w.sources {
		if other != src && !other.dry && (!found || other.had < least) {
			least, found = other.had, true
		}
	}
	src.had = max(src.had, least)
}

// dries notes that a source has nothing: nobody waits for it.
func (src *source) dries() {
	src.w.mu.Lock()
	defer src.w.mu.Unlock()
	src.dry = true
	src.w.wake.Broadcast()
}

// fetch claims for as long as ctx lives.
func (src *source) fetch(ctx context.Context) {
	w := src.w
	w.mu.Lock()
	src.need = make(chan struct{}, 1)
	need := src.need
	w.mu.Unlock()
	defer w.s.settled(src.q.name) // what is claimed for one that stops is given back when Run ends
	pace := pace{span: src.hold()}
	trouble := troubles()
	away := false
	defer func() {
		if away {
			w.cameBack()
		}
	}()
	for ctx.Err() == nil {
		w.mu.Lock()
		pace.mark(time.Now(), src.done.Load(), src.spent.Load())
		if src.slow {
			src.slow = false
			pace.forget()
		}
		handlers := src.handlers()
		src.ahead, src.refill = pace.ahead(handlers, src.hold())
		free := int(math.Ceil(float64(w.cfg.Concurrency-w.busy) * handlers / float64(w.cfg.Concurrency)))
		want := free + src.ahead - len(src.buffer)
		enough := want <= 0 || len(src.buffer) > free+src.refill // few claims of many
		w.mu.Unlock()
		if enough {
			select {
			case <-need:
			case <-time.After(src.hold()): // the pace may have changed
			case <-ctx.Done():
			}
			continue
		}
		waiting, quit := context.WithCancel(ctx)
		w.mu.Lock()
		src.quit = quit
		w.mu.Unlock()
		asked := time.Now()
		rs, took, err := src.claim(waiting, min(want, farthest), away)
		if time.Since(asked)-took > src.hold()/4 { // there was nothing to claim
			pace.rest(time.Now(), src.done.Load(), src.spent.Load())
		}
		interrupted := waiting.Err() != nil
		quit()
		if err != nil && interrupted && ctx.Err() == nil {
			continue
		}
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, ErrClosed) {
				return
			}
			src.dries()
			if !away {
				away = true
				w.wentAway(src.q.name, err)
			}
			_ = sleep(ctx, trouble.NextBackOff())
			continue
		}
		if away {
			away = false
			trouble.Reset()
			w.cameBack()
		}
		if len(rs) > 0 {
			pace.took(took)
			src.fill(rs)
		}
	}
}

// wentAway logs that claims fail, once for all of the worker's queues.
func (w *pool) wentAway(queue string, err error) {
	w.mu.Lock()
	w.away++
	first := w.away == 1
	w.mu.Unlock()
	if first {
		w.log.Warn("mongoq: the worker cannot claim; it goes on trying", "queue", queue, "error", err)
	} else {
		w.log.Debug("mongoq: nor from this queue", "queue", queue, "error", err)
	}
}

// cameBack logs that claims succeed again, once for all of the worker's queues.
func (w *pool) cameBack() {
	w.mu.Lock()
	w.away--
	last := w.away == 0
	w.mu.Unlock()
	if last && w.over.Err() == nil {
		w.log.Info("mongoq: the worker claims again")
	}
}

// claim waits for envelopes, and tells how long the claim took that got them. Beside other sources it first asks whether
// there are any, so that handlers know whether to wait for this one; if the answer takes long, they don't. After trouble it
// only asks: nothing and no error is an answer.
func (src *source) claim(ctx context.Context, n int, afterTrouble bool) ([]*Reservation, time.Duration, error) {
	if len(src.w.sources) > 1 || afterTrouble {
		slow := time.AfterFunc(src.w.patience, src.dries)
		rs, took, err := src.wait(ctx, n, true)
		slow.Stop()
		if !errors.Is(err, ErrEmpty) && !errors.Is(err, ErrQueuePaused) {
			return rs, took, err
		}
		src.dries()
		if afterTrouble {
			return nil, 0, nil
		}
	}
	return src.wait(ctx, n, false)
}

func (src *source) wait(ctx context.Context, n int, try bool) ([]*Reservation, time.Duration, error) {
	w := &waiter{q: src.q, want: n, lease: src.q.cfg.Lease, try: try, again: true, out: make(chan claimed, 1)}
	rs, err := src.q.s.wait(ctx, w)
	if len(rs) == 0 {
		return nil, 0, err
	}
	return rs, time.Since(w.begun), err
}

// fill puts what was claimed where the handlers take it.
func (src *source) fill(rs []*Reservation) {
	w := src.w
	some, at := make([]buffered, len(rs)), time.Now()
	hi, soon := w.s.clock.guess(), false
	for i, r := range rs {
		some[i] = buffered{r: r, job: w.held.add(r), at: at} // from now on its lease is kept
		soon = soon || r.leaseEnd().Sub(hi) <= src.q.cfg.Lease*3/4
	}
	if soon { // the claim took long: the heart may not beat in time
		w.held.hasten()
	}
	if w.cfg.OnEvent != nil {
		for _, r := range rs {
			w.tell(r.event(EventReserved))
		}
	}
	w.mu.Lock()
	src.rejoin()
	src.buffer = append(src.buffer, some...)
	w.wake.Broadcast()
	w.mu.Unlock()
	select {
	case src.filled <- struct{}{}:
	default:
	}
}

// tend gives back what has waited in the buffer for too long: the handlers have become slower than they were. Nothing
// ticks while the buffer is empty.
func (src *source) tend(ctx context.Context) {
	for {
		select {
		case <-src.filled:
		case <-ctx.Done():
			return
		}
		for left := true; left; {
			if sleep(ctx, src.hold()/2) != nil {
				return
			}
			left = src.shed()
		}
	}
}

// shed tells whether the buffer holds anything still.
func (src *source) shed() (left bool) {
	w := src.w
	w.mu.Lock()
	n := 0
	for n < len(src.buffer) && time.Since(src.buffer[n].at) >= src.hold() {
		n++
	}
	old := src.buffer[:n:n]
	src.buffer = src.buffer[n:]
	left = len(src.buffer) > 0
	if n > 0 {
		src.slow = true
		if src.quit != nil {
			src.quit() // it would only claim them again
		}
	}
	w.mu.Unlock()
	w.release(old)
	return left
}

// pace measures how many envelopes the handlers begin in the time that a claim takes. Jobs end in bursts, as rounds of commits
// do, so that what counts is what was done in a span, not since the last claim.
type pace struct {
	span    time.Duration // over which it looks back
	rate    float64       // done a second
	work    float64       // seconds that handlers were busy, a second
	latency float64       // of a claim, in seconds
	window  time.Duration // how much of the span it knows of
	done    int64
	spent   int64
	at      time.Time
}

// mark notes how many cycles of handlers were done so far, and the nanoseconds spent on them.
func (p *pace) mark(now time.Time, done, spent int64) {
	dt := now.Sub(p.at)
	switch {
	case p.at.IsZero():
	case dt < time.Millisecond:
		return
	default:
		p.window = min(p.window+dt, p.span)
		weight := min(1, dt.Seconds()/p.window.Seconds())
		p.rate += weight * (float64(done-p.done)/dt.Seconds() - p.rate)
		p.work += weight * (float64(spent-p.spent)/float64(dt) - p.work)
	}
	p.done, p.spent, p.at = done, spent, now
}

// forget takes the handlers for slow until they have shown otherwise.
func (p *pace) forget() { p.rate, p.work, p.window = 0, 0, 0 }

// rest has it begin anew after a time in which there was nothing to do.
func (p *pace) rest(now time.Time, done, spent int64) {
	p.done, p.spent, p.at, p.window = done, spent, now, 0
}

// took notes how long a claim took.
func (p *pace) took(d time.Duration) {
	p.latency += 0.3 * (min(d.Seconds(), 1) - p.latency)
}

// ahead is what to have ready: what the handlers begin while four claims are made; or few, if they begin so many while eight
// are made, since many small claims slow down each other and the commits. It is at most four times what they have shown to
// do, no more than they can do in half the time that an envelope may wait, and nothing if they are slow. The source claims
// again when half of what is needed is left.
func (p *pace) ahead(handlers float64, hold time.Duration) (ahead, refill int) {
	if handlers == 0 { // an earlier queue has them all
		return 0, 0
	}
	known := 4 * p.window.Seconds()
	need := p.rate * min(4*p.latency, known)
	n := min(max(need, min(few, p.rate*min(8*p.latency, known))), farthest)
	if can := handlers * hold.Seconds() / 2; n*p.work > can*p.rate {
		n = can * p.rate / p.work
	}
	return int(n), int(min(need, n) / 2)
}
