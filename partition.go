package mongoq

import (
	"cmp"
	"context"
	"iter"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
)

// Partitioning says which finished envelopes share a collection.
type Partitioning string

// The forms of a history.
const (
	PartitionNone   Partitioning = ""     // all that of the queues, each forgotten for itself by the server's TTL index
	PartitionByHour Partitioning = "hour" // one for each hour, which is dropped whole
	PartitionByDay  Partitioning = "day"  // one for each day
)

func (p Partitioning) check() error {
	switch p {
	case PartitionNone, PartitionByHour, PartitionByDay:
		return nil
	}
	return invalid("PartitionHistory must be PartitionNone, PartitionByHour or PartitionByDay, got %q", string(p))
}

func (p Partitioning) length() time.Duration {
	if p == PartitionByDay {
		return 24 * time.Hour
	}
	return time.Hour
}

// partition is a collection of what was committed in one span of time and may be forgotten at one time. Its name says
// both: mongoq.history.20260131T14.20260207T15, by UTC; of a day, and of what is kept forever,
// mongoq.history.20260131.forever. So nobody has to agree on when it is over, and nobody can change that.
type partition struct {
	name     string
	from, to time.Time // committed since, and before
	until    time.Time // nothing in it has to be kept any longer; zero: never
}

// unitedPartitions is how many partitions one statement reads.
const unitedPartitions = 100

const (
	hourFormat = "20060102T15"
	dayFormat  = "20060102"
	forever    = "forever"
)

// partitionOf is where an envelope goes that was committed at a time, to be kept for so long.
func (s *Store) partitionOf(committed time.Time, keep time.Duration) partition {
	from := committed.UTC().Truncate(s.partitioning.length())
	return s.keeping(partition{from: from, to: from.Add(s.partitioning.length())}, keep)
}

// keeping is the partition for the same span that keeps all that it holds for so long.
func (s *Store) keeping(p partition, keep time.Duration) partition {
	format, last := hourFormat, forever
	if p.to.Sub(p.from) == PartitionByDay.length() {
		format = dayFormat
	}
	p.until = time.Time{}
	if keep != KeepForever {
		p.until = p.to.Add(keep)
		if whole := p.until.Truncate(time.Hour); whole.Before(p.until) {
			p.until = whole.Add(time.Hour)
		}
		last = p.until.Format(hourFormat)
	}
	p.name = s.partitionPrefix() + p.from.Format(format) + "." + last
	return p
}

func (s *Store) partitionPrefix() string { return s.envs.Name() + ".history." }

// readPartition reads a partition's name; false: it is none.
func (s *Store) readPartition(name string) (partition, bool) {
	from, until, ok := strings.Cut(strings.TrimPrefix(name, s.partitionPrefix()), ".")
	if !ok || !strings.HasPrefix(name, s.partitionPrefix()) {
		return partition{}, false
	}
	p := partition{name: name}
	form, format := PartitionByHour, hourFormat
	if len(from) == len(dayFormat) {
		form, format = PartitionByDay, dayFormat
	}
	var err error
	if p.from, err = time.Parse(format, from); err != nil {
		return partition{}, false
	}
	p.to = p.from.Add(form.length())
	if until != forever {
		if p.until, err = time.Parse(hourFormat, until); err != nil {
			return partition{}, false
		}
	}
	return p, true
}

// partitions lists the history's partitions, the latest first. A store that has none, and makes none, does not ask the
// server.
func (s *Store) partitions(ctx context.Context) ([]partition, error) {
	if !s.partitioned.Load() {
		return nil, nil
	}
	return s.listPartitions(ctx)
}

func (s *Store) listPartitions(ctx context.Context) ([]partition, error) {
	names, err := s.db.ListCollectionNames(outside(ctx),
		bson.D{field("name", bson.Regex{Pattern: "^" + regexp.QuoteMeta(s.partitionPrefix())})},
		options.ListCollections().SetAuthorizedCollections(true))
	if err != nil {
		return nil, err
	}
	var all []partition
	for _, name := range names {
		if p, ok := s.readPartition(name); ok {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b partition) int {
		return cmp.Or(b.to.Compare(a.to), b.from.Compare(a.from), cmp.Compare(b.name, a.name))
	})
	if len(all) > 0 {
		s.partitioned.Store(true)
	}
	return all, nil
}

// The indexes of a partition: it holds nothing but what is finished.
var partitionIndexes = []index{
	{name: historyIndex.name, keys: historyIndex.keys},
	partsIndex,
}

// ensurePartition makes a partition with its indexes, unless it stands.
func (s *Store) ensurePartition(ctx context.Context, p partition) error {
	specs := bson.A{}
	for _, ix := range partitionIndexes {
		specs = append(specs, ix.spec())
	}
	ctx, cancel := context.WithTimeout(outside(ctx), attemptTimeout)
	defer cancel()
	err := s.again(ctx, func() error {
		return s.db.RunCommand(ctx, bson.D{field("createIndexes", p.name), field("indexes", specs), field("writeConcern", op("w", "majority"))}).Err()
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	if len(s.known) > 1000 {
		clear(s.known)
	}
	s.known[p.name] = true
	s.mu.Unlock()
	return nil
}

// collectionOf is a partition's collection; with majority, to read what no failover can undo.
func (s *Store) collectionOf(p partition, majority bool) *mongo.Collection {
	if majority {
		return s.db.Collection(p.name, options.Collection().SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary()))
	}
	return s.db.Collection(p.name, s.durable)
}

// findFiled finds what matches a filter in the history's partitions; nil: nothing does.
func (s *Store) findFiled(ctx context.Context, filter bson.D) (bson.Raw, error) {
	ps, err := s.partitions(ctx)
	if err != nil {
		return nil, err
	}
	for raw, err := range s.across(ctx, ps, false, bson.A{op("$match", filter)}) {
		return raw, err
	}
	return nil, nil
}

// filed reads what the history's partitions hold of some envelopes, by id.
func (s *Store) filed(ctx context.Context, ids []bson.ObjectID, fields bson.D, majority bool) (map[bson.ObjectID]bson.Raw, error) {
	found := map[bson.ObjectID]bson.Raw{}
	if len(ids) == 0 {
		return found, nil
	}
	ps, err := s.partitions(ctx)
	if err != nil {
		return nil, err
	}
	stages := bson.A{op("$match", bson.D{field("_id", op("$in", ids))}), op("$project", fields)}
	for raw, err := range s.across(ctx, ps, majority, stages) {
		if err != nil {
			return nil, err
		}
		if id, ok := raw.Lookup("_id").ObjectIDOK(); ok {
			found[id] = raw
		}
	}
	return found, nil
}

// across runs stages over each partition, many in one statement.
func (s *Store) across(ctx context.Context, ps []partition, majority bool, stages bson.A) iter.Seq2[bson.Raw, error] {
	return func(yield func(bson.Raw, error) bool) {
		for some := range slices.Chunk(ps, unitedPartitions) {
			cur, err := s.collectionOf(some[0], majority).Aggregate(ctx, overAll(some, stages))
			if err != nil {
				yield(nil, err)
				return
			}
			for cur.Next(ctx) {
				if !yield(slices.Clone(cur.Current), nil) {
					closeCursor(ctx, cur)
					return
				}
			}
			err = cur.Err()
			closeCursor(ctx, cur)
			if err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// united are the stages that add what these give of each partition. Those of many partitions stand within each other: a
// pipeline has a thousand stages at the most.
func united(ps []partition, stages bson.A) (unions []bson.D) {
	for some := range slices.Chunk(ps, unitedPartitions) {
		unions = append(unions, unionWith(some[0].name, overAll(some, stages)))
	}
	return unions
}

// overAll is the pipeline that, run on the first of some partitions, runs these stages over all of them.
func overAll(some []partition, stages bson.A) bson.A {
	pipeline := slices.Clone(stages)
	for _, p := range some[1:] {
		pipeline = append(pipeline, unionWith(p.name, stages))
	}
	return pipeline
}

func unionWith(coll string, stages bson.A) bson.D {
	return op("$unionWith", bson.D{field("coll", coll), field("pipeline", stages)})
}
