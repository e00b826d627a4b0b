package task

import (
	"context"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// oursPush calls Push.
func oursPush(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	push := func(q *mongoq.Queue) func(context.Context, int) error {
		return func(ctx context.Context, n int) error {
			_, err := q.Push(ctx, payload(n))
			return err
		}
	}
	if err := warm(ctx, l, push(o.warm)); err != nil {
		return child.Report{}, err
	}
	return timedLoad(ctx, l, push(o.queue()))
}

// oursPushMany calls PushMany. Its jobs are those of all batches.
func oursPushMany(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	pushMany := func(q *mongoq.Queue) func(context.Context, int) error {
		return func(ctx context.Context, n int) error {
			_, err := q.PushMany(ctx, payloadRange([2]int{n * l.Spec.Batch, (n + 1) * l.Spec.Batch}))
			return err
		}
	}
	return timedBatches(ctx, l, pushMany(o.warm), pushMany(o.queue()))
}

// timedBatches is timedLoad for operations on batches, after two that warm up.
func timedBatches(ctx context.Context, l *child.Link, before, op func(context.Context, int) error) (child.Report, error) {
	if _, err := (load{workers: 1, jobs: 2}).run(ctx, before); err != nil {
		return child.Report{}, err
	}
	l.Spec.Jobs /= l.Spec.Batch
	r, err := timedLoad(ctx, l, op)
	r.Jobs *= l.Spec.Batch
	return r, err
}

// oursReserve calls Reserve and then Commit.
func oursReserve(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	take := func(ctx context.Context, q *mongoq.Queue) error {
		r, err := q.Reserve(ctx)
		if err != nil {
			return err
		}
		return r.Commit(ctx)
	}
	err = warm(ctx, l, func(ctx context.Context, n int) error {
		if _, err := o.warm.Push(ctx, payload(n)); err != nil {
			return err
		}
		return take(ctx, o.warm)
	})
	if err != nil {
		return child.Report{}, err
	}
	return timedLoad(ctx, l, func(ctx context.Context, _ int) error { return take(ctx, o.queue()) })
}
