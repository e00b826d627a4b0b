package mongoq

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

const (
	// settleRound is how many verbs go in one round, settleFlights how many rounds at once.
	settleRound   = 1000
	settleFlights = 2
	// roundTimeout bounds the statement of a round.
	roundTimeout = 5 * time.Second
	// againTimeout bounds it when the round is sent once more.
	againTimeout = 2 * time.Second
	// batchMargin is what a long lease must have left for its delete to go in a batch: more than the statement can take, sent twice.
	batchMargin = roundTimeout + againTimeout + time.Second
)

// settlement is a holder's verb on the way to the server.
type settlement struct {
	r      *Reservation
	verb   string
	update bson.A        // nil: the envelope is deleted
	to     string        // the queue that it is in then; empty: none, it is done
	in     time.Duration // in how long it is due there
	since  time.Time     // in counts from then; zero: from when it is sent
	shared bool          // the update is the same for all of this verb, target and retention under one token
	keep   retention
	result *bson.RawValue // of a commit
	tried  bool           // an earlier answer was lost
	joined bool           // a verb of the reservation has joined a transaction
	sent   time.Time      // first: what it makes due is due since then at the earliest
}

// startsAs has the envelope be due as s says: not later than that, by the server's clock.
func (v *settlement) startsAs(s start) *settlement {
	v.in = s.delay
	if !s.at.IsZero() {
		v.in, v.since = max(s.at.Sub(v.r.s.clock.least()), 0), time.Now()
	}
	return v
}

func (v *settlement) guard() bson.D { return holder(v.r.ID, v.r.lease) }

// sends notes that the write is sent now.
func (v *settlement) sends() {
	if v.sent.IsZero() {
		v.sent = time.Now()
	}
}

// margin is what its lease must have left for a delete to go in a batch, so that nobody else has taken the envelope when it
// runs: what becomes of that one is told all the same, but of others that are gone it cannot be told whose delete it was.
func (v *settlement) margin() time.Duration { return min(batchMargin, v.r.q.cfg.Lease/3) }

// inTime is true while the lease has its margin; hi is the latest that the server's clock can show.
func (v *settlement) inTime(hi time.Time) bool { return hi.Add(v.margin()).Before(v.r.leaseEnd()) }

// alone is the single guarded write.
func (v *settlement) alone(ctx context.Context) error {
	v.sends()
	err := guarded{write: v.write(), look: v.look, tried: &v.tried}.run(ctx)
	if err == nil && v.files() {
		v.r.s.fileBehind(v.finished())
	}
	return err
}

// inSession is the write as a part of the caller's transaction.
func (v *settlement) inSession(ctx context.Context) error {
	n, err := v.write()(ctx)
	if err == nil && n == 0 {
		return ErrLeaseLost
	}
	return err
}

func (v *settlement) write() func(context.Context) (int64, error) {
	if v.update == nil {
		return deleting(v.r.s.envs, v.guard())
	}
	return updating(v.r.s.envs, v.guard(), v.update)
}

func (v *settlement) look(ctx context.Context, majority bool) (outcome, error) {
	e, err := v.r.s.found(ctx, v.r.ID, majority)
	if err != nil {
		return unclear, err
	}
	return v.told(ctx, e, &witness{s: v.r.s})
}

// told is what the stored envelope, nil if there is none, tells of the verb.
func (v *settlement) told(ctx context.Context, e *stored, w *witness) (outcome, error) {
	switch {
	case v.update == nil:
		return v.r.tellsOfDelete(ctx, e, w)
	case v.verb == verbCommit:
		return v.r.tellsOfCommit(e), nil
	}
	return v.r.tellsOfVerb(e, v.verb), nil
}

// guardsOf guards many verbs, those under one token together.
func guardsOf(vs []*settlement) (guards bson.A) {
	byToken := map[bson.ObjectID][]bson.ObjectID{}
	for _, v := range vs {
		byToken[v.r.lease] = append(byToken[v.r.lease], v.r.ID)
	}
	for token, ids := range byToken {
		guards = append(guards, holders(ids, token))
	}
	return guards
}

// settleRound sends many verbs in two statements: the deletes, those of one token together, and the updates; commits into
// a partitioned history in a transaction of their own. Each call gets its own, exact answer.
func (s *Store) settleRound(calls []*call[*settlement]) {
	ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
	defer cancel()
	_, hi, err := s.clock.bounds(ctx)
	var deletes, ending, updates, filings []*call[*settlement]
	for _, c := range calls {
		switch {
		case c.item.tried || c.item.joined:
			singly(c)
		case c.item.files() && s.transactions:
			filings = append(filings, c)
		case c.item.update != nil:
			updates = append(updates, c)
		case err != nil:
			singly(c)
		case !c.item.inTime(hi):
			ending = append(ending, c)
		default:
			deletes = append(deletes, c)
		}
	}
	var ends sync.WaitGroup
	if len(ending) > 0 {
		ends.Go(func() { s.settleDeletes(ctx, s.renew(ctx, ending)) })
	}
	s.settleDeletes(ctx, deletes) // first: their leases have a margin, which must not pass meanwhile
	ends.Wait()
	s.settleFilings(ctx, filings)
	s.settleUpdates(ctx, updates)
	var behind []finished
	for _, c := range updates {
		if c.item.files() {
			behind = append(behind, c.item.finished())
		}
	}
	s.noteUnfiled(s.fileFinished(ctx, behind))
}

// renew extends the leases of calls that are to be deleted and are about to end, so that they can go together all the same:
// once the server or this process has stood still, that is all of them. It gives those that it could; the others go singly.
func (s *Store) renew(ctx context.Context, calls []*call[*settlement]) (renewed []*call[*settlement]) {
	if len(calls) > 1 {
		all := make([]*extension, len(calls))
		for i, c := range calls {
			all[i] = &extension{r: c.item.r, d: 2 * c.item.margin()}
		}
		_ = s.extendKnown(ctx, all)
	}
	_, hi, err := s.clock.bounds(ctx)
	for _, c := range calls {
		if err == nil && c.item.inTime(hi) {
			renewed = append(renewed, c)
		} else {
			singly(c)
		}
	}
	return renewed
}

// settleDeletes deletes what is committed without a history. As many gone as were deleted is success for each that is
// gone: what was deleted is gone, so that those are the same.
func (s *Store) settleDeletes(ctx context.Context, calls []*call[*settlement]) {
	calls, others := unlikeAny(calls)
	for _, c := range others {
		singly(c)
	}
	if len(calls) == 0 {
		return
	}
	var models []mongo.WriteModel
	for _, guard := range guardsOf(items(calls)) {
		models = append(models, mongo.NewDeleteManyModel().SetFilter(guard))
	}
	n, cause, err := s.sendRound(ctx, models, func(res *mongo.BulkWriteResult) int64 { return res.DeletedCount })
	switch {
	case err != nil:
		retrySingly(calls)
		return
	case n == int64(len(calls)):
		answer(calls, nil)
		return
	}
	found, err := s.foundMany(ctx, idsOf(calls), evidenceFields, cause != nil)
	if err != nil {
		retrySingly(calls)
		return
	}
	var gone []*call[*settlement]
	for _, c := range calls {
		e, there := found[c.item.r.ID]
		switch {
		case !there, !e.Pushed.Equal(c.item.r.Pushed): // or pushed anew under the same id
			gone = append(gone, c)
		case c.item.r.holds(e):
			c.item.tried = cause != nil
			singly(c)
		default:
			c.tell(ErrLeaseLost)
		}
	}
	switch {
	case int64(len(gone)) == n:
		answer(gone, nil)
	case cause != nil:
		s.judge(ctx, gone, found, cause)
	default:
		answer(gone, unknown(fmt.Errorf("%d envelopes of a batch are gone, of which it deleted %d", len(gone), n)))
	}
}

// unlikeAny are the calls that no other of the round has the envelope of: of two, only a write by itself tells which was its
// holder's, since a round tells but how many it has deleted.
func unlikeAny(calls []*call[*settlement]) (only, others []*call[*settlement]) {
	if !slices.ContainsFunc(calls, func(c *call[*settlement]) bool { return c.item.r.lease != calls[0].item.r.lease }) {
		return calls, nil // one claim's
	}
	times := make(map[bson.ObjectID]int, len(calls))
	for _, c := range calls {
		times[c.item.r.ID]++
	}
	if len(times) == len(calls) {
		return calls, nil
	}
	for _, c := range calls {
		if times[c.item.r.ID] == 1 {
			only = append(only, c)
		} else {
			others = append(others, c)
		}
	}
	return only, others
}

// settleUpdates sends every other verb. When fewer matched than were sent, the trace of each tells which.
func (s *Store) settleUpdates(ctx context.Context, calls []*call[*settlement]) {
	if len(calls) == 0 {
		return
	}
	type group struct {
		lease    bson.ObjectID
		verb, to string
		keep     retention
	}
	shared := map[group][]*call[*settlement]{}
	var models []mongo.WriteModel
	for _, c := range calls {
		c.item.sends()
		if c.item.shared {
			g := group{c.item.r.lease, c.item.verb, c.item.to, c.item.keep}
			shared[g] = append(shared[g], c)
			continue
		}
		models = append(models, mongo.NewUpdateOneModel().SetFilter(c.item.guard()).SetUpdate(c.item.update))
	}
	for g, members := range shared {
		models = append(models, mongo.NewUpdateManyModel().SetFilter(holders(idsOf(members), g.lease)).SetUpdate(members[0].item.update))
	}
	n, cause, err := s.sendRound(ctx, models, func(res *mongo.BulkWriteResult) int64 { return res.MatchedCount })
	switch {
	case err != nil:
		retrySingly(calls)
		return
	case n == int64(len(calls)):
		answer(calls, nil)
		return
	}
	found, err := s.foundMany(ctx, idsOf(calls), evidenceFields, true)
	if err != nil {
		retrySingly(calls)
		return
	}
	var traced, rest []*call[*settlement]
	w := &witness{s: s}
	for _, c := range calls {
		if o, err := c.item.told(ctx, found[c.item.r.ID], w); err == nil && o == done {
			traced = append(traced, c)
		} else {
			rest = append(rest, c)
		}
	}
	if cause == nil && int64(len(traced)) == n { // each that matched has been found
		answer(traced, nil)
		answer(rest, ErrLeaseLost)
		return
	}
	s.judge(ctx, calls, found, cause)
}

// sendRound sends the statements of a round, and says to how many envelopes they were done. A round that has failed is sent
// once more, and cause says why: sent singly, a thousand verbs would take so long, after the server or this process has
// stood still, that their leases end. With an error it has failed twice: an envelope that an open transaction holds, or
// that is refused, holds up no other for long.
func (s *Store) sendRound(ctx context.Context, models []mongo.WriteModel, count func(*mongo.BulkWriteResult) int64) (n int64, cause, err error) {
	if n, cause = s.bulk(ctx, roundTimeout, models, count); cause == nil {
		return n, nil, nil
	}
	n, err = s.bulk(ctx, againTimeout, models, count)
	return n, cause, err
}

// judge answers calls by what is stored, as a majority has it, after a round that did not tell: as a write by itself does
// that is repeated and matches nothing.
func (s *Store) judge(ctx context.Context, calls []*call[*settlement], found map[bson.ObjectID]*stored, cause error) {
	w := &witness{s: s}
	for _, c := range calls {
		c.item.tried = true
		o, err := c.item.told(ctx, found[c.item.r.ID], w)
		switch {
		case err != nil || o == open:
			singly(c)
		case o == done:
			c.tell(nil)
		case o == lost:
			c.tell(ErrLeaseLost)
		default:
			c.tell(unknown(cause))
		}
	}
}

// retrySingly sends each call of a failed round by itself. A round is several commands, and the driver may have sent
// them more than once: whatever the error, each looks before it says lost.
func retrySingly(calls []*call[*settlement]) {
	for _, c := range calls {
		c.item.tried = true
		singly(c)
	}
}

func (s *Store) bulk(ctx context.Context, limit time.Duration, models []mongo.WriteModel, count func(*mongo.BulkWriteResult) int64) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	res, err := s.envs.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	if err != nil {
		return 0, err
	}
	return count(res), nil
}

// foundMany reads fields of many envelopes, by id: as the primary has them or, with majority, as no failover can undo it.
func (s *Store) foundMany(ctx context.Context, ids []bson.ObjectID, fields bson.D, majority bool) (map[bson.ObjectID]*stored, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	found, err := s.foundHere(ctx, ids, fields, majority)
	if err != nil || !s.partitioned.Load() {
		return found, err
	}
	gone := slices.DeleteFunc(slices.Clone(ids), func(id bson.ObjectID) bool { return found[id] != nil })
	filed, err := s.filed(ctx, gone, fields, majority)
	for id, raw := range filed {
		e := read(raw)
		found[id] = &e
	}
	return found, err
}

// stillHeld are those of some reservations, whose ids are given, that hold their envelopes still.
func (s *Store) stillHeld(ctx context.Context, rs []*Reservation, ids []bson.ObjectID) ([]*Reservation, error) {
	found, err := s.foundMany(ctx, ids, evidenceFields, false)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(rs), func(r *Reservation) bool { return !r.holds(found[r.ID]) }), nil
}

// foundHere is foundMany without the partitions of the history.
func (s *Store) foundHere(ctx context.Context, ids []bson.ObjectID, fields bson.D, majority bool) (map[bson.ObjectID]*stored, error) {
	c := s.envs
	if majority {
		c = s.sure
	}
	cur, err := c.Find(ctx, bson.D{field("_id", op("$in", ids))}, options.Find().SetProjection(fields))
	if err != nil {
		return nil, err
	}
	defer closeCursor(ctx, cur)
	found := make(map[bson.ObjectID]*stored, len(ids))
	for cur.Next(ctx) {
		e := read(slices.Clone(cur.Current))
		found[e.ID] = &e
	}
	return found, cur.Err()
}

func idsOf(calls []*call[*settlement]) []bson.ObjectID {
	ids := make([]bson.ObjectID, len(calls))
	for i, c := range calls {
		ids[i] = c.item.r.ID
	}
	return ids
}
