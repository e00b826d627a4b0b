package mongoq

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// attempts is how often a guarded write is sent before its outcome counts as unknown. The driver's own retry, exact on
// a replica set, lies within each.
const attempts = 4

// outcome is what the stored envelope tells of a write whose answer was lost.
type outcome int

const (
	unclear outcome = iota // it does not tell
	done                   // the write happened
	open                   // it did not, and may be sent again
	lost                   // it did not, and the lease is somebody else's or ended
)

// look reads what is stored, as the primary has it or, with majority, as no failover can undo it.
type look func(ctx context.Context, majority bool) (outcome, error)

// guarded is one guarded write of one envelope: sent until what happened is known.
type guarded struct {
	write func(context.Context) (matched int64, err error)
	look  look
	tried *bool // an earlier answer was lost; stays true for later calls of the same verb
}

// run sends the write. It returns nil, ErrLeaseLost, ErrOutcomeUnknown with its cause, or the server's refusal.
//
// A write that is repeated by `w: majority` and matches nothing waits until all that stood before it is held by a
// majority, so that the look that follows sees what happened.
func (g guarded) run(ctx context.Context) error {
	var last error
	pause := 10 * time.Millisecond
	for range attempts {
		if ctx.Err() != nil {
			break
		}
		n, err := g.send(ctx)
		switch {
		case err == nil && n > 0:
			return nil
		case err == nil && !*g.tried:
			return ErrLeaseLost
		case err == nil:
			o, err := g.look(ctx, true)
			if err == nil {
				switch o {
				case done:
					return nil
				case lost:
					return ErrLeaseLost
				case unclear:
					return unknown(last)
				}
			} else {
				last = err
			}
		case mayHaveHappened(err), worthRetrying(err):
			// The driver tells of its last attempt only: one before it may have been done.
			*g.tried, last = true, err
		default:
			return g.afterRefusal(ctx, err, last)
		}
		if sleep(ctx, pause) != nil {
			break
		}
		pause *= 4
	}
	switch {
	case last != nil && !mayHaveHappened(last) && ctx.Err() == nil:
		return g.afterRefusal(ctx, last, nil)
	case !*g.tried:
		return errors.Join(ctx.Err(), last)
	}
	return unknown(ctx.Err(), last)
}

// afterRefusal tells what came of a write that the server refuses now: an earlier answer may have been lost, to us or to
// the driver, which then sends the write again by itself and tells of the last answer only.
//
// The primary is asked first: a claim, which a majority may not hold yet, must be seen.
func (g guarded) afterRefusal(ctx context.Context, refusal, last error) error {
	o, err := g.look(ctx, false)
	if err == nil && o == done {
		o, err = g.look(ctx, true)
		if o != done {
			o = unclear
		}
	}
	switch {
	case err == nil && o == done:
		return nil
	case err == nil && o == lost:
		return ErrLeaseLost
	case err == nil && o == open:
		return refusal
	}
	return unknown(refusal, last)
}

func (g guarded) send(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return g.write(ctx)
}

// updating is a write that is an update of one document.
func updating(c *mongo.Collection, filter, update any) func(context.Context) (int64, error) {
	return func(ctx context.Context) (int64, error) {
		res, err := c.UpdateOne(ctx, filter, update)
		if err != nil {
			return 0, err
		}
		return res.MatchedCount, nil
	}
}

// deleting is a write that is a delete of one document.
func deleting(c *mongo.Collection, filter any) func(context.Context) (int64, error) {
	return func(ctx context.Context) (int64, error) {
		res, err := c.DeleteOne(ctx, filter)
		if err != nil {
			return 0, err
		}
		return res.DeletedCount, nil
	}
}

// evidence is the part of a stored envelope that tells who did what.
var evidenceFields = bson.D{
	field("q", 1), field("when", 1), field("lease", 1), field("last", 1), field("processed", 1), field("deliveries", 1), field("pushed", 1),
}

var evidence = options.FindOne().SetProjection(evidenceFields)

// found reads the evidence; nil: there is no such envelope.
func (s *Store) found(ctx context.Context, id bson.ObjectID, majority bool) (*stored, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	c := s.envs
	if majority {
		c = s.sure
	}
	raw, err := c.FindOne(ctx, bson.D{field("_id", id)}, evidence).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		filed, err := s.filed(ctx, []bson.ObjectID{id}, evidenceFields, majority)
		if raw = filed[id]; raw == nil {
			return nil, err
		}
	} else if err != nil {
		return nil, err
	}
	e := read(raw)
	return &e, nil
}

// lookForVerb tells whether rollback, release, move or dead-letter happened: its trace is in `last`, until the next
// holder leaves its own.
func (r *Reservation) lookForVerb(verb string) look {
	return func(ctx context.Context, majority bool) (outcome, error) {
		e, err := r.s.found(ctx, r.ID, majority)
		if err != nil || e == nil {
			return unclear, err
		}
		switch {
		case e.lease == r.lease && e.Processed.IsZero():
			return open, nil
		case e.last == lastVerb{lease: r.lease, verb: verb}:
			return done, nil
		case e.last.lease == r.lease, e.lease == r.lease:
			return lost, nil // an earlier verb of this reservation happened, not this one
		case e.Deliveries == r.Deliveries+1 && !e.lease.IsZero() && e.last == r.last:
			return lost, nil // one claim since ours, still held or committed: had ours happened, `last` would be another
		}
		return unclear, nil
	}
}

// lookForCommit tells whether a commit into the history happened: the finished envelope keeps its lease.
func (r *Reservation) lookForCommit(ctx context.Context, majority bool) (outcome, error) {
	e, err := r.s.found(ctx, r.ID, majority)
	switch {
	case err != nil || e == nil || !e.Pushed.Equal(r.Pushed):
		return unclear, err
	case e.lease != r.lease:
		return lost, nil
	case e.Processed.IsZero():
		return open, nil
	}
	return done, nil
}

// lookForDelete tells whether a commit that deletes happened. A deleted envelope leaves no trace; but while the lease
// runs and no failover has undone the claim, nobody else can have deleted it.
func (r *Reservation) lookForDelete(ctx context.Context, majority bool) (outcome, error) {
	e, err := r.s.found(ctx, r.ID, majority)
	switch {
	case err != nil:
		return unclear, err
	case e == nil:
		ours, err := r.undisturbed(ctx, 0)
		if err != nil || !ours {
			return unclear, err
		}
		return done, nil
	case !e.Pushed.Equal(r.Pushed):
		return unclear, nil // pushed anew under the same id
	case e.lease == r.lease && e.Processed.IsZero():
		return open, nil
	}
	return lost, nil
}

// undisturbed is true while the lease has at least margin left and the server is the one, in the same term, that
// granted it.
func (r *Reservation) undisturbed(ctx context.Context, margin time.Duration) (bool, error) {
	state, err := r.s.clock.hello(ctx)
	if err != nil {
		return false, err
	}
	_, hi, err := r.s.clock.bounds(ctx)
	if err != nil {
		return false, err
	}
	return state.epoch == r.epoch && hi.Add(margin).Before(r.leaseEnd()), nil
}
