package task

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

const (
	fillBatch   = 1000
	fillWorkers = 2
)

// oursFill pushes jobs, as many to each queue, due at once or after the spec's delay.
func oursFill(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{Delay: l.Spec.Delay})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		for _, share := range shares(l.Spec.Jobs, o.queues) {
			cuts := batches(share.jobs, fillBatch)
			_, err := load{workers: fillWorkers, jobs: len(cuts)}.run(ctx, func(ctx context.Context, n int) error {
				_, err := share.queue.PushMany(ctx, payloadRange(cuts[n]))
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// share is what one of several queues gets.
type share struct {
	queue *mongoq.Queue
	jobs  int
}

func shares(jobs int, queues []*mongoq.Queue) []share {
	all := make([]share, len(queues))
	for i, q := range queues {
		all[i] = share{queue: q, jobs: jobs / len(queues)}
		if i < jobs%len(queues) {
			all[i].jobs++
		}
	}
	return all
}

func payloadRange(cut [2]int) []any {
	all := make([]any, 0, cut[1]-cut[0])
	for n := cut[0]; n < cut[1]; n++ {
		all = append(all, payload(n))
	}
	return all
}

// oursHistory stores finished jobs: one is pushed, done and kept, and the others are copies of it with ids and times of
// their own, as if they had been done at other times. So nothing of their lives is left in the indexes.
func oursHistory(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{Retention: mongoq.KeepForever})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		id, err := o.queue().Push(ctx, payload(0))
		if err != nil {
			return err
		}
		r, err := o.queue().Reserve(ctx)
		if err != nil {
			return err
		}
		if err := r.Commit(ctx); err != nil {
			return err
		}
		var one bson.D
		if err := o.collection().FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&one); err != nil {
			return err
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
			_, err := o.collection().InsertMany(ctx, docs, options.InsertMany().SetOrdered(false))
			return err
		})
		return err
	})
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
