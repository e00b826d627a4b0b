package mongoq

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

const (
	// joinRound is how many parts are gathered in one round, joinFlights how many rounds go at once.
	joinRound   = 500
	joinFlights = 2
	// lookLimit wholes look for their parts together. The first time is after lookFirst; it doubles up to lookLast.
	lookLimit   = 200
	lookFlights = 2
	lookFirst   = 10 * time.Second
	lookLast    = 10 * time.Minute
	// lookSoon is after how long one that has all its parts looks whether whoever put in the last has closed it.
	lookSoon = time.Second
)

// JoinPolicy says what becomes of a join when a part dies on its way.
type JoinPolicy int

const (
	// FailWhole dead-letters the whole, of the kind DeadPart, with the part's reason. Parts that arrive later are kept
	// with it; when the dead part is redriven and arrives, the whole comes back to life.
	FailWhole JoinPolicy = iota
	// GoOn goes on without the part, which the handler finds in Joined.Missing. A dead part that is redriven later dies
	// again when it arrives: its whole has left.
	GoOn
)

// Join makes a stage wait for all parts of a fork. Its handler gets the envelope that was forked, under its own id and
// with its own payload and headers, and in Joined what its parts brought.
type Join struct {
	Of     string     // the stage that forks
	OnDead JoinPolicy // defaults to FailWhole
}

// receive handles what comes to a join that is no whole with all its parts, and gives the course for it; nil: it is one.
func (j *Join) receive(r *Reservation) course {
	switch {
	case r.Joined != nil && r.Joined.at == r.Q && r.Joined.Closed:
		return nil
	case r.Joined != nil && r.Joined.at == r.Q:
		return looking{j.OnDead}
	case r.Part != nil && r.Part.join == r.Q:
		return arriving{}
	}
	return burying{DeadUnroutable, "it came to a join and is no part of a fork that the join waits for"}
}

// arriving is the course of a part that has come to its join.
type arriving struct{}

// errTooLate is the end of a part whose whole does not wait for it any more.
var errTooLate = errors.New("its join has gone on without it")

func (arriving) settle(ctx context.Context, r *Reservation) (EventKind, error) {
	err := r.arrive(ctx)
	switch {
	case errors.Is(err, errTooLate):
		return EventDeadLettered, r.give(ctx, DeadUnroutable, errTooLate.Error())
	case errors.Is(err, ErrPayloadTooLarge):
		return EventDeadLettered, r.give(ctx, DeadPermanent, "with it the joined envelope would be too large: "+err.Error())
	}
	return EventArrived, err
}

func (r *Reservation) arrive(ctx context.Context) error {
	if err := r.mu.lock(ctx); err != nil {
		return err
	}
	defer r.mu.unlock()
	if r.settled {
		return ErrLeaseLost
	}
	_, err := r.s.joins.do(ctx, r, nil)
	if err == nil {
		r.settled, r.verb = true, verbMove
	}
	return err
}

// whole names a gathering: the envelope that waits and the fork's token.
type whole struct{ id, fork bson.ObjectID }

func wholeOf(p *Part) whole { return whole{p.Of, p.fork} }

// joinRound gathers many parts, in rounds that are not too large.
func (s *Store) joinRound(calls []*call[*Reservation]) {
	for len(calls) > 0 {
		n, bytes := 0, 0
		for n < len(calls) && (n == 0 || bytes+calls[n].item.size <= forkBytes) {
			bytes += calls[n].item.size
			n++
		}
		s.joinSome(calls[:n])
		calls = calls[n:]
	}
}

// joinSome gathers parts. All of it may be done again, and is when it fails.
func (s *Store) joinSome(calls []*call[*Reservation]) {
	ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
	defer cancel()
	var err error
	for pause := 10 * time.Millisecond; ; pause *= 4 {
		var answers []error
		if answers, err = s.gather(ctx, calls); err == nil {
			for i, c := range calls {
				c.tell(answers[i])
			}
			return
		}
		if pause > 10*time.Second || sleep(ctx, pause) != nil {
			break
		}
	}
	answer(calls, unknown(err)) // they are delivered again
}

// gather puts parts into their wholes, deletes those that are in, and closes the wholes that are complete.
func (s *Store) gather(ctx context.Context, calls []*call[*Reservation]) ([]error, error) {
	answers := make([]error, len(calls))
	var models []mongo.WriteModel
	where := map[whole]string{} // the join's queue
	for _, c := range calls {
		r := c.item
		where[wholeOf(r.Part)] = r.Q
		filter, update := gatherWrite(r)
		if end := r.Part.end; end != nil {
			filter, update = endedWrite(r.Part, r.ID, *end)
		}
		models = append(models, mongo.NewUpdateOneModel().SetFilter(filter).SetUpdate(update))
	}
	_, err := s.bulk(ctx, roundTimeout, models, func(res *mongo.BulkWriteResult) int64 { return res.MatchedCount })
	var be mongo.BulkWriteException
	switch {
	case errors.As(err, &be) && be.WriteConcernError == nil:
		for _, we := range be.WriteErrors {
			if !tooLarge(we) {
				return nil, err
			}
			answers[we.Index] = tooLargeError(MaxEnvelopeSize + len(calls[we.Index].item.Payload.Value))
		}
	case err != nil:
		return nil, err
	}
	known, err := s.closeJoins(ctx, where)
	if err != nil {
		return nil, err
	}
	for i, c := range calls {
		switch j := known[wholeOf(c.item.Part)]; {
		case answers[i] != nil || j != nil && j.has(c.item.ID):
		case j == nil || j.Closed:
			answers[i] = errTooLate
		default: // it is open: the part was too much
			answers[i] = tooLargeError(j.total + c.item.size)
		}
	}
	return answers, nil
}

// closeJoins deletes the parts that are in their wholes, and closes those wholes that wait for no more. It gives what it
// knows of each, without the parts' content.
func (s *Store) closeJoins(ctx context.Context, where map[whole]string) (map[whole]*Joined, error) {
	known, err := s.joinsOf(ctx, slices.Collect(maps.Keys(where)))
	if err != nil {
		return nil, err
	}
	var in []bson.ObjectID
	queues := map[string]bool{}
	var complete []whole
	for w, j := range known {
		queues[where[w]] = true
		for i := range j.Parts {
			in = append(in, j.Parts[i].ID)
		}
		for _, m := range j.Missing {
			if m.told {
				in = append(in, m.ID)
			}
		}
		if !j.Closed && len(j.Parts)+len(j.Missing) >= j.Count {
			complete = append(complete, w)
		}
	}
	if len(in) > 0 {
		// Those in the join's queue only: what died there, and was gone on without, stays where it is.
		filter := bson.D{field("_id", op("$in", in)), field("q", op("$in", slices.Collect(maps.Keys(queues))))}
		if _, err := s.envs.DeleteMany(ctx, filter); err != nil {
			return nil, err
		}
	}
	if len(complete) == 0 {
		return known, nil
	}
	return known, s.closeWholes(ctx, complete, where)
}

// closeWholes closes those that are complete, and brings those back to life that have died of a part.
func (s *Store) closeWholes(ctx context.Context, complete []whole, where map[whole]string) error {
	var models []mongo.WriteModel
	for _, w := range complete {
		models = append(models,
			mongo.NewUpdateOneModel().SetFilter(closeFilter(w)).SetUpdate(closeUpdate()),
			mongo.NewUpdateOneModel().SetFilter(reviveFilter(w)).SetUpdate(redriveUpdate(bson.NewObjectID(), redriveSettings{})))
	}
	began := time.Now()
	_, err := s.bulk(ctx, roundTimeout, models, func(res *mongo.BulkWriteResult) int64 { return res.MatchedCount })
	for _, w := range complete { // also after an error: some may be closed
		s.ring(where[w], 0, time.Since(began))
	}
	return err
}

// joinsOf reads which parts wholes have; one that is gone, or has been forked anew, is not among them.
func (s *Store) joinsOf(ctx context.Context, ws []whole) (map[whole]*Joined, error) {
	ids := make([]bson.ObjectID, len(ws))
	for i, w := range ws {
		ids[i] = w.id
	}
	found, err := s.foundMany(ctx, ids, gathered, false)
	if err != nil {
		return nil, err
	}
	known := map[whole]*Joined{}
	for id, e := range found {
		if e.Joined != nil {
			known[whole{id, e.Joined.fork}] = e.Joined
		}
	}
	return known, nil
}

// gathered is what a whole knows of its parts, without their content.
var gathered = bson.D{
	field("join.fork", 1), field("join.at", 1), field("join.n", 1), field("join.branches", 1), field("join.closed", 1), field("join.ended", 1),
	field("join.got.id", 1), field("join.got.i", 1), field("join.total", op("$bsonSize", "$$ROOT")),
}

// tellEnd tells the whole of a part that was ended, and is in the history, that it will not come. Should that fail, the
// whole finds it by itself, for as long as the history keeps it.
func (s *Store) tellEnd(ctx context.Context, r *Reservation, end ending) {
	if r.Part == nil || r.Part.join == "" {
		return
	}
	ctx, cancel := detached(ctx, attemptTimeout)
	defer cancel()
	filter, update := endedWrite(r.Part, r.ID, end)
	_, err := s.envs.UpdateOne(ctx, filter, update)
	if err == nil {
		_, err = s.closeJoins(ctx, map[whole]string{wholeOf(r.Part): r.Part.join})
	}
	if err != nil {
		s.log.Debug("mongoq: a join could not be told of a part that ended; it looks by itself", "queue", r.Part.join, "error", err)
	}
}

// tellJoin has the whole of a part that died looked at: now, not at its next look. That it may fail costs the time until
// then.
func (s *Store) tellJoin(p *Part) {
	if p == nil || p.join == "" || !s.begin() {
		return
	}
	go func() {
		defer s.wg.Done()
		ctx, cancel := context.WithTimeout(s.life, attemptTimeout)
		defer cancel()
		began := time.Now()
		res, err := s.envs.UpdateOne(ctx, tellFilter(p), set(field("when", now)))
		switch {
		case err != nil:
			s.log.Debug("mongoq: a join could not be told of a part that died; it looks by itself", "queue", p.join, "error", err)
		case res.MatchedCount > 0:
			s.ring(p.join, 0, time.Since(began))
		}
	}()
}
