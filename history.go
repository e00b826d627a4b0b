package mongoq

import (
	"bytes"
	"context"
	"iter"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
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
	return limited(h.s.finished(ctx, query, query.limit), query.limit)
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
	return pageOf(limited(h.s.finished(ctx, query, n+1), n+1), n, func(e *Envelope) string {
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

// finished reads finished envelopes, the latest first, those of one instant by id; n is how many are wanted, 0 all.
func (s *Store) finished(ctx context.Context, query historyQuery, n int) iter.Seq2[*Envelope, error] {
	if query.q != "" || query.some {
		return s.finishedOf(ctx, query, nil, n)
	}
	// The index goes by queue: each is read from its latest on, and the server puts them in order.
	return func(yield func(*Envelope, error) bool) {
		if err := s.open(); err != nil {
			yield(nil, err)
			return
		}
		names := map[string]bool{}
		if err := s.walkNames(ctx, names, historyIndex, s.history, field("processed", op("$type", "date"))); err != nil {
			yield(nil, err)
			return
		}
		var lists []iter.Seq2[*Envelope, error]
		for some := range slices.Chunk(sortedKeys(names), mergedQueues) {
			lists = append(lists, s.finishedOf(ctx, query, some, n))
		}
		merged(lists, latestFirst)(yield)
	}
}

// latestFirst orders a history.
func latestFirst(a, b *Envelope) bool {
	if order := a.Processed.Compare(b.Processed); order != 0 {
		return order > 0
	}
	return bytes.Compare(a.ID[:], b.ID[:]) > 0
}

// finishedOf reads those of a queue, or of several. Below a place it first reads what is left of its instant: a batch
// commits many at once.
func (s *Store) finishedOf(ctx context.Context, query historyQuery, names []string, n int) iter.Seq2[*Envelope, error] {
	return s.listParts(ctx, query.parts(names), n, func() *options.FindOptionsBuilder {
		return options.Find().SetSort(bson.D{field("processed", -1), field("_id", -1)}).SetHint(query.hint(s))
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
func (query *historyQuery) hint(s *Store) any {
	if query.some {
		return byID
	}
	return s.history
}

// countFinished counts finished envelopes.
func (s *Store) countFinished(ctx context.Context, query historyQuery) (int64, error) {
	pipeline := bson.A{op("$match", query.filter(nil, query.span(), nil))}
	if query.limit > 0 {
		pipeline = append(pipeline, op("$limit", query.limit))
	}
	cur, err := s.envs.Aggregate(ctx, append(pipeline, op("$count", "n")), options.Aggregate().SetHint(query.hint(s)))
	if err != nil {
		return 0, err
	}
	defer closeCursor(ctx, cur)
	n := 0
	if cur.Next(ctx) {
		n, _ = number(cur.Current.Lookup("n"))
	}
	return int64(n), cur.Err()
}

// queue is the queue with this name: the history's own, or, of a store's, one of which nothing else is known.
func (h *History) queue(name string) *Queue {
	if h.q != nil && h.q.name == name {
		return h.q
	}
	return &Queue{s: h.s, name: name, cfg: QueueConfig{OnExpire: h.s.policyOf(name)}}
}
