package mongoq

import (
	"bytes"
	"cmp"
	"context"
	"iter"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// mergedQueues is how many queues one statement reads side by side: the server opens as many scans, 200 at the most.
const mergedQueues = 100

// History is what has been done, as long as Retention keeps it: by one queue, or by all of a store.
type History struct {
	s *Store
	q *Queue // nil: all
}

// History gives the committed envelopes of this queue.
func (q *Queue) History() *History { return &History{s: q.s, q: q} }

// History gives the committed envelopes of all queues. To list them takes a round trip for each queue that has any.
func (s *Store) History() *History { return &History{s: s} }

// List gives the committed envelopes, the latest first. It reads while the caller goes on, and ends with an error as
// its last element if the server fails. Envelopes that are committed meanwhile may be in it or not; none is in it twice.
// Options: Since, Until, IDs, Header, WithOutcome, Limit, Cursor.
func (h *History) List(ctx context.Context, opts ...HistoryOption) iter.Seq2[*Envelope, error] {
	query, err := h.query(opts)
	if err != nil {
		return func(yield func(*Envelope, error) bool) { yield(nil, err) }
	}
	return h.s.finished(ctx, query, query.limit)
}

// Page gives the next of the committed envelopes, the latest first: 50, or as Limit says. With the Next of a page as
// Cursor it goes on where that ended: of those that were there at the first page each comes once, whatever is committed
// meanwhile. Pages go back in time, so that what is committed between them is in none.
//
// A page costs as many index keys as it has envelopes, and a few, wherever it lies in a history of any length; of all
// queues of a store, two more for each queue. IDs cost one each. Header and WithOutcome look at every envelope until
// there are enough: about a second for each million, so give them a time span.
//
// Options: Since, Until, IDs, Header, WithOutcome, Limit, Cursor.
func (h *History) Page(ctx context.Context, opts ...HistoryOption) (*Page, error) {
	query, err := h.query(opts)
	if err != nil {
		return nil, err
	}
	n, err := query.pageSize()
	if err != nil {
		return nil, err
	}
	return pageOf(h.s.finished(ctx, query, n+1), n, func(e *Envelope) string {
		return place{at: e.Processed, id: e.ID}.cursor(listHistory)
	})
}

// Count counts the committed envelopes, up to Limit if that is given. It looks at every one that it counts: about a
// second for each million. Options: Since, Until, IDs, Header, WithOutcome, Limit.
func (h *History) Count(ctx context.Context, opts ...HistoryOption) (int64, error) {
	query, err := h.query(opts)
	if err != nil {
		return 0, err
	}
	if query.below != nil {
		return 0, invalid("Count takes no Cursor")
	}
	if err := h.s.open(); err != nil {
		return 0, err
	}
	return h.s.countFinished(ctx, query)
}

// historyQuery is a question to the history, whatever the form in which that is kept.
type historyQuery struct {
	selection
	q     string // empty: all
	below *place // what follows it; nil: from the latest on
}

func (h *History) query(opts []HistoryOption) (query historyQuery, err error) {
	if h.q != nil {
		query.q = h.q.name
	}
	for _, o := range opts {
		if err := o.applyHistory(&query.selection); err != nil {
			return query, err
		}
	}
	if query.cursor != "" {
		p, err := placeOf(listHistory, query.cursor)
		if err != nil {
			return query, err
		}
		query.below = &p
	}
	return query, query.check()
}

// shelf is a collection that holds a part of the history, and the index by which that is read.
type shelf struct {
	coll  *mongo.Collection
	index any
}

// among is where the history is that has no partition.
func (s *Store) among() shelf { return shelf{s.envs, s.history} }

func (s *Store) shelfOf(p partition) shelf {
	// Without a hint: should an operator have made it anew without its indexes, it is read all the same.
	return shelf{s.collectionOf(p, false), nil}
}

// finished reads finished envelopes, the latest first, those of one instant by id; n is how many are wanted, 0 all.
func (s *Store) finished(ctx context.Context, query historyQuery, n int) iter.Seq2[*Envelope, error] {
	return func(yield func(*Envelope, error) bool) {
		if !s.partitioned.Load() {
			s.finishedIn(ctx, s.among(), query, n)(yield)
			return
		}
		for left := n; n == 0 || left > 0; {
			size := acrossBatch
			if n > 0 {
				size = min(size, left)
			}
			batch, err := s.finishedAcross(ctx, query, size)
			for _, e := range batch {
				if !yield(e, nil) {
					return
				}
				query.below = &place{at: e.Processed, id: e.ID}
			}
			if err != nil {
				yield(nil, err)
			}
			if err != nil || len(batch) < size {
				return
			}
			left -= len(batch)
		}
	}
}

// acrossBatch is how many envelopes are read at once of a history in several collections.
const acrossBatch = 100

// finishedAcross reads the first n of a history in partitions. What is among the queues is read first, and whole: what is
// put into its partition meanwhile has either been seen, or is found there.
func (s *Store) finishedAcross(ctx context.Context, query historyQuery, n int) ([]*Envelope, error) {
	all, err := collected(s.finishedIn(ctx, s.among(), query, n))
	if err != nil {
		return nil, err
	}
	ps, err := s.partitions(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range ps {
		if !query.reaches(p) {
			continue
		}
		later := 0 // than anything in this partition, and in those that follow
		for later < len(all) && !all[later].Processed.Before(p.to) {
			later++
		}
		if later >= n {
			break
		}
		more, err := collected(s.finishedIn(ctx, s.shelfOf(p), query, n-later))
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
		slices.SortFunc(all, func(a, b *Envelope) int { return -inHistory(a, b) })
		all = slices.CompactFunc(all, func(a, b *Envelope) bool { return inHistory(a, b) == 0 }) // on its way
		all = all[:min(n, len(all))]
	}
	return all, nil
}

func collected(list iter.Seq2[*Envelope, error]) (all []*Envelope, err error) {
	for e, err := range list {
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

// reaches tells whether a partition can hold what is asked for.
func (query *historyQuery) reaches(p partition) bool {
	return (query.since.IsZero() || p.to.After(query.since)) && (query.until.IsZero() || p.from.Before(query.until)) &&
		(query.below == nil || !p.from.After(query.below.at))
}

// finishedIn reads those of one collection.
func (s *Store) finishedIn(ctx context.Context, sh shelf, query historyQuery, n int) iter.Seq2[*Envelope, error] {
	if query.q != "" || query.some {
		return limited(s.finishedOf(ctx, sh, query, nil, n), n)
	}
	// The index goes by queue: each is read from its latest on, and the server puts them in order.
	return func(yield func(*Envelope, error) bool) {
		if err := s.open(); err != nil {
			yield(nil, err)
			return
		}
		names := map[string]bool{}
		if err := s.walkNames(ctx, names, sh.coll, historyIndex, sh.index, field("processed", op("$type", "date"))); err != nil {
			yield(nil, err)
			return
		}
		var lists []iter.Seq2[*Envelope, error]
		for some := range slices.Chunk(sortedKeys(names), mergedQueues) {
			lists = append(lists, s.finishedOf(ctx, sh, query, some, n))
		}
		limited(merged(lists, latestFirst), n)(yield)
	}
}

// finishedNames adds the names of the queues that have a history.
func (s *Store) finishedNames(ctx context.Context, names map[string]bool) error {
	if err := s.walkNames(ctx, names, s.envs, historyIndex, s.history, field("processed", op("$type", "date"))); err != nil {
		return err
	}
	ps, err := s.partitions(ctx)
	if err != nil {
		return err
	}
	stages := bson.A{op("$match", bson.D{field("q", op("$gt", ""))}), op("$group", bson.D{field("_id", "$q")})}
	for raw, err := range s.across(ctx, ps, false, stages) {
		if err != nil {
			return err
		}
		if name, ok := raw.Lookup("_id").StringValueOK(); ok {
			names[name] = true
		}
	}
	return nil
}

// latestFirst orders a history.
func latestFirst(a, b *Envelope) bool { return inHistory(a, b) > 0 }

// inHistory compares by time, those of one instant by id.
func inHistory(a, b *Envelope) int {
	return cmp.Or(a.Processed.Compare(b.Processed), bytes.Compare(a.ID[:], b.ID[:]))
}

// finishedOf reads those of a queue, or of several. Below a place it first reads what is left of its instant: a batch
// commits many at once.
func (s *Store) finishedOf(ctx context.Context, sh shelf, query historyQuery, names []string, n int) iter.Seq2[*Envelope, error] {
	return s.listParts(ctx, sh.coll, query.parts(names), n, func() *options.FindOptionsBuilder {
		return options.Find().SetSort(bson.D{field("processed", -1), field("_id", -1)}).SetHint(query.hint(sh))
	})
}

// parts are the filters that together match what is asked for, in the list's order.
func (query *historyQuery) parts(names []string) []bson.D {
	if query.below == nil {
		return []bson.D{query.filter(names, query.span(), nil)}
	}
	rest := query.filter(names, query.spanBelow(query.below.at), nil)
	at := query.below.at
	if !query.since.IsZero() && at.Before(query.since) || !query.until.IsZero() && !at.Before(query.until) {
		return []bson.D{rest}
	}
	// A range, though of one instant: by a point the server would read several queues one after the other, and sort.
	instant := append(op("$type", "date"), field("$gte", at), field("$lt", at.Add(time.Millisecond)))
	return []bson.D{query.filter(names, instant, &query.below.id), rest}
}

// filter matches finished envelopes whose time is as said, and whose ids are below one, if given.
func (query *historyQuery) filter(names []string, span bson.D, below *bson.ObjectID) bson.D {
	var f bson.D
	switch {
	case query.q != "":
		f = append(f, field("q", query.q))
	case names != nil:
		f = append(f, field("q", op("$in", names)))
	case !query.some: // every name; without a bound on the first key the index has no use for one on the second
		f = append(f, field("q", op("$gt", "")))
	}
	f = append(f, field("processed", span))
	ids := op("$type", "objectId") // only by hand can it be anything else, and places are told by these
	if below != nil {
		ids = append(ids, field("$lt", *below))
	}
	if query.some {
		ids = append(ids, field("$in", append([]bson.ObjectID{}, query.ids...)))
	}
	return append(append(f, field("_id", ids)), where(query.tests())...)
}

// hint is the index that a question is answered by.
func (query *historyQuery) hint(sh shelf) any {
	if query.some {
		return byID
	}
	return sh.index
}

// countFinished counts finished envelopes: on a replica set as of one moment.
func (s *Store) countFinished(ctx context.Context, query historyQuery) (int64, error) {
	ps, err := s.partitions(ctx)
	if err != nil {
		return 0, err
	}
	ps = slices.DeleteFunc(ps, func(p partition) bool { return !query.reaches(p) })
	match := op("$match", query.filter(nil, query.span(), nil))
	pipeline := bson.A{match}
	for _, union := range united(ps, bson.A{match}) {
		pipeline = append(pipeline, union)
	}
	twice := len(ps) > 0 && !s.transactions // some may be
	if query.limit > 0 && !twice {
		pipeline = append(pipeline, op("$limit", query.limit))
	}
	from := s.envs
	if len(ps) > 0 && s.transactions {
		from = s.snapshot
	}
	cur, err := from.Aggregate(ctx, append(pipeline, op("$count", "n")), options.Aggregate().SetHint(query.hint(s.among())))
	if err != nil {
		return 0, err
	}
	defer closeCursor(ctx, cur)
	n := 0
	if cur.Next(ctx) {
		n, _ = number(cur.Current.Lookup("n"))
	}
	if err := cur.Err(); err != nil || !twice {
		return int64(n), err
	}
	limit := int64(query.limit)
	query.limit = 0
	again, err := s.countTwice(ctx, query)
	if n := int64(n) - again; limit == 0 || n < limit {
		return n, err
	}
	return limit, err
}

// countTwice counts what is in its partition and among the queues: on its way, on a server without transactions.
func (s *Store) countTwice(ctx context.Context, query historyQuery) (twice int64, err error) {
	for ids, err := range s.batches(ctx, s.among(), query, 0) {
		if err != nil {
			return 0, err
		}
		filed, err := s.filed(ctx, ids, bson.D{field("_id", 1)}, false)
		if err != nil {
			return 0, err
		}
		twice += int64(len(filed))
	}
	return twice, nil
}

// batches reads the ids of what is asked for in one collection, the latest first; n is how many are wanted, 0 all. What it
// has given may change, or go.
func (s *Store) batches(ctx context.Context, sh shelf, query historyQuery, n int) iter.Seq2[[]bson.ObjectID, error] {
	return func(yield func([]bson.ObjectID, error) bool) {
		for left := n; n == 0 || left > 0; {
			size := sweepBatch
			if n > 0 {
				size = min(size, left)
			}
			list := s.listParts(ctx, sh.coll, query.parts(nil), size, func() *options.FindOptionsBuilder {
				return options.Find().SetSort(bson.D{field("processed", -1), field("_id", -1)}).SetHint(query.hint(sh)).
					SetProjection(bson.D{field("processed", 1)}).SetBatchSize(sweepBatch + 1)
			})
			var ids []bson.ObjectID
			for e, err := range list {
				if err != nil {
					yield(nil, err)
					return
				}
				ids = append(ids, e.ID)
				query.below = &place{at: e.Processed, id: e.ID}
			}
			if len(ids) == 0 || !yield(ids, nil) {
				return
			}
			left -= len(ids)
		}
	}
}

// queue is the queue with this name: the history's own, or, of a store's, one of which nothing else is known.
func (h *History) queue(name string) *Queue {
	if h.q != nil && h.q.name == name {
		return h.q
	}
	return &Queue{s: h.s, name: name, cfg: QueueConfig{OnExpire: h.s.policyOf(name)}}
}
