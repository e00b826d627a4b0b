package mongoq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
)

const (
	// forkRound is how many forks go in one transaction, forkFlights how many transactions at once.
	forkRound   = 100
	forkFlights = 2
	// forksAlone is how many forks go by themselves at once: each holds its envelope, and a connection.
	forksAlone = 8
	// forkBytes is what the copies of one transaction have at most.
	forkBytes = 8 << 20
)

// branch is one way of a fork: a queue, and what the copy that goes there has changed.
type branch struct {
	stage, to string
	set       moveSettings
}

// forking is the course of an envelope that is forked.
type forking struct {
	branches []branch
	join     string // the join's queue; empty: none
	whole    moveSettings
}

// forked is a fork on the way to the server.
type forked struct {
	r        *Reservation
	original bson.A // its update; nil: it is deleted
	copies   []any
	bytes    int
	tried    bool // an earlier answer was lost
}

func (c *forking) settle(ctx context.Context, r *Reservation) (EventKind, error) {
	clock, err := r.s.stamp(ctx)
	if err != nil {
		return EventForked, err
	}
	v, waits, err := c.write(r, clock)
	if errors.Is(err, ErrPayloadTooLarge) { // a copy says that it is one
		return EventDeadLettered, r.give(ctx, DeadPermanent, "a copy of the fork would be too large: "+err.Error())
	}
	if err != nil {
		return EventForked, err
	}
	if err := r.mu.lock(ctx); err != nil {
		return EventForked, err
	}
	defer r.mu.unlock()
	if r.settled {
		return EventForked, ErrLeaseLost
	}
	v.tried = r.tried[verbFork]
	r.keepOff.Add(1)
	sent, err := r.s.forks.do(ctx, v, v.alone)
	r.keepOff.Add(-1)
	if sent {
		r.note(verbFork, err)
	}
	if err != nil && !errors.Is(err, ErrOutcomeUnknown) {
		return EventForked, err
	}
	for i, b := range c.branches {
		r.s.ring(b.to, waits[i], clock.age())
		if err != nil { // they may come
			r.s.bell.watch(clock.awaits(partID(r.ID, r.lease, i), b.to, waits[i]))
		}
	}
	if err != nil {
		return EventForked, err
	}
	if c.join != "" {
		r.s.ring(c.join, lookFirst, 0)
	}
	return EventForked, nil
}

// write makes the copies: as the original is, with what the handler changed for each. They are due when the branch says.
func (c *forking) write(r *Reservation, clock stamp) (*forked, []time.Duration, error) {
	v := &forked{r: r}
	names := make([]string, len(c.branches))
	waits := make([]time.Duration, len(c.branches))
	for i, b := range c.branches {
		names[i] = b.stage
		when := clock.at(b.set.start)
		waits[i] = max(when.Sub(clock.lo), 0)
		doc, err := r.copy(i, len(c.branches), b, c.join, when, clock)
		if err != nil {
			return nil, nil, err
		}
		v.copies = append(v.copies, doc)
		v.bytes += len(doc)
	}
	if c.join != "" {
		v.original = forkUpdate(r.lease, r.Q, c.join, names, c.whole.patch, r.Headers, r.s.policyOf(c.join))
	}
	return v, waits, nil
}

// copy is a part as it is inserted.
func (r *Reservation) copy(i, n int, b branch, join string, when time.Time, clock stamp) (bson.Raw, error) {
	prio, payload, headers, deadline := r.Priority, r.Payload, r.Headers, r.Deadline
	if b.set.prio != 0 {
		prio = b.set.prio
	}
	if b.set.patch.payload != nil {
		payload = *b.set.patch.payload
	}
	if b.set.patch.set {
		headers = b.set.patch.result(headers)
	}
	if ttl := b.set.ttl; ttl != nil {
		if deadline = (time.Time{}); *ttl > 0 {
			deadline = clock.hi.Add(*ttl)
		}
	}
	hops := slices.Concat(r.Hops, []Hop{{From: r.Q, At: clock.lo}})
	doc := bson.D{
		field("_id", partID(r.ID, r.lease, i)), field("q", b.to), field("when", when), field("prio", prio),
		field("pushed", r.Pushed), field("moves", r.Moves+1), field("hops", hopDocs(hops[max(0, len(hops)-keptHops):])),
		field("part", partDoc(r.ID, r.lease, i, n, b.stage, join)),
	}
	if len(headers) > 0 {
		doc = append(doc, field("headers", headers))
	}
	if len(r.Loops) > 0 {
		doc = append(doc, field("loops", r.Loops))
	}
	if !deadline.IsZero() {
		doc = append(doc, field("deadline", deadline))
		if r.s.policyOf(b.to) == Discard {
			doc = append(doc, field("expireAt", deadline))
		}
	}
	raw, err := bson.Marshal(append(doc, field("payload", payload)))
	if err != nil {
		return nil, err
	}
	if len(raw) > MaxEnvelopeSize {
		return nil, tooLargeError(len(raw))
	}
	return raw, nil
}

// alone is one fork in a transaction of its own.
func (v *forked) alone(ctx context.Context) error {
	select {
	case v.r.s.forksAlone <- struct{}{}:
		defer func() { <-v.r.s.forksAlone }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return guarded{
		write: func(ctx context.Context) (int64, error) {
			err := v.r.s.forkTogether(ctx, []*forked{v})
			if errors.Is(err, errNotAll) {
				return 0, nil
			}
			return 1, err
		},
		look:  v.look,
		tried: &v.tried,
	}.run(ctx)
}

// look tells whether the fork happened: the whole has its trace; an original that was deleted is looked for as any, and
// its copies tell.
func (v *forked) look(ctx context.Context, majority bool) (outcome, error) {
	e, err := v.r.s.found(ctx, v.r.ID, majority)
	if err != nil {
		return unclear, err
	}
	var o outcome
	if v.original != nil {
		o = v.r.tellsOfVerb(e, verbFork)
	} else {
		o, err = v.r.tellsOfDelete(ctx, e, &witness{s: v.r.s})
	}
	if err != nil || o != unclear {
		return o, err
	}
	for i := range v.copies {
		e, err := v.r.s.found(ctx, partID(v.r.ID, v.r.lease, i), majority)
		if err != nil {
			return unclear, err
		}
		if e != nil {
			return done, nil
		}
	}
	return unclear, nil
}

// forkRound sends many forks in one transaction, or in several if they are large.
func (s *Store) forkRound(calls []*call[*forked]) {
	ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
	defer cancel()
	var group []*call[*forked]
	bytes := 0
	flush := func() {
		if len(group) > 0 {
			s.forkGroup(ctx, group)
		}
		group, bytes = nil, 0
	}
	for _, c := range calls {
		if c.item.tried {
			singly(c)
			continue
		}
		if bytes+c.item.bytes > forkBytes {
			flush()
		}
		group = append(group, c)
		bytes += c.item.bytes
	}
	flush()
}

// forkGroup sends forks together. When that comes to nothing, those that are still held go together again, and the others
// singly, which finds out what happened to each. To send all singly would hold each envelope in a transaction for so long
// that the leases of all end, and all begins anew.
func (s *Store) forkGroup(ctx context.Context, calls []*call[*forked]) {
	for range attempts {
		err := s.forkSome(ctx, calls)
		if err == nil {
			answer(calls, nil)
			return
		}
		ids := make([]bson.ObjectID, len(calls))
		for i, c := range calls {
			ids[i] = c.item.r.ID
			// One whose lease is lost has undone all: that is known. Anything else may have happened.
			c.item.tried = c.item.tried || !errors.Is(err, errNotAll)
		}
		found, err := s.foundMany(ctx, ids, evidenceFields, false)
		if err != nil {
			break
		}
		held := slices.DeleteFunc(slices.Clone(calls), func(c *call[*forked]) bool {
			if c.item.r.holds(found[c.item.r.ID]) {
				return false
			}
			singly(c)
			return true
		})
		if len(held) == 0 {
			return
		}
		calls = held
	}
	for _, c := range calls {
		singly(c)
	}
}

func (s *Store) forkSome(ctx context.Context, calls []*call[*forked]) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return s.forkTogether(ctx, items(calls))
}

// errNotAll undoes a transaction of forks: somebody else has one of the envelopes.
var errNotAll = errors.New("not all envelopes of the transaction were held")

// forkTogether makes forks in one transaction, all or none: the copies, and each original under its holder's guard.
func (s *Store) forkTogether(ctx context.Context, vs []*forked) error {
	originals := make([]mongo.WriteModel, len(vs))
	var copies []any
	for i, v := range vs {
		guard := holder(v.r.ID, v.r.lease)
		if v.original == nil {
			originals[i] = mongo.NewDeleteOneModel().SetFilter(guard)
		} else {
			originals[i] = mongo.NewUpdateOneModel().SetFilter(guard).SetUpdate(v.original)
		}
		copies = append(copies, v.copies...)
	}
	return s.transact(ctx, readconcern.Local(), func(ctx context.Context) error {
		// The copies first, which nobody sees: the originals are locked for a moment only.
		if _, err := s.envs.InsertMany(ctx, copies); err != nil {
			return err
		}
		res, err := s.envs.BulkWrite(ctx, originals)
		if err != nil {
			return err
		}
		if n := res.MatchedCount + res.DeletedCount; n != int64(len(vs)) {
			return fmt.Errorf("%w: %d of %d", errNotAll, n, len(vs))
		}
		return nil
	})
}
