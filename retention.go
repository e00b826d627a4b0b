package mongoq

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// RetentionOption is an option of History.SetRetention.
type RetentionOption interface {
	applyRetention(*retentionSettings) error
}

type retentionSettings struct {
	selection
	spread   *time.Duration
	progress func(Progress)
}

// SetRetention changes for how long what is in the history stays, counted from its commit, and says of how many: of all
// that was committed before the call, or of what the options choose. What is past its new end is forgotten at the server's
// next pass. What is committed from now on follows the Retention of the handle that commits it: give the queue's handles
// the new one first.
//
// It works in batches. In a history in partitions it puts what it changes into others; lists that are read meanwhile may
// miss what is on its way. When it fails it has changed as many as it says, or more if the error is ErrOutcomeUnknown; it may
// be repeated: done twice is done. Options: Since, Until, IDs, Header, WithOutcome, Limit, Spread, OnProgress.
// The rule: d is KeepForever or >= 1 ms.
func (h *History) SetRetention(ctx context.Context, d time.Duration, opts ...RetentionOption) (int64, error) {
	if d != KeepForever && d < time.Millisecond {
		return 0, invalid("SetRetention needs KeepForever or >= 1ms, got %v", d)
	}
	var set retentionSettings
	for _, o := range opts {
		if err := o.applyRetention(&set); err != nil {
			return 0, err
		}
	}
	if err := set.check(); err != nil {
		return 0, err
	}
	keep := retention{time: d}
	switch {
	case set.spread != nil:
		keep.spread = *set.spread
	case h.q != nil:
		keep.spread = h.q.cfg.RetentionSpread
	}
	if err := h.s.open(); err != nil {
		return 0, err
	}
	ctx = outside(ctx)
	names := map[string]bool{}
	if h.q != nil {
		names[h.q.name] = true
	} else if err := h.s.finishedNames(ctx, names); err != nil {
		return 0, err
	}
	var total int64
	for _, name := range sortedKeys(names) {
		query := historyQuery{selection: set.selection, q: name}
		if set.limit > 0 {
			if query.limit = set.limit - int(total); query.limit <= 0 {
				break
			}
		}
		done := func(n int64) {
			if set.progress != nil {
				set.progress(Progress{Done: total + n})
			}
		}
		n, err := h.s.retainFinished(ctx, query, keep, done)
		total += n
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// retainFinished changes the retention of a queue's finished envelopes, the latest first in each collection.
func (s *Store) retainFinished(ctx context.Context, query historyQuery, keep retention, done func(int64)) (total int64, err error) {
	if s.partitioning != PartitionNone {
		keep.spread = 0
		err = s.fileAll(ctx, query)
	} else {
		total, err = s.retainIn(ctx, s.among(), query, done, func(ids []bson.ObjectID) (int64, error) {
			return s.retain(ctx, s.envs, ids, keep)
		})
	}
	if err != nil {
		return total, err
	}
	ps, err := s.partitions(ctx)
	if err != nil {
		return total, err
	}
	ps = slices.DeleteFunc(ps, func(p partition) bool { return !query.reaches(p) })
	whole := retention{time: keep.time} // partitions are forgotten whole
	stays := func(p partition) int {
		if p.name == s.keeping(p, keep.time).name {
			return 1
		}
		return 0
	}
	// Those that stay in their partition come first: what is put to them later has been counted.
	slices.SortStableFunc(ps, func(a, b partition) int {
		return cmp.Or(b.to.Compare(a.to), b.from.Compare(a.from), stays(b)-stays(a))
	})
	limit := int64(query.limit)
	for _, p := range ps {
		if limit > 0 {
			if query.limit = int(limit - total); query.limit <= 0 {
				break
			}
		}
		change := func(ids []bson.ObjectID) (int64, error) { return s.retain(ctx, s.collectionOf(p, false), ids, whole) }
		if stays(p) == 0 {
			change = func(ids []bson.ObjectID) (int64, error) { return s.refile(ctx, p, ids, keep.time) }
		}
		n, err := s.retainIn(ctx, s.shelfOf(p), query, func(n int64) { done(total + n) }, change)
		total += n
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// retainIn does so in one collection.
func (s *Store) retainIn(ctx context.Context, sh shelf, query historyQuery, done func(int64), change func([]bson.ObjectID) (int64, error)) (total int64, err error) {
	for ids, err := range s.batches(ctx, sh, query, query.limit) {
		if err != nil {
			return total, err
		}
		n, err := change(ids)
		total += n
		if mayHaveHappened(err) {
			return total, unknown(err)
		}
		if err != nil {
			return total, err
		}
		done(total)
	}
	return total, nil
}

// retain changes it where they are.
func (s *Store) retain(ctx context.Context, coll *mongo.Collection, ids []bson.ObjectID, keep retention) (int64, error) {
	res, err := coll.UpdateMany(ctx, finishedFilter(ids), retentionUpdate(keep))
	if err != nil {
		return 0, err
	}
	return res.MatchedCount, nil
}

type spreadOption time.Duration

// Spread is the most that is added to the retention of each envelope, at random. Defaults to the queue's
// RetentionSpread; for the history of a store, to 0. The rule: 0, or >= 1 ms.
func Spread(d time.Duration) RetentionOption { return spreadOption(d) }

func (o spreadOption) applyRetention(s *retentionSettings) error {
	d := time.Duration(o)
	s.spread = &d
	if d != 0 && d < time.Millisecond {
		return invalid("Spread must be 0 (none) or >= 1ms, got %v", d)
	}
	return nil
}

func (o progressOption) applyRetention(s *retentionSettings) error {
	s.progress = o
	return o.check()
}
