package task

import (
	"context"
	"time"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// oursProduce pushes at a pace.
func oursProduce(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	if _, err := o.warm.Push(ctx, payload(0)); err != nil {
		return child.Report{}, err
	}
	return produce(ctx, l, func(ctx context.Context, stamp time.Time) error {
		var opts []mongoq.PushOption
		if l.Spec.Delay > 0 {
			opts = append(opts, mongoq.At(stamp))
		}
		_, err := o.queue().Push(ctx, stamped(stamp), opts...)
		return err
	})
}

// oursConsume runs a pool that times how late each job starts, until it is told to stop.
func oursConsume(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	late := newLateness(l.Spec.Jobs)
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	go late.announce(ctx, l)
	err = runPool(ctx, o.queue(), l.Spec.Workers, func(_ context.Context, r *mongoq.Reservation) error {
		return late.started(time.Now(), r.Payload.StringValue())
	})
	return late.report(m, &late.timings), err
}
