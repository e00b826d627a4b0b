package mongoq

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Reservation is an envelope held under a lease. Settle it with Commit, Rollback, Release, MoveToQ or DeadLetter
// before the lease ends, or Extend the lease; else the envelope is delivered again. Each verb returns ErrLeaseLost,
// and changes nothing, when the token no longer matches: somebody else has the envelope, or it was settled before. A
// lease that ran out but that nobody has taken since may still be settled.
//
// A verb whose context carries a MongoDB session joins its transaction. It does not settle the reservation then, since
// the transaction may abort or run again.
//
// A verb whose answer was lost ends as what happened, or as ErrOutcomeUnknown. Its context's end ends the wait for the
// answer, not the write: the error is then both ErrOutcomeUnknown and the context's.
//
// The embedded Envelope is as it was claimed; verbs do not change it.
type Reservation struct {
	Envelope

	s     *Store
	q     *Queue
	lease bson.ObjectID
	size  int
	epoch string // the server's, when it was claimed
	last  lastVerb

	course course // what a nil from its handler comes to; nil: a commit

	mu      gate
	settled bool
	verb    string          // that settled it; empty: the lease was lost
	joined  bool            // a verb has joined a transaction
	tried   map[string]bool // verbs with an answer lost

	keepOff   atomic.Int32 // heartbeats do while it is not 0 and a verb is under way: they would wait for a transaction, or undo it or an Extend
	endMu     sync.Mutex
	end       time.Time // of the lease, by the server's clock
	shortened func()    // is told when it comes sooner; nil: nobody wants to know
}

// Reserve takes the next due envelope under a lease, and waits for one until ctx ends. Due means its time has come by
// the server's clock; lower priority numbers come first, then earlier times. While the queue is paused it waits.
//
// Errors: ctx's when it ends (nothing is taken then: what was claimed meanwhile goes to the next that waits, or
// back), ErrClosed, ErrInTransaction, ErrInvalidOption, or what the server said.
func (q *Queue) Reserve(ctx context.Context, opts ...ReserveOption) (*Reservation, error) {
	return one(q.take(ctx, 1, false, opts))
}

// TryReserve is Reserve that does not wait: ErrEmpty when nothing is due, ErrQueuePaused while the queue is paused.
func (q *Queue) TryReserve(ctx context.Context, opts ...ReserveOption) (*Reservation, error) {
	return one(q.take(ctx, 1, true, opts))
}

// ReserveMany waits as Reserve does for a first envelope, and takes with it what else is due, up to n in all, in the
// order that single reserves would. The rule: n >= 1.
func (q *Queue) ReserveMany(ctx context.Context, n int, opts ...ReserveOption) ([]*Reservation, error) {
	if n < 1 {
		return nil, invalid("ReserveMany needs n >= 1, got %d", n)
	}
	return q.take(ctx, n, false, opts)
}

func one(rs []*Reservation, err error) (*Reservation, error) {
	if err != nil {
		return nil, err
	}
	return rs[0], nil
}

func (q *Queue) take(ctx context.Context, n int, try bool, opts []ReserveOption) ([]*Reservation, error) {
	set := reserveSettings{lease: q.cfg.Lease}
	for _, o := range opts {
		if err := o.applyReserve(&set); err != nil {
			return nil, err
		}
	}
	if inSession(ctx) {
		return nil, ErrInTransaction
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return q.s.wait(ctx, &waiter{q: q, want: n, lease: set.lease, try: try, out: make(chan claimed, 1)})
}

// Pop takes the next due envelope for good, and waits for one until ctx ends: at most once. It answers after the
// envelope is deleted, or in the history of a queue with Retention. When that answer is lost, it returns the envelope
// together with ErrOutcomeUnknown: the caller may be its only holder, or it may be delivered again.
func (q *Queue) Pop(ctx context.Context) (*Envelope, error) { return q.pop(ctx, q.Reserve) }

// TryPop is Pop that does not wait: ErrEmpty when nothing is due, ErrQueuePaused while the queue is paused.
func (q *Queue) TryPop(ctx context.Context) (*Envelope, error) { return q.pop(ctx, q.TryReserve) }

func (q *Queue) pop(ctx context.Context, reserve func(context.Context, ...ReserveOption) (*Reservation, error)) (*Envelope, error) {
	for {
		r, err := reserve(ctx)
		if err != nil {
			return nil, err
		}
		// From here on the envelope is the caller's: the delete is not cut short by its context.
		away, cancel := detached(ctx, attempts*attemptTimeout)
		err = r.Commit(away)
		cancel()
		switch {
		case err == nil:
			return &r.Envelope, nil
		case errors.Is(err, ErrLeaseLost):
			continue
		case errors.Is(err, ErrOutcomeUnknown):
			return &r.Envelope, err
		}
		return nil, err
	}
}

// Commit ends the envelope's life: the work is done. With Retention it stays in the history, else it is deleted.
// Options: Result, Retain.
func (r *Reservation) Commit(ctx context.Context, opts ...CommitOption) error {
	var set commitSettings
	for _, o := range opts {
		if err := o.applyCommit(&set); err != nil {
			return err
		}
	}
	if set.result != nil && r.size+len(set.result.Value) > MaxEnvelopeSize {
		return tooLargeError(r.size + len(set.result.Value))
	}
	if err := r.mu.lock(ctx); err != nil {
		return err
	}
	defer r.mu.unlock()
	return r.commitLocked(ctx, set)
}

func (r *Reservation) commitLocked(ctx context.Context, set commitSettings) error {
	return r.settleLocked(ctx, r.committing(set))
}

// committing is the commit as it goes to the server.
func (r *Reservation) committing(set commitSettings) *settlement {
	v := &settlement{r: r, verb: verbCommit}
	keep := retention{r.q.cfg.Retention, r.q.cfg.RetentionSpread}
	if set.retain != nil {
		keep.time = *set.retain
	}
	if r.s.partitioning != PartitionNone {
		keep.spread = 0 // partitions are forgotten whole
	}
	if keep.time != 0 {
		v.update, v.keep, v.result, v.shared = commitUpdate(keep, set.result), keep, set.result, set.result == nil
	}
	return v
}

// Rollback gives the envelope back after a failure: it counts a retry, keeps the cause, and waits as the queue's policy
// says. When the policy stops, or cause is wrapped in backoff.Permanent, it goes to the dead-letter queue instead.
// Options: After, Payload, Headers, AddHeaders.
func (r *Reservation) Rollback(ctx context.Context, cause error, opts ...RollbackOption) error {
	var set rollbackSettings
	for _, o := range opts {
		if err := o.applyRollback(&set); err != nil {
			return err
		}
	}
	if err := r.fits(set.patch, r.size); err != nil {
		return err
	}
	v := r.q.judge(r.Retries+1, cause, r.Dead != nil)
	if set.after != nil {
		v.wait = *set.after
	}
	if v.dead != "" {
		return r.bury(ctx, v.dead, message(cause), set.patch)
	}
	return r.rollback(ctx, v.wait, message(cause), set)
}

func (r *Reservation) rollback(ctx context.Context, wait time.Duration, msg string, set rollbackSettings) error {
	update := rollbackUpdate(r.lease, wait, msg, set, r.Headers, r.q.cfg.OnExpire)
	return r.settle(ctx, &settlement{r: r, verb: verbRollback, update: update, to: r.Q, in: wait})
}

// Release gives the envelope back without counting a failure: it was not begun, or should run later (Delay, At).
func (r *Reservation) Release(ctx context.Context, opts ...ReleaseOption) error {
	var set releaseSettings
	for _, o := range opts {
		if err := o.applyRelease(&set); err != nil {
			return err
		}
	}
	v := &settlement{r: r, verb: verbRelease, update: releaseUpdate(r.lease, set.start, r.q.cfg.OnExpire), to: r.Q}
	return r.settle(ctx, v.startsAs(set.start))
}

// MoveToQ moves the envelope to another queue in one atomic step, where it starts with no retries. Its deadline goes
// with it. Options: Delay, At, Priority, TTL, Payload, Headers, AddHeaders.
// The rule: to is a queue's name, and another one than the envelope is in, or the same to start it over.
func (r *Reservation) MoveToQ(ctx context.Context, to string, opts ...MoveOption) error {
	if err := checkName(to); err != nil {
		return err
	}
	set, err := moveSettingsOf(opts)
	if err != nil {
		return err
	}
	if err := r.fits(set.patch, r.moved()); err != nil {
		return err
	}
	v := &settlement{r: r, verb: verbMove, update: r.moving(to, set), to: to}
	return r.settle(ctx, v.startsAs(set.start))
}

// moving is the move as it goes to the server.
func (r *Reservation) moving(to string, set moveSettings) bson.A {
	if r.Dead != nil && set.ttl == nil { // a dead letter's deadline is a fact of the past
		none := time.Duration(0)
		set.ttl = &none
	}
	return moveUpdate(r.lease, r.Q, to, set, r.Headers, r.s.policyOf(to))
}

// DeadLetter moves the envelope to the dead-letter queue, with cause as the reason. Of an envelope that is a dead
// letter already it is a rollback that waits the policy's longest. In a queue with NoDeadLetter it is ErrInvalidOption.
func (r *Reservation) DeadLetter(ctx context.Context, cause error) error {
	if r.Dead != nil {
		return r.rollback(ctx, r.q.longestWait(r.Retries+1), message(cause), rollbackSettings{})
	}
	if r.q.cfg.DeadLetter == NoDeadLetter {
		return invalid("DeadLetter needs a queue with a dead-letter queue, %q has none", r.Q)
	}
	return r.bury(ctx, DeadExplicit, message(cause), patch{})
}

// bury dead-letters the envelope.
func (r *Reservation) bury(ctx context.Context, kind DeadKind, msg string, p patch) error {
	to := r.q.cfg.DeadLetter
	failed := kind != DeadLost && kind != DeadExpired
	update := deadLetterUpdate(lastOf(r.lease, verbDeadLetter), literal(r.Q), to, kind, msg, failed, p, r.Headers, r.q.cfg.DeadRetention)
	err := r.settle(ctx, &settlement{r: r, verb: verbDeadLetter, update: update, to: to})
	if err == nil && !inSession(ctx) {
		r.s.tellJoin(r.Part)
	}
	return err
}

// settle runs a verb of the holder, once: in a session it joins the transaction, and settles nothing.
func (r *Reservation) settle(ctx context.Context, v *settlement) error {
	if err := r.mu.lock(ctx); err != nil {
		return err
	}
	defer r.mu.unlock()
	return r.settleLocked(ctx, v)
}

// settleLocked is settle for one who holds r.mu.
func (r *Reservation) settleLocked(ctx context.Context, v *settlement) error {
	if r.settled {
		return ErrLeaseLost
	}
	began := cmp.Or(v.since, time.Now())
	seen := awaited{id: r.ID, lease: r.lease, verb: v.verb, queue: v.to, wait: v.in, began: began}
	if inSession(ctx) {
		r.joined = true
		r.keepOff.Add(1)
		err := v.inSession(ctx)
		if err == nil {
			r.verb = v.verb // if the transaction commits
		}
		if err == nil && v.to != "" {
			r.s.bell.watch(seen)
		}
		return err
	}
	v.tried, v.joined = r.tried[v.verb], r.joined
	sent := true
	var err error
	if v.tried || v.joined { // it looks before it says lost, or waits for a transaction: it holds up nobody else
		err = v.alone(ctx)
	} else {
		sent, err = r.s.settles.do(ctx, v, v.alone)
	}
	if sent {
		r.note(v.verb, err)
	}
	switch {
	case v.to == "":
	case err == nil: // its `when` counts from some time since
		r.s.ring(v.to, v.in, time.Since(cmp.Or(v.since, v.sent)))
	case errors.Is(err, ErrOutcomeUnknown): // it may be there, or be under way still, and v.sent be written
		r.s.ring(v.to, v.in, time.Since(began))
		r.s.bell.watch(seen)
	}
	return err
}

// note keeps what became of a verb; r.mu is held.
func (r *Reservation) note(verb string, err error) {
	r.settled = err == nil || errors.Is(err, ErrLeaseLost)
	if err == nil {
		r.verb = verb
	}
	if errors.Is(err, ErrOutcomeUnknown) {
		if r.tried == nil {
			r.tried = map[string]bool{}
		}
		r.tried[verb] = true
		r.s.clock.distrust()
	}
}

// state is what became of the reservation so far.
func (r *Reservation) state() (settled, joined bool, verb string) {
	_ = r.mu.lock(context.Background())
	defer r.mu.unlock()
	return r.settled, r.joined, r.verb
}

// peek tells, without waiting, whether a verb is under way or else whether the reservation is settled, and whether a
// transaction may have settled it.
func (r *Reservation) peek() (busy, settled, joined bool) {
	if !r.mu.tryLock() {
		return true, false, false
	}
	defer r.mu.unlock()
	return false, r.settled, r.joined
}

// gate is a lock that is waited for no longer than a context lasts.
type gate chan struct{}

func newGate() gate { return make(gate, 1) }

func (g gate) lock(ctx context.Context) error {
	select {
	case g <- struct{}{}:
		return nil
	default:
	}
	select {
	case g <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g gate) tryLock() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

func (g gate) unlock() { <-g }

// fits refuses a patch that would make the envelope too large, which has so many bytes without it.
func (r *Reservation) fits(p patch, had int) error {
	size := had
	if p.payload != nil {
		size += len(p.payload.Value) - len(r.Payload.Value)
	}
	if p.set {
		size += headersSize(p.result(r.Headers)) - headersSize(r.Headers)
	}
	if size > had && size > MaxEnvelopeSize {
		return tooLargeError(size)
	}
	return nil
}

// moved is the envelope's size when a move has dropped what its join gathered.
func (r *Reservation) moved() int {
	if r.Joined == nil {
		return r.size
	}
	return r.size - r.Joined.size
}

// result is what a patch makes of the headers.
func (p patch) result(had map[string]string) map[string]string {
	if !p.merge {
		if p.headers == nil {
			return map[string]string{}
		}
		return p.headers
	}
	m := make(map[string]string, len(had)+len(p.headers))
	maps.Copy(m, had)
	maps.Copy(m, p.headers)
	return m
}

func headersSize(m map[string]string) int {
	n := 0
	for k, v := range m {
		n += len(k) + len(v) + 7
	}
	return n
}

func (r *Reservation) leaseEnd() time.Time {
	r.endMu.Lock()
	defer r.endMu.Unlock()
	return r.end
}

// extended notes the end that an extension has made, sent when the lease was to end at that time. Where another was under
// way beside it nobody knows which came last: the earlier end counts.
func (r *Reservation) extended(from, to time.Time) {
	r.endMu.Lock()
	if !r.end.Equal(from) {
		to = minTime(r.end, to)
	}
	shorter := to.Before(r.end)
	r.end = to
	r.endMu.Unlock()
	if shorter && r.shortened != nil {
		r.shortened()
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// sooner is the earlier of two times, where zero is never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || b.IsZero() {
		return maxTime(a, b)
	}
	return minTime(a, b)
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
