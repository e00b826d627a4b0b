package mongoq

import (
	"context"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// course is what a handler that returned nil came to, where that is something else than a commit. The pool settles it
// where it would have committed: behind the handler, whose place is free meanwhile.
type course interface {
	settle(ctx context.Context, r *Reservation) (EventKind, error)
	leads() []string // to which queues, for those who count
}

// moving is a move to another queue.
type moving struct {
	to   string
	set  moveSettings
	same *sameMove // where the move changes nothing but the queue
	ways []string  // the queue, for events
}

func (c *moving) leads() []string { return c.ways }

func (c *moving) settle(ctx context.Context, r *Reservation) (EventKind, error) {
	v := (&settlement{r: r, verb: verbMove, to: c.to}).startsAs(c.set.start)
	if c.same != nil && r.Dead == nil {
		v.update, v.shared = c.same.of(r), true
	} else {
		v.update = r.moving(c.to, c.set)
	}
	return EventMoved, r.settle(ctx, v)
}

// sameMove keeps the update of a move that changes nothing but the queue: it is the same for all that were claimed
// together.
type sameMove struct {
	to   string
	ways []string

	mu     sync.Mutex
	lease  bson.ObjectID
	update bson.A
}

func (m *sameMove) of(r *Reservation) bson.A {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lease != r.lease {
		m.lease, m.update = r.lease, plainMoveUpdate(r.lease, r.Q, m.to, r.s.policyOf(m.to))
	}
	return m.update
}

// finishing is a commit with a result, which may be why the envelope was dropped.
type finishing struct {
	set commitSettings
	how ending
}

func (*finishing) leads() []string { return nil }
func (burying) leads() []string    { return nil }
func (arriving) leads() []string   { return nil }
func (looking) leads() []string    { return nil }

func (c *forking) leads() []string {
	to := make([]string, len(c.branches))
	for i, b := range c.branches {
		to[i] = b.to
	}
	return to
}

func (c *finishing) settle(ctx context.Context, r *Reservation) (EventKind, error) {
	kind := EventCommitted
	if c.how.Verb == endedDropped {
		kind = EventDropped
	}
	if err := r.mu.lock(ctx); err != nil {
		return kind, err
	}
	defer r.mu.unlock()
	err := r.commitLocked(ctx, c.set)
	if err == nil {
		r.s.tellEnd(ctx, r, c.how)
	}
	return kind, err
}

// burying dead-letters for a reason that no retry mends.
type burying struct {
	kind DeadKind
	msg  string
}

func (c burying) settle(ctx context.Context, r *Reservation) (EventKind, error) {
	err := r.give(ctx, c.kind, c.msg)
	return r.failedAs(), err
}

// give dead-letters the envelope; one that is a dead letter already waits as long as its policy ever says.
func (r *Reservation) give(ctx context.Context, kind DeadKind, msg string) error {
	if r.Dead != nil || r.q.cfg.DeadLetter == NoDeadLetter {
		return r.rollback(ctx, r.q.longestWait(r.Retries+1), msg, rollbackSettings{})
	}
	return r.bury(ctx, kind, msg, patch{})
}

// droppedFor reads the reason of an envelope that was dropped from its result.
func droppedFor(result bson.RawValue) (string, bool) {
	doc, ok := result.DocumentOK()
	if !ok {
		return "", false
	}
	return doc.Lookup("dropped").StringValueOK()
}
