package mongoq

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// looking is the course of a whole that waits for parts: they are looked for.
type looking struct{ policy JoinPolicy }

// lastSeen is what a look reads of the parts, without their content.
var lastSeen = bson.D{field("q", 1), field("dead", 1), field("processed", 1), field("result.dropped", 1)}

// search is a look for the parts of one whole, and what it found.
type search struct {
	r       *Reservation
	missing []MissingPart // that will not come
	fatal   *MissingPart  // one of them that did not end by a stage's will
}

func (l looking) settle(ctx context.Context, r *Reservation) (EventKind, error) {
	ctx, cancel := context.WithTimeout(ctx, attempts*attemptTimeout)
	defer cancel()
	v := &search{r: r}
	_, err := r.s.looks.do(ctx, v, nil)
	if err != nil {
		return EventHeld, err
	}
	if v.fatal != nil && l.policy == FailWhole {
		if err := r.give(ctx, DeadPart, v.fatal.reason()); err != nil {
			return EventDeadLettered, err
		}
		// Its last part may have come in this moment.
		w := whole{r.ID, r.Joined.fork}
		if err := r.s.closeWholes(ctx, []whole{w}, map[whole]string{w: r.Q}); err != nil {
			r.s.log.Warn("mongoq: a join that has failed could not be looked at again; should all its parts be there, redrive it", "queue", r.Q, "id", r.ID.Hex(), "error", err)
		}
		return EventDeadLettered, nil
	}
	marks := bson.A{}
	for _, m := range v.missing {
		marks = append(marks, m.doc())
	}
	d := r.Joined.nextLook()
	// It is due sooner if it has all its parts: whoever waits looks.
	hold := &settlement{r: r, verb: verbRelease, update: holdUpdate(r.lease, d, marks, r.q.cfg.OnExpire), to: r.Q, in: min(d, lookSoon)}
	if err := r.settle(ctx, hold); err != nil {
		return EventHeld, err
	}
	if took := time.Since(hold.sent); took > lowLate { // and at once if it was closed meanwhile: who looks may begin above that
		r.s.ring(r.Q, 0, took)
	}
	if len(marks) > 0 { // it may wait for no more
		// What this fails to close, the next look does.
		if _, err := r.s.closeJoins(ctx, map[whole]string{{r.ID, r.Joined.fork}: r.Q}); err != nil {
			r.s.log.Debug("mongoq: a join could not be closed; it is tried again", "queue", r.Q, "id", r.ID.Hex(), "error", err)
		}
	}
	return EventHeld, nil
}

// nextLook is when a whole that waits is looked at again.
func (j *Joined) nextLook() time.Duration { return min(lookFirst<<min(j.looks, 10), lookLast) }

func (m *MissingPart) reason() string {
	if m.Dead != "" {
		return fmt.Sprintf("part %q (%s) died: %s: %s", m.Branch, m.ID.Hex(), m.Dead, m.Msg)
	}
	return fmt.Sprintf("part %q (%s) is gone: removed, or expired", m.Branch, m.ID.Hex())
}

// lookRound looks for the parts of many wholes: two reads for all.
//
// A part that arrives is put into its whole before it is deleted: so the wholes are read after the parts.
func (s *Store) lookRound(calls []*call[*search]) {
	ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
	defer cancel()
	var ids []bson.ObjectID
	var wholes []whole
	for _, c := range calls {
		j := c.item.r.Joined
		for i := range j.Count {
			ids = append(ids, partID(c.item.r.ID, j.fork, i))
		}
		wholes = append(wholes, whole{c.item.r.ID, j.fork})
	}
	there, err := s.foundMany(ctx, ids, lastSeen, false)
	if err != nil {
		answer(calls, err)
		return
	}
	known, err := s.joinsOf(ctx, wholes)
	if err != nil {
		answer(calls, err)
		return
	}
	// Those that have all their parts, and that nobody has closed: whoever was about to may be dead.
	complete := map[whole]string{}
	for i, c := range calls {
		if j := known[wholes[i]]; j != nil && !j.Closed && len(j.Parts)+len(j.Missing) >= j.Count {
			complete[wholes[i]] = c.item.r.Q
		}
	}
	if len(complete) > 0 {
		if _, err := s.closeJoins(ctx, complete); err != nil {
			answer(calls, err)
			return
		}
	}
	for i, c := range calls {
		j := known[wholes[i]]
		if j == nil {
			c.tell(ErrLeaseLost)
			continue
		}
		c.item.compare(j, there)
		c.tell(nil)
	}
}

// compare finds those parts that neither are in the whole nor on their way.
func (v *search) compare(j *Joined, there map[bson.ObjectID]*stored) {
	settled := j.settled()
	for i := range j.Count {
		id := partID(v.r.ID, j.fork, i)
		e := there[id]
		if settled[id] || e != nil && e.Dead == nil && e.Processed.IsZero() {
			continue
		}
		m := MissingPart{ID: id, Branch: v.r.Joined.branch(i)}
		switch {
		case e != nil && e.Dead != nil:
			m.Dead, m.Msg = e.Dead.Kind, e.Dead.Msg
		case e != nil:
			m.Ended, m.Msg = true, "done: in "+e.Q
			if why, ok := droppedFor(e.Result); ok {
				m.Msg = "dropped: " + why
			}
		}
		v.missing = append(v.missing, m)
		if !m.Ended && v.fatal == nil {
			v.fatal = &m
		}
	}
}

func (j *Joined) branch(i int) string {
	if i < len(j.branches) {
		return j.branches[i]
	}
	return ""
}
