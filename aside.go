package mongoq

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// What a claim takes but nobody may handle: past its deadline, lost with its consumers too often, or no envelope at
// all. Each goes out of the way of its neighbours here.

// sweepWindow is how many envelopes at the head a sweep looks at in one round.
const sweepWindow = 1000

// admit makes a reservation of what was claimed, or takes it aside and gives nil. One that may be past its deadline is
// for sweep.
func (q *Queue) admit(ctx context.Context, t taken) (r *Reservation, late bool) {
	e := t.read()
	if len(e.bad) > 0 {
		if err := q.setAside(ctx, t.raw, &e); err != nil {
			q.s.log.Error("mongoq: a document that is no envelope could not be set aside; it is tried again when its lease ends", "queue", q.name, "id", e.id.String(), "error", err)
		}
		return nil, false
	}
	r = &Reservation{Envelope: e.Envelope, mu: newGate(), s: q.s, q: q, lease: e.lease, size: e.size, epoch: t.epoch, last: e.last, end: e.When}
	if e.Dead == nil && !e.Deadline.IsZero() && !e.Deadline.After(maxTime(e.Reserved, t.latest)) {
		return r, true
	}
	if n := len(e.Failures); n > 0 && e.Failures[n-1].Lost && e.Failures[n-1].At.Equal(e.Reserved) {
		if v := q.judge(e.Retries, nil, e.Dead != nil); v.dead != "" {
			msg := fmt.Sprintf("lost with its consumer %d times: its lease ran out", e.Retries)
			q.report(r.ID, r.bury(ctx, DeadLost, msg, patch{}))
			return nil, false
		}
	}
	return r, false
}

// report logs what could not be done aside: the envelope comes back when its lease ends, and it is tried again.
func (q *Queue) report(id bson.ObjectID, err error) {
	if err != nil {
		q.s.log.Warn("mongoq: an envelope could not be taken aside; it is tried again when its lease ends", "queue", q.name, "id", id.Hex(), "error", err)
	}
}

const expiredMessage = "not taken before its deadline"

// expiresTo is the dead-letter queue of what expires; empty: it is discarded.
func (q *Queue) expiresTo() string {
	if q.cfg.OnExpire == Discard || q.cfg.DeadLetter == NoDeadLetter {
		return ""
	}
	return q.cfg.DeadLetter
}

// sweep ends the expired envelopes that a claim took, and takes those that follow at the head out of the way in large
// batches, for as long as they are many. The claim knows the server's clock within bounds: what the server says is not
// expired is given back to its caller, alive.
func (q *Queue) sweep(ctx context.Context, claimed []*Reservation) (alive []*Reservation) {
	byToken := map[bson.ObjectID][]*Reservation{}
	for _, r := range claimed {
		byToken[r.lease] = append(byToken[r.lease], r)
	}
	for token, rs := range byToken {
		ids := make([]bson.ObjectID, len(rs))
		for i, r := range rs {
			ids[i] = r.ID
		}
		n, err := q.endExpired(ctx, append(holders(ids, token), field("$expr", expired())))
		if err == nil && n < int64(len(rs)) {
			rs, err = q.s.stillHeld(ctx, rs, ids)
			alive = append(alive, rs...)
		}
		if err != nil {
			q.report(ids[0], err)
		}
	}
	for {
		ids, more, err := q.expiredAtHead(ctx)
		if err == nil && len(ids) > 0 {
			_, err = q.endExpired(ctx, expireFilter(q.name, ids))
		}
		if err != nil {
			q.s.log.Warn("mongoq: expired envelopes could not be swept", "queue", q.name, "error", err)
			return alive
		}
		if !more {
			return alive
		}
	}
}

// expiredAtHead finds the expired among the first of the queue; more: they are at least half of a full window.
func (q *Queue) expiredAtHead(ctx context.Context) (expiredIDs []bson.RawValue, more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	cur, err := q.s.envs.Find(ctx, claimFilter(q.name, nil, time.Time{}), options.Find().
		SetSort(bson.D{field("prio", 1), field("when", 1)}).SetHint(q.s.ready).SetLimit(sweepWindow).
		SetBatchSize(sweepWindow+1).SetProjection(bson.D{field("_id", 1), field("late", expired())}))
	if err != nil {
		return nil, false, err
	}
	defer cur.Close(ctx)
	n := 0
	for cur.Next(ctx) {
		n++
		if late, _ := cur.Current.Lookup("late").BooleanOK(); late {
			id := cur.Current.Lookup("_id")
			expiredIDs = append(expiredIDs, bson.RawValue{Type: id.Type, Value: append([]byte(nil), id.Value...)})
		}
	}
	return expiredIDs, n == sweepWindow && len(expiredIDs) >= n/2, cur.Err()
}

// endExpired discards or dead-letters what a statement's filter matches, and says how many. It may be repeated.
func (q *Queue) endExpired(ctx context.Context, filter bson.D) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	began := time.Now()
	if to := q.expiresTo(); to != "" {
		res, err := q.s.envs.UpdateMany(ctx, filter,
			deadLetterUpdate(lastOf(bson.NewObjectID(), verbDeadLetter), literal(q.name), to, DeadExpired, expiredMessage, false, patch{}, nil, q.cfg.DeadRetention))
		q.s.ring(to, 0, time.Since(began))
		if err != nil {
			return 0, err
		}
		return res.MatchedCount, nil
	}
	res, err := q.s.envs.DeleteMany(ctx, filter)
	if err != nil {
		return 0, err
	}
	return res.DeletedCount, nil
}

// setAside makes a readable dead letter of a document that is no envelope: what can be read stays, the rest is kept in
// dead.was. The guard is the claim's token. A document whose _id is no ObjectID gets one that follows from its own, so
// that a repeated attempt makes the same copy.
func (q *Queue) setAside(ctx context.Context, raw bson.Raw, e *stored) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	began := time.Now()
	why := strings.Join(e.badFields(), ", ")
	doc, err := q.repaired(ctx, e, cut("the stored document is no envelope: "+why))
	if err != nil {
		return err
	}
	if len(raw) > MaxEnvelopeSize {
		if doc, err = q.s.putPayloadAside(ctx, doc); err != nil {
			return err
		}
	}
	guard := bson.D{field("_id", e.id), field("lease", e.lease), field("processed", nil)}
	if err := q.s.exchange(ctx, guard, e.id, doc); err != nil {
		return err
	}
	q.s.log.Warn("mongoq: a document that is no envelope was set aside", "queue", q.name, "id", e.id.String(), "to", q.asideTo(), "why", why)
	q.s.ring(q.asideTo(), 0, time.Since(began))
	return nil
}

// exchange puts a repaired envelope in the place of the document that the guard matches. An _id cannot be changed, so a
// new one takes two steps, and these may be repeated.
func (s *Store) exchange(ctx context.Context, guard bson.D, id bson.RawValue, doc bson.D) error {
	if id.Type == bson.TypeObjectID {
		_, err := s.envs.ReplaceOne(ctx, guard, doc)
		return err
	}
	if _, err := s.envs.InsertOne(ctx, doc); err != nil && !mongo.IsDuplicateKeyError(err) {
		return err
	}
	_, err := s.envs.DeleteOne(ctx, guard)
	return err
}

// asideTo is where what cannot be read goes: a queue that retries for ever must not retry that.
func (q *Queue) asideTo() string {
	if q.cfg.DeadLetter == NoDeadLetter {
		return defaultDeadLetter(q.name)
	}
	return q.cfg.DeadLetter
}

// repaired is the dead letter that a document becomes.
func (q *Queue) repaired(ctx context.Context, e *stored, why string) (bson.D, error) {
	at, _, err := q.s.clock.bounds(ctx)
	if err != nil {
		return nil, err
	}
	id := e.ID
	if e.id.Type != bson.TypeObjectID {
		sum := sha256.Sum256(append([]byte{byte(e.id.Type)}, e.id.Value...))
		id = bson.ObjectID(sum[:12])
	}
	var was bson.D
	for _, el := range e.bad {
		key := el.Key()
		if key == "was" {
			key = "when"
		}
		was = append(was, field(key, el.Value()))
	}
	to, from := q.asideTo(), q.name
	if e.Dead != nil { // it was a dead letter before: it stays where it is
		to, from = q.name, e.Dead.From
	}
	hops := append(slices.Clone(e.Hops), Hop{From: q.name, At: at})
	doc := bson.D{
		field("_id", id), field("q", to), field("when", at),
		field("prio", min(max(e.Priority, firstPriority), lastPriority)),
		field("deliveries", e.Deliveries), field("retries", e.Retries), field("moves", e.Moves+1),
		field("payload", e.Payload),
		field("hops", hopDocs(hops[max(0, len(hops)-keptHops):])),
		field("dead", bson.D{
			field("from", from), field("at", at), field("kind", string(DeadUndecodable)), field("msg", why), field("was", was),
		}),
	}
	if q.cfg.DeadRetention > 0 && e.Dead == nil {
		doc = append(doc, field("expireAt", at.Add(q.cfg.DeadRetention)))
	}
	if len(e.Headers) > 0 {
		doc = append(doc, field("headers", e.Headers))
	}
	if len(e.Failures) > 0 {
		doc = append(doc, field("errs", failureDocs(e.Failures[max(0, len(e.Failures)-keptFailures):])))
	}
	if !e.Pushed.IsZero() {
		doc = append(doc, field("pushed", e.Pushed))
	}
	if !e.Deadline.IsZero() {
		doc = append(doc, field("deadline", e.Deadline))
	}
	return append(doc, e.rest...), nil
}

func hopDocs(hops []Hop) bson.A {
	a := bson.A{}
	for _, h := range hops {
		a = append(a, bson.D{field("from", h.From), field("at", h.At)})
	}
	return a
}

func failureDocs(fs []Failure) bson.A {
	a := bson.A{}
	for _, f := range fs {
		a = append(a, bson.D{field("at", f.At), field("retries", f.Retries), field("msg", cut(f.Msg)), field("lost", f.Lost)})
	}
	return a
}

// setAsideTooLarge takes what cannot be claimed, since a claim would make it outgrow 16 MiB, from the head of a queue.
// Only what somebody wrote by hand can be that large. Its payload goes to <Collection>.aside under the same id, and
// the envelope, with its reason, to the dead-letter queue.
func (q *Queue) setAsideTooLarge(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	s := q.s
	filter := append(claimFilter(q.name, nil, time.Time{}), field("$and", bson.A{
		op("$expr", op("$gt", bson.A{op("$bsonSize", "$$ROOT"), MaxEnvelopeSize})),
	}))
	cur, err := s.envs.Find(ctx, filter, options.Find().SetHint(s.ready).SetBatchSize(1))
	if err != nil {
		return err
	}
	defer cur.Close(ctx)
	for cur.Next(ctx) {
		began := time.Now()
		e := read(cur.Current)
		why := fmt.Sprintf("too large to be claimed: %d bytes; its payload is kept in %s under the same _id", e.size, s.aside.Name())
		doc, err := q.repaired(ctx, &e, why)
		if err != nil {
			return err
		}
		if doc, err = s.putPayloadAside(ctx, doc); err != nil {
			return err
		}
		// By its id and the state seen: nobody has claimed it since.
		guard := bson.D{field("_id", e.id), field("q", q.name), field("processed", nil),
			field("lease", cur.Current.Lookup("lease")), field("when", cur.Current.Lookup("when"))}
		if e.lease.IsZero() {
			guard[3] = field("lease", nil)
		}
		if err := s.exchange(ctx, guard, e.id, doc); err != nil {
			return err
		}
		s.ring(q.asideTo(), 0, time.Since(began))
		s.log.Warn("mongoq: an envelope that is too large was set aside", "queue", q.name, "id", e.id.String(), "to", q.asideTo(), "bytes", e.size)
	}
	return cur.Err()
}

// putPayloadAside stores a payload in a document of its own, and gives the envelope without it. It may be repeated.
func (s *Store) putPayloadAside(ctx context.Context, doc bson.D) (bson.D, error) {
	for i, el := range doc {
		if el.Key != "payload" {
			continue
		}
		_, err := s.aside.InsertOne(ctx, bson.D{field("_id", doc[0].Value), field("payload", el.Value)})
		if err != nil && !mongo.IsDuplicateKeyError(err) {
			return nil, err
		}
		doc[i].Value = nil
	}
	return doc, nil
}
