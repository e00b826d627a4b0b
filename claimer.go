package mongoq

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// shortest is the least that an idle claimer sleeps, so that an envelope that seems due but cannot be had does not make
// it spin.
const shortest = time.Millisecond

// claimer is the one place of a process where a queue's envelopes are claimed: goroutines never race each other for
// the head. Those who want envelopes wait in line; a goroutine serves them while there are any.
type claimer struct {
	s    *Store
	name string
	wake chan struct{} // holds one ring, so that none is lost while a claim is under way

	mu      sync.Mutex
	waiters []*waiter
	running bool
	asleep  time.Time // until when the goroutine sleeps if nothing rings; zero: it does not
	next    time.Time // when something falls due, as far as is known; zero: never
	looked  time.Time // when that was looked up; what rang since is in it

	flying sync.Mutex // held from when it is known who a claim is for until what it got is handed out
	late   late       // what came with a time that has passed
	strays strays     // what was claimed and is nobody's

	dividing atomic.Int64 // when this process puts dividers into the queue again, in ns since 1970; 0: now
	divided  atomic.Int64 // how many candidates it had met when it did so last

	// Of the goroutine only:
	skips      []skip    // candidates to pass over
	skipsTried time.Time // when they were last tried all the same
	turn       turn      // among the claimers of several processes
	hasty      bool      // somebody in line does not wait
	since      int       // what it got since it slept
	sent       bool      // the last attempt has sent a claim, not only looked
	lone       bool      // that was one envelope at the most, the last time
	low        low       // from where on to look
	halved     int       // how often what one statement claims was halved, since it took too long
}

// waiter is a caller in line.
type waiter struct {
	q     *Queue
	want  int
	lease time.Duration
	try   bool      // answered with ErrEmpty, not left waiting
	again bool      // it comes again for what it did not get: rather few at once than more later
	begun time.Time // when the claim began that answers it
	out   chan claimed
	gone  bool
}

type claimed struct {
	rs  []*Reservation
	err error
}

func (w *waiter) grant() grant {
	return grant{lease: w.lease, policy: w.q.cfg.OnExpire, durable: w.q.cfg.DurableClaims}
}

// wait puts a caller in line and waits for its turn, or for ctx to end: what is claimed for it after that goes to the
// next in line or is released.
func (s *Store) wait(ctx context.Context, w *waiter) ([]*Reservation, error) {
	c, err := s.claimer(w.q.name)
	if err != nil {
		return nil, err
	}
	c.join(w)
	select {
	case got := <-w.out:
		return got.rs, got.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	w.gone = true
	c.mu.Unlock()
	select {
	case got := <-w.out: // answered in the same moment
		return got.rs, got.err
	default:
	}
	c.ring() // the line is shorter
	return nil, ctx.Err()
}

func (s *Store) claimer(name string) (*claimer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	c := s.claimers[name]
	if c == nil {
		c = &claimer{s: s, name: name, wake: make(chan struct{}, 1), strays: strays{more: make(chan struct{}, 1)}}
		s.claimers[name] = c
	}
	return c, nil
}

// join puts a waiter in line and sees that somebody serves it.
func (c *claimer) join(w *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.s.open() != nil || !c.running && !c.s.begin() { // who closes answers those in line once
		w.gone = true
		w.out <- claimed{err: ErrClosed}
		return
	}
	c.waiters = append(c.waiters, w)
	if c.running {
		c.ring()
	} else {
		c.running = true
		c.s.serving.Add(1)
		go c.serve()
	}
	if !w.try {
		c.s.bell.listen() // who stops listening sees that somebody is served
	}
}

// settled waits until a claim that is under way has handed out, or given back, what it got.
func (s *Store) settled(queue string) {
	if c := s.claimerOf(queue); c != nil {
		c.flying.Lock()
		defer c.flying.Unlock()
	}
}

func (c *claimer) ring() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// due rings if something falls due before the claimer would wake by itself, and for what has not to wait whatever the time: it
// is by this process's idea of the server's clock. Less than zero: it is due for that long or, if it was to fall due later,
// will be any moment.
func (c *claimer) due(in time.Duration, later bool) {
	at := time.Now().Add(in)
	if in < -lowLate {
		c.late.note(at)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if later {
		c.next = sooner(c.next, at)
	}
	if c.running && (!later || c.asleep.IsZero() || at.Before(c.asleep)) {
		c.ring()
	}
}

// missed rings for what may have rung while nobody listened.
func (c *claimer) missed() {
	c.late.noteUnknown()
	c.mu.Lock()
	c.looked = time.Time{}
	c.mu.Unlock()
	c.ring()
}

func (c *claimer) close() {
	c.mu.Lock()
	all := slices.Clone(c.waiters)
	c.mu.Unlock()
	c.answer(all, ErrClosed)
	c.ring()
}

// tries are those who don't wait.
func tries(ws []*waiter) []*waiter {
	var some []*waiter
	for _, w := range ws {
		if w.try {
			some = append(some, w)
		}
	}
	return some
}

// answer gives err to waiters that are still there.
func (c *claimer) answer(ws []*waiter, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range ws {
		if !w.gone {
			w.gone = true
			w.out <- claimed{err: err}
		}
	}
}

// line gives those in line, those of them that want what the first wants, and how many envelopes that is in all; nobody
// waits when it gives none, and the goroutine has to end.
func (c *claimer) line() (all, group []*waiter, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.waiters[:0]
	for _, w := range c.waiters {
		if w.gone {
			continue
		}
		left = append(left, w)
		if len(group) == 0 || w.grant() == group[0].grant() {
			group = append(group, w)
			n += w.want
		}
	}
	clear(c.waiters[len(left):])
	c.waiters = left
	all = slices.Clone(left)
	if len(left) == 0 {
		c.running = false
		c.s.serving.Add(-1)
	}
	return all, group, n
}

// serve claims for those in line until there is nobody.
func (c *claimer) serve() {
	defer c.s.wg.Done()
	ctx := context.Background() // a claim outlives those who asked for it, and a Close: what it takes is given back
	for {
		select {
		case <-c.wake: // what rang before is seen by the claim that follows
		default:
		}
		c.flying.Lock() // before somebody in line can be meant by what follows
		all, group, n := c.line()
		if group == nil {
			c.flying.Unlock()
			return
		}
		paused, err := c.s.paused(ctx, c.name)
		if paused || err != nil {
			c.flying.Unlock()
		}
		if err != nil {
			c.answer(group, err)
			continue
		}
		if paused {
			c.answer(tries(all), ErrQueuePaused)
			c.rest(pauseAge)
			continue
		}
		c.hasty = len(tries(all)) > 0
		for _, w := range group {
			w.begun = time.Now()
		}
		got, err := c.claim(ctx, group[0].q, c.ask(n, group[0]), c.hasty, group[0].grant())
		c.since += len(got)
		c.divide()
		c.hand(ctx, group, got)
		c.flying.Unlock()
		if err != nil {
			c.answer(group, err)
			continue
		}
		if len(got) > 0 {
			continue
		}
		// Nothing was due for whoever stood in line when the claim began, whatever lease they want.
		c.answer(tries(all), ErrEmpty)
		c.untilDue(ctx, group)
		c.since, c.lone = 0, c.since <= 1
	}
}

// ask is how many to claim for those in line who want n, the first of whom is given. Where envelopes come one by one,
// what has woken the claimer is one, and to take that is a single round trip.
func (c *claimer) ask(n int, first *waiter) int {
	if c.lone && c.since == 0 && (first.want == 1 || first.again) {
		return 1
	}
	return n
}

// untilDue sleeps until the first envelope falls due or something rings. At each poll interval it looks when that is,
// which is one read.
func (c *claimer) untilDue(ctx context.Context, group []*waiter) {
	for c.anybody() {
		poll := jittered(c.pollIn(group))
		passed := len(c.skips)
		held := len(c.skipped()) > 0
		if len(c.skips) < passed {
			return // one of them may be had now
		}
		if held {
			poll = min(poll, skipRetry)
		}
		if time.Since(c.low.whole) >= max(lowMost, poll) {
			return // a claim from the head, for what no look of a single key finds
		}
		next, looked := c.forecast()
		var err error
		if time.Since(looked) >= poll || !next.IsZero() && time.Until(next) <= 0 {
			next, looked, err = c.foresee(ctx, group[0].q)
		}
		d := max(poll-time.Since(looked), shortest)
		due := !next.IsZero() && time.Until(next) < d && (err == nil || time.Until(next) > 0)
		if due {
			d = max(time.Until(next), shortest)
		}
		if c.rest(d) || due || held || err != nil {
			return
		}
	}
}

// forecast is when something falls due as far as is known, zero for never, and when that was looked up.
func (c *claimer) forecast() (next, looked time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.next, c.looked
}

// foresee looks when the first envelope falls due. What rings meanwhile counts too.
func (c *claimer) foresee(ctx context.Context, q *Queue) (next, looked time.Time, err error) {
	looked = time.Now()
	c.mu.Lock()
	known := c.next
	c.next, c.looked = time.Time{}, looked
	c.mu.Unlock()
	at, due, err := c.nextDue(ctx, q)
	if due {
		c.late.note(at) // and the claim has not seen it
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !at.IsZero() {
		c.next = sooner(c.next, at)
	}
	if err != nil {
		c.next, c.looked = sooner(c.next, known), time.Time{}
	}
	return c.next, looked, err
}

// pollIn is how often to look. With signals between processes it is there for what nobody rings for: a lease that
// lapses. Half a lease is then often enough, and once in two seconds cheap enough.
func (c *claimer) pollIn(group []*waiter) time.Duration {
	poll, lease := group[0].q.cfg.PollInterval, group[0].lease
	for _, w := range group {
		poll = min(poll, w.q.cfg.PollInterval)
	}
	if c.s.bell.heard() {
		poll = max(poll, min(lease/2, 2*time.Second))
	}
	return poll
}

func (c *claimer) anybody() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiters {
		if !w.gone {
			return true
		}
	}
	return false
}

// rest sleeps for d or until something rings; rung is true then.
func (c *claimer) rest(d time.Duration) (rung bool) {
	c.sleepsUntil(time.Now().Add(d))
	defer c.sleepsUntil(time.Time{}) // what rings while it looks is not lost
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return false
	case <-c.wake:
		return true
	}
}

func (c *claimer) sleepsUntil(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asleep = at
}

// hand gives what was claimed to those in line, and releases what is left over. What may have expired comes last: the
// server is asked whether it has.
func (c *claimer) hand(ctx context.Context, group []*waiter, got []taken) {
	left, late := c.deal(ctx, group, got, nil)
	c.s.giveBack(ctx, left, nil)
	if len(late) > 0 {
		left, _ = c.deal(ctx, group, nil, late[0].q.sweep(ctx, late))
		c.s.giveBack(ctx, left, nil)
	}
}

// deal gives what was claimed, and reservations made of such, to those of a group who have got nothing yet, in order; the
// share of one that left meanwhile goes to the next. It returns what is left over, and what may have expired.
func (c *claimer) deal(ctx context.Context, group []*waiter, got []taken, rs []*Reservation) (left, late []*Reservation) {
	for i := 0; len(got)+len(rs) > 0; {
		w := c.nextOf(group, &i)
		if w == nil {
			break
		}
		for _, r := range rs {
			r.q = w.q
		}
		for len(got) > 0 && len(rs) < w.want {
			r, expired := w.q.admit(ctx, got[0])
			got = got[1:]
			switch {
			case expired:
				late = append(late, r)
			case r != nil:
				rs = append(rs, r)
			}
		}
		if share := min(len(rs), w.want); share > 0 && c.give(w, rs[:share:share]) {
			rs = rs[share:]
		}
	}
	for _, t := range got {
		if r, _ := group[0].q.admit(ctx, t); r != nil {
			rs = append(rs, r) // an expired one, too: the next claim meets it again
		}
	}
	return rs, late
}

// nextOf is the next of the group that is still there.
func (c *claimer) nextOf(group []*waiter, i *int) *waiter {
	c.mu.Lock()
	defer c.mu.Unlock()
	for *i < len(group) {
		w := group[*i]
		*i++
		if !w.gone {
			return w
		}
	}
	return nil
}

// give answers a waiter, unless it has left.
func (c *claimer) give(w *waiter, rs []*Reservation) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.gone {
		return false
	}
	w.gone = true
	w.out <- claimed{rs: rs}
	return true
}

// giveBack releases what was claimed for somebody who left, and tells what became of each, unless nobody wants to know.
func (s *Store) giveBack(ctx context.Context, rs []*Reservation, tell func(i int, err error)) {
	errs := make([]error, len(rs))
	var all sync.WaitGroup
	for i, r := range rs { // side by side: they go in rounds
		all.Go(func() {
			if errs[i] = s.putBack(ctx, r); tell != nil {
				tell(i, errs[i])
			}
		})
	}
	all.Wait()
	var open []*Reservation
	var ids []bson.ObjectID
	for i, r := range rs {
		if err := errs[i]; err != nil && !errors.Is(err, ErrLeaseLost) {
			open, ids = append(open, r), append(ids, r.ID)
		}
	}
	if len(open) == 0 {
		return
	}
	if held, err := s.stillHeld(ctx, open, ids); err == nil {
		open = held
	}
	if len(open) > 0 {
		warnOf(s.log, open, "mongoq: what was claimed for a caller that left could not be released; it is delivered again when its lease ends", "error", errs[slices.Index(rs, open[0])])
	}
}

// warnOf tells what befell reservations: one line, however many.
func warnOf(log *slog.Logger, rs []*Reservation, what string, more ...any) {
	if len(rs) == 0 {
		return
	}
	attrs := []any{"queue", rs[0].Q, "id", rs[0].ID.Hex()}
	if n := len(rs) - 1; n > 0 {
		attrs = append(attrs, "and_others", n)
	}
	log.Warn(what, append(attrs, more...)...)
}

// putBack releases an envelope to the place that it had.
func (s *Store) putBack(ctx context.Context, r *Reservation) error {
	ctx, cancel := detached(ctx, attempts*attemptTimeout)
	defer cancel()
	late := -longAgo
	if !r.Due.IsZero() {
		late = min(r.Due.Sub(s.clock.guess()), 0)
	}
	update := releaseUpdate(r.lease, start{place: true}, r.q.cfg.OnExpire)
	return r.settle(ctx, &settlement{r: r, verb: verbRelease, update: update, to: r.Q, in: late, since: time.Now()})
}
