package mongoq

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// DeadLetters are the envelopes that died in a queue, in whatever dead-letter queue they are now.
type DeadLetters struct{ q *Queue }

// DeadLetters gives the dead letters that came from this queue.
func (q *Queue) DeadLetters() *DeadLetters { return &DeadLetters{q: q} }

type redriveSettings struct {
	selection
	to       *Queue // nil: where each came from
	patch    patch
	rewrite  func(*Envelope) (any, error)
	rate     float64 // a second; 0: as fast as it goes
	progress func(Progress)
}

// List gives the dead letters, those of one kind together, the latest first. It reads while the caller goes on, and ends
// with an error as its last element if the server fails.
// Options: Since, Until (of the death), IDs, Kinds, Header, Limit, Cursor.
func (d *DeadLetters) List(ctx context.Context, opts ...DeadLetterOption) iter.Seq2[*Envelope, error] {
	set, below, err := d.selection(opts)
	if err != nil {
		return func(yield func(*Envelope, error) bool) { yield(nil, err) }
	}
	parts := []bson.D{d.filter(&set)} // what was written by hand and has no time, too
	if below != nil {
		parts = d.parts(&set, below)
	}
	return limited(d.read(ctx, &set, parts, set.limit), set.limit)
}

// Page gives the next of the dead letters in the order of List: 50, or as Limit says. With the Next of a page as Cursor it
// goes on where that ended: of those that were there at the first page, and stay, each comes once, whatever dies or is
// redriven meanwhile. Where nothing but Since, Until and Kinds is given, a page costs as many index keys as it has
// envelopes, and a few; with Header every one is looked at until there are enough. What was written by hand with no kind
// or no time is in List only.
// Options: Since, Until (of the death), IDs, Kinds, Header, Limit, Cursor.
func (d *DeadLetters) Page(ctx context.Context, opts ...DeadLetterOption) (*Page, error) {
	set, below, err := d.selection(opts)
	if err != nil {
		return nil, err
	}
	n, err := set.pageSize()
	if err != nil {
		return nil, err
	}
	list := d.read(ctx, &set, d.parts(&set, below), n+1)
	return pageOf(limited(list, n+1), n, func(e *Envelope) string {
		return place{at: e.Dead.At, id: e.ID, kind: string(e.Dead.Kind)}.cursor(listDead)
	})
}

// Count counts the dead letters by kind, up to Limit in all if that is given. It looks at every one that it counts: about
// a second for each million. Options: Since, Until (of the death), IDs, Kinds, Header, Limit.
func (d *DeadLetters) Count(ctx context.Context, opts ...DeadLetterOption) (map[DeadKind]int64, error) {
	set, below, err := d.selection(opts)
	if err != nil {
		return nil, err
	}
	if below != nil {
		return nil, invalid("Count takes no Cursor")
	}
	s := d.q.s
	if err := s.open(); err != nil {
		return nil, err
	}
	pipeline := bson.A{op("$match", d.filter(&set))}
	if set.limit > 0 {
		pipeline = append(pipeline, op("$limit", set.limit))
	}
	pipeline = append(pipeline, op("$group", bson.D{field("_id", "$dead.kind"), field("n", op("$sum", 1))}))
	cur, err := s.envs.Aggregate(ctx, pipeline, options.Aggregate().SetHint(d.hint(&set)))
	if err != nil {
		return nil, err
	}
	defer closeCursor(ctx, cur)
	counts := map[DeadKind]int64{}
	for cur.Next(ctx) {
		kind, _ := cur.Current.Lookup("_id").StringValueOK()
		n, _ := number(cur.Current.Lookup("n"))
		counts[DeadKind(kind)] += int64(n)
	}
	return counts, cur.Err()
}

func (d *DeadLetters) selection(opts []DeadLetterOption) (set selection, below *place, err error) {
	for _, o := range opts {
		if err := o.applyDeadLetter(&set); err != nil {
			return set, nil, err
		}
	}
	if set.cursor != "" {
		p, err := placeOf(listDead, set.cursor)
		if err != nil {
			return set, nil, err
		}
		below = &p
	}
	return set, below, set.check()
}

// filter matches the dead letters of a queue that are chosen.
func (d *DeadLetters) filter(set *selection, more ...any) bson.D {
	f := bson.D{field("dead.from", d.q.name), field("dead", op("$exists", true)), field("processed", nil)}
	if set.kinds != nil {
		f = append(f, field("dead.kind", op("$in", set.kinds)))
	}
	if !set.since.IsZero() || !set.until.IsZero() {
		f = append(f, field("dead.at", set.span()))
	}
	if set.some {
		f = append(f, field("_id", op("$in", append([]bson.ObjectID{}, set.ids...))))
	}
	return append(f, where(append(set.tests(), more...))...)
}

// parts are the filters that together match what is chosen below a place, in the order of the list.
func (d *DeadLetters) parts(set *selection, below *place) []bson.D {
	part := func(kind, at, id bson.D) bson.D {
		bare := *set
		bare.kinds, bare.since, bare.until, bare.ids, bare.some = nil, time.Time{}, time.Time{}, nil, false
		if set.kinds != nil {
			kind = append(kind, field("$in", set.kinds))
		}
		if set.some {
			id = append(slices.Clone(id), field("$in", append([]bson.ObjectID{}, set.ids...)))
		}
		return append(d.filter(&bare), field("dead.kind", kind), field("dead.at", at), field("_id", id))
	}
	anyID, span := op("$type", "objectId"), set.span()
	if below == nil {
		return []bson.D{part(op("$type", "string"), span, anyID)}
	}
	return []bson.D{
		part(op("$eq", below.kind), append(slices.Clone(span), field("$eq", below.at)), append(slices.Clone(anyID), field("$lt", below.id))),
		part(op("$eq", below.kind), set.spanBelow(below.at), anyID),
		part(append(op("$type", "string"), field("$gt", below.kind)), span, anyID),
	}
}

func (d *DeadLetters) hint(set *selection) any {
	if set.some {
		return byID
	}
	return d.q.s.dead
}

// read reads the parts one after the other; n is how many are wanted, 0 all.
func (d *DeadLetters) read(ctx context.Context, set *selection, parts []bson.D, n int) iter.Seq2[*Envelope, error] {
	return d.q.s.listParts(ctx, d.q.s.envs, parts, n, func() *options.FindOptionsBuilder {
		return options.Find().SetHint(d.hint(set)).SetSort(deadIndex.keys)
	})
}

// Redrive puts dead letters back into the queue they came from, or To another, due at once, with no retries and no
// deadline, and says how many. All of them, or those that the options choose. One that somebody holds a lease of stays, and
// so does what died after it began. Rewrite, Payload, Headers and AddHeaders mend them on the way, Rate bounds how many
// go a second.
//
// Each envelope goes in one guarded write: what is done is done. When it fails it has put back as many as it says, or more
// if the error is ErrOutcomeUnknown. Repeated, after an error or a kill or by two at once, it puts back those that are
// still dead, each once; give Until to leave alone what died again meanwhile. It never joins a transaction.
//
// Options: Since, Until (of the death), IDs, Kinds, Header, Limit, To, Rewrite, Payload, Headers, AddHeaders, Rate,
// OnProgress.
func (d *DeadLetters) Redrive(ctx context.Context, opts ...RedriveOption) (int64, error) {
	var set redriveSettings
	for _, o := range opts {
		if err := o.applyRedrive(&set); err != nil {
			return 0, err
		}
	}
	if err := set.checkRedrive(d); err != nil {
		return 0, err
	}
	s, to := d.q.s, d.q.name
	filter := d.filter(&set.selection, idle())
	if set.to != nil { // one that is there already waits there as a dead letter: it would change under a claimer's eyes
		to = set.to.name
		filter = append(filter, field("q", op("$ne", to)))
	}
	sw := d.sweep(&set, filter)
	sw.run = func(ctx context.Context, batch bson.D) (n int64, err error) {
		began := time.Now()
		if set.rewrite != nil {
			n, err = d.rewriting(ctx, batch, set)
		} else {
			var res *mongo.UpdateResult
			if res, err = s.envs.UpdateMany(ctx, batch, redriveUpdate(bson.NewObjectID(), set)); err == nil {
				n = res.ModifiedCount
			}
		}
		s.ring(to, 0, time.Since(began))
		return n, err
	}
	return sw.over(ctx, s)
}

// rewriting redrives a batch of which each envelope gets a payload of its own, made of the one that was read.
func (d *DeadLetters) rewriting(ctx context.Context, batch bson.D, set redriveSettings) (int64, error) {
	token := bson.NewObjectID()
	var models []mongo.WriteModel
	var failed error
	for e, err := range d.q.s.list(ctx, d.q.s.envs, batch, options.Find()) {
		if err != nil {
			return 0, err
		}
		payload, err := set.rewrite(e)
		if err == nil {
			var v bson.RawValue
			if v, err = encode("the payload of Rewrite", payload); err == nil && len(v.Value) > MaxEnvelopeSize {
				err = tooLargeError(len(v.Value))
			}
			set.patch.payload = &v
		}
		if err != nil {
			failed = fmt.Errorf("mongoq: cannot redrive %s: %w", e.ID.Hex(), err)
			break
		}
		// Who claimed it since may have replaced the payload.
		var deliveries any
		if e.Deliveries > 0 {
			deliveries = e.Deliveries
		}
		guard := append(slices.Clone(batch), field("deliveries", op("$in", bson.A{deliveries, e.Deliveries})))
		guard[0] = field("_id", e.ID)
		models = append(models, mongo.NewUpdateOneModel().SetFilter(guard).SetUpdate(redriveUpdate(token, set)))
	}
	if len(models) == 0 {
		return 0, failed
	}
	res, err := d.q.s.envs.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	n := int64(0)
	if res != nil {
		n = res.ModifiedCount
	}
	if err != nil {
		return n, err
	}
	return n, failed
}

// checkRedrive looks at what no option can see by itself.
func (set *redriveSettings) checkRedrive(d *DeadLetters) error {
	switch {
	case set.to != nil && set.to.s != d.q.s:
		return invalid("To must be a queue of the same store, got %q of another", set.to.name)
	case set.rewrite != nil && set.patch.payload != nil:
		return invalid("Rewrite and Payload exclude each other")
	case set.patch.payload != nil && len(set.patch.payload.Value) > MaxEnvelopeSize:
		return tooLargeError(len(set.patch.payload.Value))
	}
	return set.check()
}

// Purge deletes dead letters that nobody holds a lease of, and says how many: all of them, or those that the options
// choose. What died after it began stays. When it fails it has deleted as many as it says, or more if the error is
// ErrOutcomeUnknown; it may be repeated. Options: Since, Until (of the death), IDs, Kinds, Header, Limit, OnProgress.
func (d *DeadLetters) Purge(ctx context.Context, opts ...PurgeOption) (int64, error) {
	var set redriveSettings
	for _, o := range opts {
		if err := o.applyPurge(&set); err != nil {
			return 0, err
		}
	}
	if err := set.check(); err != nil {
		return 0, err
	}
	sw := d.sweep(&set, d.filter(&set.selection, idle()))
	sw.run = d.q.s.deleteBatch
	return sw.over(ctx, d.q.s)
}

// sweep is a sweep over dead letters.
func (d *DeadLetters) sweep(set *redriveSettings, filter bson.D) sweep {
	sw := sweep{filter: filter, since: "dead.at", hint: d.q.s.dead, limit: int64(set.limit), rate: set.rate, progress: set.progress}
	if set.some {
		sw.hint = byID
	}
	if set.rewrite != nil {
		sw.size, sw.retried = rewriteBatch, true
	}
	return sw
}

// rewriteBatch is how many envelopes are held at once to be rewritten.
const rewriteBatch = 100

// closeCursor closes a cursor though its context has ended, and does not wait long for a server that is away.
func closeCursor(ctx context.Context, cur *mongo.Cursor) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTimeout)
	defer cancel()
	_ = cur.Close(ctx)
}

// listParts reads one filter after the other; n is how many are wanted, 0 all.
func (s *Store) listParts(ctx context.Context, coll *mongo.Collection, parts []bson.D, n int, find func() *options.FindOptionsBuilder) iter.Seq2[*Envelope, error] {
	return func(yield func(*Envelope, error) bool) {
		left := n
		for _, part := range parts {
			for e, err := range s.list(ctx, coll, part, find().SetLimit(int64(left))) {
				if !yield(e, err) || err != nil {
					return
				}
				if left--; n > 0 && left == 0 {
					return
				}
			}
			if n == 0 {
				left = 0
			}
		}
	}
}

// list reads envelopes one by one.
func (s *Store) list(ctx context.Context, coll *mongo.Collection, filter bson.D, opts *options.FindOptionsBuilder) iter.Seq2[*Envelope, error] {
	return func(yield func(*Envelope, error) bool) {
		if err := s.open(); err != nil {
			yield(nil, err)
			return
		}
		cur, err := coll.Find(ctx, filter, opts)
		if err != nil {
			yield(nil, err)
			return
		}
		defer closeCursor(ctx, cur)
		for cur.Next(ctx) {
			e := read(append(bson.Raw(nil), cur.Current...)).Envelope
			if !yield(&e, nil) {
				return
			}
		}
		if err := cur.Err(); err != nil {
			yield(nil, err)
		}
	}
}

type rewriteOption func(*Envelope) (any, error)

// Rewrite gives each redriven envelope the payload that f makes of it. An error of f ends the redrive, and is wrapped:
// that envelope stays dead, and so do those that were not reached. The rule: f is not nil, and gives what can be encoded
// as BSON.
func Rewrite(f func(*Envelope) (payload any, err error)) RedriveOption { return rewriteOption(f) }

func (o rewriteOption) applyRedrive(s *redriveSettings) error {
	s.rewrite = o
	if o == nil {
		return invalid("Rewrite must be a function, got nil")
	}
	return nil
}

type rateOption float64

// Rate is how many envelopes go a second at the most, in even steps of a tenth of a second or less often; by default as
// many as the server can do. The rule: 0 < n <= 1,000,000.
func Rate(n float64) RedriveOption { return rateOption(n) }

func (o rateOption) applyRedrive(s *redriveSettings) error {
	if s.rate = float64(o); !(s.rate > 0 && s.rate <= 1e6) { // NaN, too
		return invalid("Rate must be > 0 and <= 1000000 a second, got %v", s.rate)
	}
	return nil
}

type kindsOption []DeadKind

// Kinds leaves out what died for other reasons; given more than once, all of them count. The rule: at least one.
func Kinds(kinds ...DeadKind) interface {
	DeadLetterOption
	RedriveOption
	PurgeOption
} {
	return kindsOption(kinds)
}

func (o kindsOption) apply(s *selection) error {
	if len(o) == 0 {
		return invalid("Kinds needs at least one kind, got none")
	}
	s.kinds = append(slices.Clone(s.kinds), o...)
	return nil
}

func (o kindsOption) applyDeadLetter(s *selection) error    { return o.apply(s) }
func (o kindsOption) applyRedrive(s *redriveSettings) error { return o.apply(&s.selection) }
func (o kindsOption) applyPurge(s *redriveSettings) error   { return o.apply(&s.selection) }

func (o toOption) applyRedrive(s *redriveSettings) error {
	s.to = o.q
	return o.check()
}

func (o progressOption) applyRedrive(s *redriveSettings) error {
	s.progress = o
	return o.check()
}

func (o progressOption) applyPurge(s *redriveSettings) error  { return o.applyRedrive(s) }
func (o payloadOption) applyRedrive(s *redriveSettings) error { return o.applyPatch(&s.patch) }

// Both options of headers may be given: what is added is added to what replaces.
func (o headersOption) applyRedrive(s *redriveSettings) error {
	if o.merge && s.patch.set {
		m := maps.Clone(s.patch.headers)
		if m == nil {
			m = map[string]string{}
		}
		maps.Copy(m, o.m)
		s.patch.headers = m
		return o.check()
	}
	return o.applyPatch(&s.patch)
}
