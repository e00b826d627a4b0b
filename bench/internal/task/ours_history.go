package task

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// The ways to keep what is finished; see child.Spec.
const (
	historyTTL       = "ttl"
	historyPartition = "partition"
)

// overdue is a partition that was over long ago.
const overdue = "mongoq.history.20250101T00.20250102T01"

func partitioning(spec child.Spec) mongoq.Partitioning {
	if spec.History == historyPartition {
		return mongoq.PartitionByHour
	}
	return mongoq.PartitionNone
}

// oursHistory stores finished jobs: one is pushed, done and kept, and the others are copies of it with ids and times of
// their own, as if they had been done at other times. So nothing of their lives is left in the indexes. Those that the
// spec names a history for may be forgotten at once: by the server's TTL monitor, which is stopped here, or with their
// partition.
func oursHistory(ctx context.Context, l *child.Link) (child.Report, error) {
	spec := l.Spec
	spec.History = ""
	o, err := openOurs(ctx, spec, mongoq.QueueConfig{Retention: mongoq.KeepForever})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		one, err := o.finishedOne(ctx)
		if err != nil {
			return err
		}
		into := o.collection()
		switch l.Spec.History {
		case historyTTL:
			if err := o.setMonitor(ctx, bson.E{Key: "ttlMonitorEnabled", Value: false}); err != nil {
				return err
			}
			one = append(one, bson.E{Key: "expireAt", Value: time.Now().Add(-time.Hour)})
		case historyPartition:
			one = append(one, bson.E{Key: "expireAt", Value: time.Now().Add(-time.Hour)})
			into = into.Database().Collection(overdue)
			if err := likePartition(ctx, into); err != nil {
				return err
			}
		}
		cuts := batches(l.Spec.Jobs-1, fillBatch)
		_, err = load{workers: fillWorkers, jobs: len(cuts)}.run(ctx, func(ctx context.Context, n int) error {
			docs := make([]any, 0, fillBatch)
			for i := cuts[n][0]; i < cuts[n][1]; i++ {
				doc, err := finishedCopy(one, i)
				if err != nil {
					return err
				}
				docs = append(docs, doc)
			}
			_, err := into.InsertMany(ctx, docs, options.InsertMany().SetOrdered(false))
			return err
		})
		return err
	})
}

// finishedOne is a job that was done.
func (o *ours) finishedOne(ctx context.Context) (one bson.D, err error) {
	id, err := o.queue().Push(ctx, payload(0))
	if err != nil {
		return nil, err
	}
	r, err := o.queue().Reserve(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.Commit(ctx); err != nil {
		return nil, err
	}
	err = o.collection().FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&one)
	return one, err
}

// finishedCopy is a finished envelope under an id of its own, done i milliseconds earlier.
func finishedCopy(one bson.D, i int) (bson.D, error) {
	doc := make(bson.D, 0, len(one))
	for _, e := range one {
		switch e.Key {
		case "_id":
			e.Value = bson.NewObjectID()
		case "payload":
			e.Value = payload(i)
		case "processed":
			at, ok := e.Value.(bson.DateTime)
			if !ok {
				return nil, fmt.Errorf("`processed` of a committed envelope is a %T", e.Value)
			}
			e.Value = bson.NewDateTimeFromTime(at.Time().Add(-time.Duration(i) * time.Millisecond))
		}
		doc = append(doc, e)
	}
	return doc, nil
}

// likePartition gives a collection the indexes of a partition.
func likePartition(ctx context.Context, c *mongo.Collection) error {
	_, err := c.Indexes().CreateMany(ctx, []mongo.IndexModel{
		{
			Keys:    bson.D{{Key: "q", Value: 1}, {Key: "processed", Value: -1}, {Key: "_id", Value: -1}},
			Options: options.Index().SetName("mongoq_history"),
		},
		{
			Keys: bson.D{{Key: "part.of", Value: 1}},
			Options: options.Index().SetName("mongoq_parts").
				SetPartialFilterExpression(bson.D{{Key: "part", Value: bson.D{{Key: "$exists", Value: true}}}}),
		},
	})
	return err
}

func (o *ours) setMonitor(ctx context.Context, parameter bson.E) error {
	return o.client.Database("admin").RunCommand(ctx, bson.D{{Key: "setParameter", Value: 1}, parameter}).Err()
}

// oursForget has what may be forgotten be forgotten: by the server's TTL monitor, until nothing is left of it, or by what
// the keeper does with a partition that is over.
func oursForget(ctx context.Context, l *child.Link) (child.Report, error) {
	spec := l.Spec
	spec.History = ""
	o, err := openOurs(ctx, spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	c := newCounter(1)
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	if l.Spec.Delay > 0 {
		time.Sleep(l.Spec.Delay)
	}
	if l.Spec.History == historyPartition {
		err = o.collection().Database().Collection(overdue).Drop(ctx)
	} else {
		err = o.forgetByTTL(ctx)
	}
	c.add()
	return c.report(m, nil), err
}

func (o *ours) forgetByTTL(ctx context.Context) error {
	for _, parameter := range []bson.E{{Key: "ttlMonitorSleepSecs", Value: 1}, {Key: "ttlMonitorEnabled", Value: true}} {
		if err := o.setMonitor(ctx, parameter); err != nil {
			return err
		}
	}
	for {
		err := o.collection().FindOne(ctx, bson.D{{Key: "expireAt", Value: bson.D{{Key: "$type", Value: "date"}, {Key: "$lt", Value: time.Now()}}}},
			options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}}).SetSort(bson.D{{Key: "expireAt", Value: 1}})).Err()
		if errors.Is(err, mongo.ErrNoDocuments) {
			return nil
		}
		if err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}
