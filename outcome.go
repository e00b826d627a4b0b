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

// holds tells whether the stored envelope, nil if there is none, is under the reservation's lease still.
func (r *Reservation) holds(e *stored) bool {
	return e != nil && e.lease == r.lease && e.Processed.IsZero()
}

// tellsOfVerb is about rollback, release, move, fork or dead-letter: its trace is in `last`, until the next holder leaves its
// own.
func (r *Reservation) tellsOfVerb(e *stored, verb string) outcome {
	switch {
	case e == nil:
		return unclear
	case r.holds(e):
		return open
	case e.last == lastVerb{lease: r.lease, verb: verb}:
		return done
	case e.last.lease == r.lease, e.lease == r.lease:
		return lost // an earlier verb of this reservation happened, not this one
	case e.Deliveries == r.Deliveries+1 && !e.lease.IsZero() && e.last == r.last:
		return lost // one claim since ours, still held or committed: had ours happened, `last` would be another
	}
	return unclear
}

// tellsOfCommit is about a commit into the history: the finished envelope keeps its lease.
func (r *Reservation) tellsOfCommit(e *stored) outcome {
	switch {
	case e == nil || !e.Pushed.Equal(r.Pushed):
		return unclear
	case e.lease != r.lease:
		return lost
	case e.Processed.IsZero():
		return open
	}
	return done
}

// tellsOfDelete is about a commit that deletes. A deleted envelope leaves no trace; but while the lease runs and no
// failover has undone the claim, nobody else can have deleted it.
func (r *Reservation) tellsOfDelete(ctx context.Context, e *stored, w *witness) (outcome, error) {
	switch {
	case e == nil:
		ours, err := w.undisturbed(ctx, r)
		if err != nil || !ours {
			return unclear, err
		}
		return done, nil
	case !e.Pushed.Equal(r.Pushed):
		return unclear, nil // pushed anew under the same id
	case r.holds(e):
		return open, nil
	}
	return lost, nil
}

// witness is the server at a time after what it is to bear witness of. It is asked once.
type witness struct {
	s     *Store
	asked bool
	err   error
	epoch string
	hi    time.Time // the latest that its clock can show
}

// undisturbed is true if the lease still runs and the server is the one, in the same term, that granted it.
func (w *witness) undisturbed(ctx context.Context, r *Reservation) (bool, error) {
	if !w.asked {
		w.asked = true
		w.ask(ctx)
	}
	return w.err == nil && w.epoch == r.epoch && w.hi.Before(r.leaseEnd()), w.err
}

func (w *witness) ask(ctx context.Context) {
	var state serverState
	if state, w.err = w.s.clock.hello(ctx); w.err == nil {
		w.epoch = state.epoch
		_, w.hi, w.err = w.s.clock.bounds(ctx)
	}
}
