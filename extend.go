package mongoq

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// extension is a longer lease on the way to the server. One that is done twice is done: what matters is whether the token
// still matches.
type extension struct {
	r      *Reservation
	d      time.Duration
	caller context.Context // when it ends, nothing is sent any more: it might undo a later one
	tried  bool            // an earlier answer was lost
	done   bool            // it has happened, as far as extendKnown tells
}

// Extend makes the lease end d from now, by the server's clock. It never joins a transaction. The rule: d >= 1 ms.
func (r *Reservation) Extend(ctx context.Context, d time.Duration) error {
	if err := checkLease("Extend", d); err != nil {
		return err
	}
	if err := r.mu.lock(ctx); err != nil {
		return err
	}
	defer r.mu.unlock()
	if r.settled {
		return ErrLeaseLost
	}
	r.keepOff.Add(1)
	defer r.keepOff.Add(-1)
	ctx = outside(ctx)
	before := r.leaseEnd()
	// The end that is noted lies before the server's, never after: it is what a commit relies on.
	lo, _, err := r.s.clock.bounds(ctx)
	if err != nil {
		return err
	}
	x := &extension{r: r, d: d, caller: ctx}
	sent := time.Now()
	if r.joined { // it may wait for a transaction: it holds up nobody else
		err = x.alone(ctx)
	} else {
		_, err = r.s.extends.do(ctx, x, nil)
	}
	switch {
	case err == nil:
		if lo.Add(d).Before(before) {
			r.s.ring(r.Q, d, time.Since(sent)) // those who wait sleep until it was to end before
		}
		r.extended(before, lo.Add(d))
	case errors.Is(err, ErrLeaseLost):
		r.settled = true
	case errors.Is(err, ErrOutcomeUnknown):
		r.extended(before, minTime(before, lo.Add(d)))
	}
	return err
}

// alone is the single guarded write.
func (x *extension) alone(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(x.caller, cancel)()
	return guarded{
		write: x.write,
		look: func(ctx context.Context, majority bool) (outcome, error) {
			e, err := x.r.s.found(ctx, x.r.ID, majority)
			if err == nil && x.r.holds(e) {
				return open, nil
			}
			return lost, err
		},
		tried: &x.tried,
	}.run(ctx)
}

func (x *extension) write(ctx context.Context) (matched int64, err error) {
	return updating(x.r.q.leases(), holder(x.r.ID, x.r.lease), extendUpdate(x.d, x.r.q.cfg.OnExpire))(ctx)
}

// leases is where leases are extended: it waits for as many nodes as hold the queue's claims.
func (q *Queue) leases() *mongo.Collection {
	if q.cfg.DurableClaims {
		return q.s.envs
	}
	return q.s.quick
}

// extendRound extends the leases of many callers, or of one. When one of them fails, each goes by itself, and holds up no
// round for long: it has but a part of the shortest lease, since an open transaction may hold one of the envelopes.
func (s *Store) extendRound(calls []*call[*extension]) {
	all := items(calls)
	shortest := all[0].d
	for _, x := range all {
		shortest = min(shortest, x.d)
	}
	ctx, cancel := context.WithTimeout(context.Background(), extendTimeout(shortest))
	defer cancel()
	err := extendTogether(ctx, all)
	if err == nil || len(calls) == 1 && !errors.Is(err, errNotAllExtended) && !mayPass(err) {
		answer(calls, err)
		return
	}
	for _, c := range calls {
		c.item.tried = mayPass(err)
		singly(c)
	}
}

var errNotAllExtended = errors.New("some leases are lost, or settled meanwhile")

// extendTogether extends many leases, those of one claim in one statement. An error says nothing of any of them.
func extendTogether(ctx context.Context, all []*extension) error {
	type group struct {
		in    *mongo.Collection
		token bson.ObjectID
		d     time.Duration
		p     ExpirePolicy
	}
	groups := map[group][]bson.ObjectID{}
	for _, x := range all {
		g := group{x.r.q.leases(), x.r.lease, x.d, x.r.q.cfg.OnExpire}
		groups[g] = append(groups[g], x.r.ID)
	}
	models := map[*mongo.Collection][]mongo.WriteModel{}
	for g, ids := range groups {
		models[g.in] = append(models[g.in], mongo.NewUpdateManyModel().SetFilter(holders(ids, g.token)).SetUpdate(extendUpdate(g.d, g.p)))
	}
	extended := int64(0)
	for c, models := range models {
		res, err := c.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
		if err != nil {
			return err
		}
		extended += res.MatchedCount
	}
	if extended < int64(len(all)) {
		return errNotAllExtended
	}
	return nil
}

// extendKnown is extendTogether that notes what became of each: those that are not done, and no error, are lost, or settled
// meanwhile.
func (s *Store) extendKnown(ctx context.Context, all []*extension) error {
	shortest := all[0].d
	ends, ids := make([]time.Time, len(all)), make([]bson.ObjectID, len(all))
	for i, x := range all {
		shortest, ends[i], ids[i] = min(shortest, x.d), x.r.leaseEnd(), x.r.ID
	}
	ctx, cancel := context.WithTimeout(ctx, extendTimeout(shortest))
	defer cancel()
	lo, _, err := s.clock.bounds(ctx)
	if err != nil {
		return err
	}
	var found map[bson.ObjectID]*stored // nil: every lease was extended
	err = extendTogether(ctx, all)
	if errors.Is(err, errNotAllExtended) {
		found, err = s.foundHere(ctx, ids, evidenceFields, false)
	}
	if err != nil {
		return err
	}
	for i, x := range all {
		if x.done = found == nil || x.r.holds(found[x.r.ID]); x.done { // who holds it now did so then
			x.r.extended(ends[i], lo.Add(x.d))
		}
	}
	return nil
}

// extendTimeout is what an attempt to extend a lease may take, so that there is time for another.
func extendTimeout(d time.Duration) time.Duration {
	return min(max(d/6, 50*time.Millisecond), roundTimeout)
}
