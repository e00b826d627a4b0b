package mongoq

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// One process at a time keeps a store's history: it drops the partitions that are over, puts what a killed process left
// among the queues into its partition, and watches how far the server's forgetting has come. It holds a lease in
// <Collection>.queues; the others ask for that once a minute.
//
// What is dropped is told by a partition's name and the server's clock alone. A process that was paused in the middle, and
// has lost the lease, drops nothing that another would not.

const (
	// keepEvery is how often a process asks for the lease, and keeps the history; keeperLease for how long it holds.
	keepEvery   = time.Minute
	keeperLease = 3 * keepEvery
	// dropAfter is for how long a partition stays that is over: should a new primary's clock be ahead, or a transaction
	// be late that began in time.
	dropAfter = 10 * time.Minute
	// fileAfter is how long ago something was finished that the keeper files: until then its own process does.
	fileAfter = 10 * time.Second
	// countOddEvery is how often what can never be forgotten is counted, which reads the whole history; countOddFor how
	// long that may take.
	countOddEvery = time.Hour
	countOddFor   = 20 * time.Second
)

// keeperID is the lease's. Those beside it, of queues, are strings.
var keeperID = bson.D{field("store", "keeper")}

// keeperState is what the keeper has stored.
type keeperState struct {
	Since     time.Time `bson:"since"`     // partitions are made since
	Dropped   int64     `bson:"dropped"`   // partitions
	Forgotten int64     `bson:"forgotten"` // envelopes in them
}

// keep keeps the history while the lease can be had, until the store closes.
func (s *Store) keep() {
	defer s.wg.Done()
	me := bson.NewObjectID()
	watch := watch{s: s}
	for wait := keepEvery/2 + rand.N(keepEvery/2); sleep(s.life, wait) == nil; wait = keepEvery {
		ctx, cancel := context.WithTimeout(s.life, keeperLease)
		err := s.keepOnce(ctx, me, &watch)
		cancel()
		if err != nil && s.life.Err() == nil {
			s.log.Debug("mongoq: the history was not kept; it is tried again in a minute", "error", err)
		}
	}
}

func (s *Store) keepOnce(ctx context.Context, me bson.ObjectID, watch *watch) error {
	ps, err := s.listPartitions(ctx) // another process may make them
	if err != nil {
		return err
	}
	state, err := s.holdKeeping(ctx, me)
	if err != nil || state == nil {
		return err
	}
	hello, err := s.clock.hello(ctx)
	if err != nil {
		return err
	}
	err = errors.Join(s.dropOver(ctx, ps, hello.localTime), s.fileLeft(ctx, state.Since, hello.localTime))
	return errors.Join(err, watch.look(ctx))
}

// holdKeeping takes the lease, or renews it; nil: another process has it.
func (s *Store) holdKeeping(ctx context.Context, me bson.ObjectID) (*keeperState, error) {
	fields := bson.D{field("by", me), field("until", later(keeperLease))}
	if s.partitioning != PartitionNone {
		fields = append(fields, field("since", op("$ifNull", bson.A{"$since", now})))
	}
	free := op("$or", bson.A{op("$lte", bson.A{"$until", now}), op("$eq", bson.A{"$by", me})})
	take := func() (*keeperState, error) {
		var state keeperState
		err := s.queues.FindOneAndUpdate(ctx, bson.D{field("_id", keeperID), field("$expr", free)}, set(fields...),
			options.FindOneAndUpdate().SetReturnDocument(options.After)).Decode(&state)
		return &state, err
	}
	state, err := take()
	if !errors.Is(err, mongo.ErrNoDocuments) {
		return state, err
	}
	_, err = s.queues.InsertOne(ctx, bson.D{field("_id", keeperID), field("until", time.Time{}.UTC())})
	switch {
	case mongo.IsDuplicateKeyError(err): // another process holds it
		return nil, nil
	case err != nil:
		return nil, err
	}
	if state, err = take(); errors.Is(err, mongo.ErrNoDocuments) {
		return nil, nil
	}
	return state, err
}

// dropOver drops the partitions that nothing has to be kept of any longer.
func (s *Store) dropOver(ctx context.Context, ps []partition, at time.Time) error {
	for _, p := range ps {
		if !p.over(at) {
			continue
		}
		coll := s.collectionOf(p, false)
		n, err := coll.EstimatedDocumentCount(ctx)
		if err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.known, p.name)
		s.mu.Unlock()
		if err := coll.Drop(ctx); err != nil {
			return err
		}
		s.log.Info("mongoq: a partition of the history is over, and was dropped", "partition", p.name, "envelopes", n)
		_, err = s.queues.UpdateOne(ctx, bson.D{field("_id", keeperID)}, op("$inc", bson.D{field("dropped", 1), field("forgotten", n)}))
		if err != nil {
			return err
		}
	}
	return nil
}

// over is true of a partition that may be dropped.
func (p partition) over(at time.Time) bool {
	return !p.until.IsZero() && !at.Before(p.until.Add(dropAfter))
}

// fileLeft files what was finished among the queues since there are partitions. What was before stays there, under the TTL
// index.
func (s *Store) fileLeft(ctx context.Context, since, at time.Time) error {
	if s.partitioning == PartitionNone {
		return nil
	}
	names := map[string]bool{}
	if err := s.walkNames(ctx, names, s.envs, historyIndex, s.history, field("processed", op("$type", "date"))); err != nil {
		return err
	}
	for name := range names {
		query := historyQuery{q: name, selection: selection{since: since, until: at.Add(-fileAfter)}}
		if !query.until.After(since) {
			return nil
		}
		if err := s.fileAll(ctx, query); err != nil {
			return err
		}
	}
	return nil
}
