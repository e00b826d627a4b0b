package mongoq

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
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
// It works in batches. When it fails it has changed as many as it says, or more if the error is ErrOutcomeUnknown; it may
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
	} else if err := h.s.walkNames(ctx, names, historyIndex, h.s.history, field("processed", op("$type", "date"))); err != nil {
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

// retainFinished changes the retention of a queue's finished envelopes, the latest first.
func (s *Store) retainFinished(ctx context.Context, query historyQuery, keep retention, done func(int64)) (total int64, err error) {
	left := query.limit
	for {
		n := sweepBatch
		if query.limit > 0 {
			n = min(n, left)
		}
		batch, err := s.idsBelow(ctx, &query, n)
		if err != nil || len(batch) == 0 {
			return total, err
		}
		res, err := s.envs.UpdateMany(ctx, retentionFilter(batch), retentionUpdate(keep))
		if mayHaveHappened(err) {
			return total, unknown(err)
		}
		if err != nil {
			return total, err
		}
		total += res.MatchedCount
		done(total)
		if left -= len(batch); query.limit > 0 && left == 0 {
			return total, nil
		}
	}
}

// idsBelow gives the ids of the next of a query, and moves its place below them.
func (s *Store) idsBelow(ctx context.Context, query *historyQuery, n int) (batch []bson.RawValue, err error) {
	list := s.listParts(ctx, query.parts(nil), n, func() *options.FindOptionsBuilder {
		return options.Find().SetSort(bson.D{field("processed", -1), field("_id", -1)}).SetHint(query.hint(s)).
			SetProjection(bson.D{field("processed", 1)})
	})
	var last *Envelope
	for e, err := range list {
		if err != nil {
			return nil, err
		}
		batch = append(batch, bson.RawValue{Type: bson.TypeObjectID, Value: e.ID[:]})
		last = e
	}
	if last != nil {
		query.below = &place{at: last.Processed, id: last.ID}
	}
	return batch, nil
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
