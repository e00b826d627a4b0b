package mongoq

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

const (
	// pushBatch and pushBatchBytes are what one command takes at most, which is a document of 16 MiB itself.
	pushBatch      = 1000
	pushBatchBytes = 15 << 20
	// pushFlights is how many rounds of single pushes are under way at once.
	pushFlights = 2
	// parcelSize is what an envelope has at the most beside its queue's name, its headers and its payload, in bytes.
	parcelSize = 192
)

// Item is a payload with options of its own, for PushMany.
type Item struct {
	payload any
	opts    []PushOption
}

// With gives a payload of PushMany options of its own, after those of the call.
func With(payload any, opts ...PushOption) Item { return Item{payload: payload, opts: opts} }

// Push stores an envelope in the queue and returns its id once a majority holds it. The payload is anything that BSON
// can encode: a struct, a map, a slice, a string, a number, bytes, nil.
// Options: Delay, At, Priority, Headers, TTL, ID.
//
// A context that carries a MongoDB session makes it part of the transaction: it is there when that commits.
//
// Errors: ErrPayloadTooLarge, ErrInvalidOption, ErrDuplicate, ErrClosed; ErrOutcomeUnknown, together with the id, when
// the answer was lost and the envelope is not there: it may still come, or have been done already. A push with an ID
// can then be repeated.
func (q *Queue) Push(ctx context.Context, payload any, opts ...PushOption) (bson.ObjectID, error) {
	if err := q.s.open(); err != nil {
		return bson.NilObjectID, err
	}
	if err := ctx.Err(); err != nil {
		return bson.NilObjectID, err
	}
	clock, err := q.s.stamp(ctx)
	if err != nil {
		return bson.NilObjectID, err
	}
	p, err := q.parcel(payload, opts, clock)
	if err != nil {
		return bson.NilObjectID, err
	}
	if inSession(ctx) {
		there, err := q.s.insertInSession(ctx, p)
		if err == nil && !there {
			q.s.bell.watch(clock.awaits(p.id, q.name, p.wait))
		}
		return p.id, err
	}
	if p.named {
		// By itself: an insert waits for an open transaction that has pushed the same id, and must not hold up others.
		err = q.s.insert(ctx, p)
	} else {
		_, err = q.s.pushes.do(ctx, p, func(ctx context.Context) error { return q.s.insert(ctx, p) })
	}
	if err != nil {
		if errors.Is(err, ErrOutcomeUnknown) {
			q.s.ring(q.name, p.wait, clock.age()) // it may be there, or come
			q.s.bell.watch(clock.awaits(p.id, q.name, p.wait))
			return p.id, err
		}
		return bson.NilObjectID, err
	}
	q.s.ring(q.name, p.wait, clock.age())
	return p.id, nil
}

// PushMany stores many envelopes, in batches. An element made by With has options of its own; opts hold for all. The
// ids are in the order of payloads. Those that failed are listed in a *BatchError and have the nil id, but for one whose
// outcome is unknown, which keeps its id; their neighbours are stored. A failure in a transaction is the whole call's.
// The rule: payloads is not empty, and opts hold no ID.
func (q *Queue) PushMany(ctx context.Context, payloads []any, opts ...PushOption) ([]bson.ObjectID, error) {
	if err := q.s.open(); err != nil {
		return nil, err
	}
	if len(payloads) == 0 {
		return nil, invalid("PushMany needs at least one payload, got none")
	}
	var common pushSettings
	for _, o := range opts {
		if err := o.applyPush(&common); err != nil {
			return nil, err
		}
	}
	if common.id != nil {
		return nil, invalid("ID belongs to one envelope of PushMany: give it in With")
	}
	clock, err := q.s.stamp(ctx)
	if err != nil {
		return nil, err
	}
	parcels := make([]*parcel, len(payloads))
	errs := make([]error, len(payloads))
	for i, payload := range payloads {
		own := opts
		if item, ok := payload.(Item); ok {
			payload = item.payload
			own = append(append([]PushOption{}, opts...), item.opts...)
		}
		parcels[i], errs[i] = q.parcel(payload, own, clock)
	}
	if inSession(ctx) {
		if err := batchError(errs); err != nil {
			return nil, err
		}
		var put []*parcel // that were not there before
		for _, p := range parcels {
			there, err := q.s.insertInSession(ctx, p)
			if err != nil {
				return nil, err
			}
			if !there {
				put = append(put, p)
			}
		}
		q.await(put, clock)
	} else {
		q.s.insertMany(ctx, parcels, errs, func(batch []int) { q.tell(parcels, batch, errs, clock) })
	}
	out := make([]bson.ObjectID, len(parcels))
	for i, p := range parcels {
		if errs[i] == nil || errors.Is(errs[i], ErrOutcomeUnknown) {
			out[i] = p.id
		}
	}
	return out, batchError(errs)
}

// tell rings for those of a batch that are there, or may be.
func (q *Queue) tell(parcels []*parcel, batch []int, errs []error, clock stamp) {
	var there, unknown []*parcel
	for _, i := range batch {
		switch {
		case errs[i] == nil:
			there = append(there, parcels[i])
		case errors.Is(errs[i], ErrOutcomeUnknown):
			unknown = append(unknown, parcels[i])
		}
	}
	for _, p := range soonest(append(there, unknown...)) {
		q.s.ring(q.name, p.wait, clock.age())
	}
	q.await(unknown, clock)
}

// await has it ring when parcels that come together, or in order, are there, those that are due now and those that are due
// later. Another process may have been quicker, and be done with the first of them: so the last are looked for, too, the one
// that comes last and the one that is claimed last.
func (q *Queue) await(parcels []*parcel, clock stamp) {
	for _, first := range soonest(parcels) {
		comes, claimed := first, first
		for _, p := range parcels {
			if (p.wait > 0) != (first.wait > 0) {
				continue
			}
			if comes = p; p.prio >= claimed.prio {
				claimed = p
			}
		}
		for _, p := range slices.Compact([]*parcel{first, claimed, comes}) {
			q.s.bell.watch(clock.awaits(p.id, q.name, first.wait))
		}
	}
}

// soonest are the first of those that are due now, and the first of those that are due later: whom the first wakes
// takes what is due, and then sleeps until the second.
func soonest(parcels []*parcel) []*parcel {
	var now, later *parcel
	for _, p := range parcels {
		switch {
		case p.wait <= 0 && now == nil:
			now = p
		case p.wait > 0 && (later == nil || p.wait < later.wait):
			later = p
		}
	}
	return slices.DeleteFunc([]*parcel{now, later}, func(p *parcel) bool { return p == nil })
}

// parcel is an envelope ready to be inserted.
type parcel struct {
	id     bson.ObjectID
	doc    bson.Raw
	digest []byte
	named  bool // the user gave the id
	prio   int
	wait   time.Duration
}

// stamp is the server's time of a push, by its bounds.
type stamp struct {
	lo, hi time.Time
	taken  time.Time // by this process's clock
}

func (s *Store) stamp(ctx context.Context) (stamp, error) {
	lo, hi, err := s.clock.bounds(outside(ctx))
	return stamp{lo: lo, hi: hi, taken: time.Now()}, err
}

// awaits is what a watcher looks for of something that was stamped so.
func (c stamp) awaits(id bson.ObjectID, queue string, wait time.Duration) awaited {
	return awaited{id: id, queue: queue, wait: wait, began: time.Now().Add(-c.age())}
}

// age is how long ago what is pushed now may have been, by the server's clock.
func (c stamp) age() time.Duration { return time.Since(c.taken) + c.hi.Sub(c.lo) }

// at is when something starts: for now the earliest that now can be, so that it is due at once; for later by the
// latest, so that it is not delivered early.
func (c stamp) at(s start) time.Time {
	switch {
	case !s.at.IsZero() && s.at.After(c.lo):
		return s.at
	case s.delay > 0:
		t := c.hi.Add(s.delay)
		if cut := t.Truncate(time.Millisecond); cut.Before(t) { // as stored
			t = cut.Add(time.Millisecond)
		}
		return t
	}
	return c.lo
}

func (q *Queue) parcel(payload any, opts []PushOption, clock stamp) (*parcel, error) {
	var set pushSettings
	for _, o := range opts {
		if err := o.applyPush(&set); err != nil {
			return nil, err
		}
	}
	value, err := encode("the payload", payload)
	if err != nil {
		return nil, err
	}
	p := &parcel{id: bson.NewObjectID()}
	if set.id != nil {
		p.id, p.named = *set.id, true
	}
	if set.prio == 0 {
		set.prio = defaultPriority
	}
	p.prio = set.prio
	begin := start{delay: q.cfg.Delay}
	if set.start != nil {
		begin = *set.start
	}
	when := clock.at(begin)
	p.wait = max(when.Sub(clock.lo), 0)
	size := len(value.Value) + headersSize(set.headers)
	if size > MaxEnvelopeSize {
		return nil, tooLargeError(size)
	}
	doc := newDocument(size+len(q.name)+parcelSize).
		objectID("_id", p.id).text("q", q.name).date("when", when).number("prio", int32(set.prio)).date("pushed", clock.lo)
	ttl := q.cfg.TTL
	if set.ttl != nil {
		ttl = *set.ttl
	}
	if ttl > 0 {
		deadline := clock.hi.Add(ttl)
		doc = doc.date("deadline", deadline)
		if q.cfg.OnExpire == Discard {
			doc = doc.date("expireAt", deadline)
		}
	}
	if len(set.headers) > 0 {
		headers, err := encode("the headers", set.headers)
		if err != nil {
			return nil, err
		}
		doc = doc.value("headers", headers)
	}
	if set.replayOf != nil {
		doc = doc.value("replayOf", *set.replayOf)
	}
	if p.named {
		p.digest = digest(q.name, set.prio, set.headers, value)
		doc = doc.binary("digest", p.digest)
	}
	p.doc = doc.value("payload", value).end()
	if len(p.doc) > MaxEnvelopeSize {
		return nil, tooLargeError(len(p.doc))
	}
	return p, nil
}

func tooLargeError(size int) error {
	return fmt.Errorf("%w: it must have at most %d bytes in all, has %d", ErrPayloadTooLarge, MaxEnvelopeSize, size)
}

// digest tells one push from another under the same id, wherever the envelope has gone and whatever became of its
// payload since: the queue, the priority, the headers and the payload of the push.
func digest(q string, prio int, headers map[string]string, payload bson.RawValue) []byte {
	h := sha256.New()
	part := func(b []byte) {
		fmt.Fprintf(h, "%d:", len(b))
		h.Write(b)
	}
	part([]byte(q))
	fmt.Fprintf(h, "%d;%d;%d;", prio, len(headers), payload.Type)
	for _, k := range sortedKeys(headers) {
		part([]byte(k))
		part([]byte(headers[k]))
	}
	part(payload.Value)
	return h.Sum(nil)[:16]
}

// insert stores an envelope. An insert whose answer was lost is never sent again: it may have been done, and its work
// be over; it counts as stored if it is found, else as unknown.
//
// The driver sends an insert twice, and tells of its last attempt only: when that is refused, the one before may have been
// done. So one looks before it is sent again.
func (s *Store) insert(ctx context.Context, p *parcel) error {
	if there, err := s.pushedBefore(ctx, p); there || err != nil {
		return err
	}
	return s.insertAgain(ctx, p, nil)
}

// insertAgain is insert of what was refused before; nil: it was not sent yet.
func (s *Store) insertAgain(ctx context.Context, p *parcel, refusal error) error {
	pause := 10 * time.Millisecond
	for i := 0; ; i++ {
		if refusal != nil {
			there, err := s.afterRefusal(ctx, p, refusal)
			if there || err != nil && (i+1 == attempts || sleep(ctx, pause) != nil) {
				return err
			}
			if err != nil {
				pause *= 4
				continue
			}
		}
		attempt, cancel := context.WithTimeout(ctx, attemptTimeout)
		_, err := s.envs.InsertOne(attempt, p.doc)
		cancel()
		switch {
		case err == nil:
			return nil
		case mayHaveHappened(err):
			s.clock.distrust()
			return s.lookForPush(ctx, p, err)
		case mongo.IsDuplicateKeyError(err):
			return s.sameStored(ctx, p)
		case tooLarge(err):
			return tooLargeError(len(p.doc))
		case !worthRetrying(err) || i+1 == attempts:
			there, lost := s.afterRefusal(ctx, p, err)
			switch {
			case there || lost != nil:
				return lost
			case worthRetrying(err): // an attempt before may have been done, and the envelope be gone already
				return unknown(err)
			}
			return err
		}
		if sleep(ctx, pause) != nil {
			return unknown(ctx.Err(), err)
		}
		refusal = err
		pause *= 4
	}
}

// pushedBefore tells whether a push with an id was done, and is in a partition of the history, where no insert meets it.
func (s *Store) pushedBefore(ctx context.Context, p *parcel) (bool, error) {
	if !p.named {
		return false, nil
	}
	return s.isFiled(ctx, p)
}

// isFiled tells whether what a parcel holds is in a partition of the history; an error then says that it is another one's.
func (s *Store) isFiled(ctx context.Context, p *parcel) (bool, error) {
	if !s.partitioned.Load() {
		return false, nil
	}
	filed, err := s.filed(outside(ctx), []bson.ObjectID{p.id}, digestOnly, false)
	raw := filed[p.id]
	if err != nil || raw == nil {
		return false, err
	}
	return true, p.compare(raw)
}

// afterRefusal tells whether a push is stored that the server refuses: the driver may have lost the answer to an earlier
// attempt, and sent it again by itself.
func (s *Store) afterRefusal(ctx context.Context, p *parcel, refusal error) (there bool, err error) {
	look, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	err = s.envs.FindOne(look, bson.D{field("_id", p.id)}, pushEvidence).Err()
	switch {
	case err == nil:
		return true, s.lookForPush(ctx, p, refusal) // until a majority has it
	case !errors.Is(err, mongo.ErrNoDocuments):
		return false, unknown(ctx.Err(), refusal, err)
	}
	if there, err = s.isFiled(look, p); err != nil && !there {
		err = unknown(ctx.Err(), refusal, err)
	}
	return there, err
}

// sameStored tells whether what is stored under a parcel's id is the parcel.
func (s *Store) sameStored(ctx context.Context, p *parcel) error {
	raw, err := s.envs.FindOne(ctx, bson.D{field("_id", p.id)}, pushEvidence).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		if there, err := s.pushedBefore(ctx, p); there {
			return err
		}
		return unknown(fmt.Errorf("an envelope under id %s was there and is gone", p.id.Hex()))
	}
	if err != nil {
		return unknown(err)
	}
	return p.compare(raw)
}

var (
	digestOnly   = bson.D{field("digest", 1)}
	pushEvidence = options.FindOne().SetProjection(digestOnly)
)

func (p *parcel) compare(raw bson.Raw) error {
	if e := read(raw); p.named && string(e.digest) != string(p.digest) {
		return fmt.Errorf("%w: %s", ErrDuplicate, p.id.Hex())
	}
	return nil
}

// lookForPush tells what came of an insert whose answer was lost.
func (s *Store) lookForPush(ctx context.Context, p *parcel, cause error) error {
	errs := make([]error, 1)
	s.lookForPushes(ctx, []*parcel{p}, errs, []int{0}, cause)
	return errs[0]
}

// lookForPushes does so for those of parcels that which names: what a majority holds is stored, the rest is unknown.
func (s *Store) lookForPushes(ctx context.Context, parcels []*parcel, errs []error, which []int, cause error) {
	pause := 10 * time.Millisecond
	for range attempts {
		if ctx.Err() != nil || len(which) == 0 {
			break
		}
		found, err := s.pushed(ctx, parcels, which)
		if err == nil {
			which = slices.DeleteFunc(which, func(i int) bool {
				raw, there := found[parcels[i].id]
				if there {
					errs[i] = parcels[i].compare(raw)
				}
				return there
			})
		}
		if len(which) > 0 && sleep(ctx, pause) != nil {
			break
		}
		pause *= 4
	}
	for _, i := range which {
		errs[i] = unknown(ctx.Err(), cause)
	}
}

// pushed reads which parcels a majority holds.
func (s *Store) pushed(ctx context.Context, parcels []*parcel, which []int) (map[bson.ObjectID]bson.Raw, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	want := make([]bson.ObjectID, len(which))
	for k, i := range which {
		want[k] = parcels[i].id
	}
	cur, err := s.sure.Find(ctx, bson.D{field("_id", op("$in", want))}, options.Find().SetProjection(digestOnly))
	if err != nil {
		return nil, err
	}
	defer closeCursor(ctx, cur)
	found := make(map[bson.ObjectID]bson.Raw, len(which))
	for cur.Next(ctx) {
		raw := slices.Clone(cur.Current)
		found[raw.Lookup("_id").ObjectID()] = raw
	}
	if err := cur.Err(); err != nil || !s.partitioned.Load() {
		return found, err
	}
	filed, err := s.filed(ctx, slices.DeleteFunc(want, func(id bson.ObjectID) bool { return found[id] != nil }), digestOnly, true)
	maps.Copy(found, filed)
	return found, err
}

// insertInSession stores an envelope in the caller's transaction. A duplicate key would abort that, so that a push with
// an id looks first.
func (s *Store) insertInSession(ctx context.Context, p *parcel) (there bool, err error) {
	if p.named {
		raw, err := s.envs.FindOne(ctx, bson.D{field("_id", p.id)}, pushEvidence).Raw()
		if err == nil {
			return true, p.compare(raw)
		}
		if !errors.Is(err, mongo.ErrNoDocuments) {
			return false, err
		}
		if there, err := s.pushedBefore(ctx, p); there || err != nil {
			return there, err
		}
	}
	_, err = s.envs.InsertOne(ctx, p.doc)
	return false, err
}

// insertMany stores those parcels that have no error yet, and notes the error of each that fails.
func (s *Store) insertMany(ctx context.Context, parcels []*parcel, errs []error, told func(batch []int)) {
	var batch []int
	var bytes int
	flush := func() {
		if len(batch) > 0 {
			s.insertBatch(ctx, parcels, batch, errs)
			told(batch)
		}
		batch, bytes = nil, 0
	}
	before, err := s.filedBefore(ctx, parcels)
	for i, p := range parcels {
		if errs[i] != nil {
			continue
		}
		if p.named && err != nil {
			errs[i] = err
			continue
		}
		if raw := before[p.id]; raw != nil {
			errs[i] = p.compare(raw)
			continue
		}
		if len(batch) == pushBatch || bytes+len(p.doc) > pushBatchBytes {
			flush()
		}
		batch = append(batch, i)
		bytes += len(p.doc)
	}
	flush()
}

// filedBefore is pushedBefore for many: what partitions hold of those that have ids of their own.
func (s *Store) filedBefore(ctx context.Context, parcels []*parcel) (map[bson.ObjectID]bson.Raw, error) {
	if !s.partitioned.Load() {
		return nil, nil
	}
	var named []bson.ObjectID
	for _, p := range parcels {
		if p != nil && p.named {
			named = append(named, p.id)
		}
	}
	filed := map[bson.ObjectID]bson.Raw{}
	for some := range slices.Chunk(named, pushBatch) {
		more, err := s.filed(ctx, some, digestOnly, false)
		if err != nil {
			return nil, err
		}
		maps.Copy(filed, more)
	}
	return filed, nil
}

// newPushes is where single pushes go together: as many in a round as one command takes.
func (s *Store) newPushes(limit int) *batcher[*parcel] {
	b := newBatcher(s, limit, pushFlights, s.pushRound)
	b.weigh, b.most = func(p *parcel) int { return len(p.doc) }, pushBatchBytes
	return b
}

// pushRound stores what many callers push.
func (s *Store) pushRound(calls []*call[*parcel]) {
	ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
	defer cancel()
	errs := make([]error, len(calls))
	s.insertMany(ctx, items(calls), errs, func([]int) {}) // each rings for its own
	for i, c := range calls {
		c.tell(errs[i])
	}
}

func (s *Store) insertBatch(ctx context.Context, parcels []*parcel, batch []int, errs []error) {
	if err := ctx.Err(); err != nil {
		for _, i := range batch {
			errs[i] = err
		}
		return
	}
	docs := make([]bson.Raw, len(batch))
	for k, i := range batch {
		docs[k] = parcels[i].doc
	}
	err := s.insertDocs(ctx, docs)
	if err == nil {
		return
	}
	var refusals mongo.WriteException
	exact := errors.As(err, &refusals) && refusals.WriteConcernError == nil
	failed := make(map[int]bool)
	for _, we := range refusals.WriteErrors {
		i := batch[we.Index]
		failed[i] = true
		switch {
		case we.HasErrorCode(codeDuplicateKey) && !exact:
			failed[i] = false // and looked for: no majority may have it
		case we.HasErrorCode(codeDuplicateKey):
			errs[i] = s.sameStored(ctx, parcels[i])
		case tooLarge(we):
			errs[i] = tooLargeError(len(parcels[i].doc))
		case worthRetrying(we):
			errs[i] = s.insertAgain(ctx, parcels[i], we)
		default:
			errs[i] = we
		}
	}
	if exact {
		return // the server has told of each
	}
	// What is not told of may be stored or not: it is looked for. What the server refused is sent singly.
	rest := slices.DeleteFunc(slices.Clone(batch), func(i int) bool { return failed[i] })
	if mayHaveHappened(err) {
		s.lookForPushes(ctx, parcels, errs, rest, err)
		return
	}
	for _, i := range rest {
		errs[i] = s.insertAgain(ctx, parcels[i], err)
	}
}
