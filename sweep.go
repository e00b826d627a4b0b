package mongoq

import (
	"context"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// sweepBatch is how many envelopes one statement of a sweep is about.
const sweepBatch = 1000

// sweep runs a statement over everything that matches a filter, in batches by id, each of which matches again. It ends
// when a batch finds nothing to change. What came to match after it began, by the time in the field since, is left alone:
// it would chase those who are faster.
type sweep struct {
	filter   bson.D
	since    string
	hint     any
	size     int     // of a batch; 0: sweepBatch
	limit    int64   // in all; 0: none
	rate     float64 // a second; 0: none
	progress func(Progress)
	retried  bool                                                   // the driver may send what run sends again by itself, and tell of that only
	run      func(ctx context.Context, batch bson.D) (int64, error) // the batch's first field is its ids
}

func (sw sweep) over(ctx context.Context, s *Store) (total int64, err error) {
	if err := s.open(); err != nil {
		return 0, err
	}
	ctx = outside(ctx)
	state, err := s.clock.hello(ctx)
	if err != nil {
		return 0, err
	}
	filter := append(slices.Clone(sw.filter), field("$and", bson.A{
		bson.D{field(sw.since, op("$not", op("$gt", state.localTime)))},
	}))
	began := time.Now()
	for {
		n := int64(sweepBatch)
		if sw.limit > 0 {
			n = min(n, sw.limit-total)
		}
		if n == 0 {
			return total, nil
		}
		cur, err := s.envs.Find(ctx, filter, options.Find().SetProjection(bson.D{field("_id", 1)}).SetLimit(n).SetHint(sw.hint))
		if err != nil {
			return total, err
		}
		found, err := ids(ctx, cur)
		if err != nil || len(found) == 0 {
			return total, err
		}
		before := total
		for batch := range slices.Chunk(found, sw.step()) {
			if err := sw.pace(ctx, began, total); err != nil {
				return total, err
			}
			n, err := sw.run(ctx, append(bson.D{field("_id", op("$in", batch))}, withoutID(filter)...))
			total += n
			if sw.progress != nil && n > 0 {
				sw.progress(Progress{Done: total})
			}
			if mayHaveHappened(err) || sw.retried && worthRetrying(err) {
				return total, unknown(err)
			}
			if err != nil {
				return total, err
			}
		}
		if total == before {
			return total, nil
		}
	}
}

// step is how many go in one statement.
func (sw sweep) step() int {
	size := sweepBatch
	if sw.size > 0 {
		size = sw.size
	}
	if sw.rate > 0 {
		size = min(size, max(int(sw.rate/10), 1))
	}
	return size
}

// pace waits until so many may have gone.
func (sw sweep) pace(ctx context.Context, began time.Time, total int64) error {
	if sw.rate == 0 {
		return nil
	}
	due := time.Duration(float64(total) / sw.rate * float64(time.Second))
	return sleep(ctx, max(due-time.Since(began), 0))
}

// withoutID is a filter without the ids that it names: a batch names its own, which are of them.
func withoutID(filter bson.D) bson.D {
	return slices.DeleteFunc(slices.Clone(filter), func(e bson.E) bool { return e.Key == "_id" })
}

// deleteBatch is the statement of a purge.
func (s *Store) deleteBatch(ctx context.Context, batch bson.D) (int64, error) {
	res, err := s.envs.DeleteMany(ctx, batch)
	if err != nil {
		return 0, err
	}
	return res.DeletedCount, nil
}
