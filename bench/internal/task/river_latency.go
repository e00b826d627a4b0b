package task

import (
	"context"
	"time"

	"github.com/riverqueue/river"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// riverProduce inserts at a pace.
func riverProduce(ctx context.Context, l *child.Link) (child.Report, error) {
	pool, client, err := openRiver(ctx, l.Spec, river.Config{}, nil)
	if err != nil {
		return child.Report{}, err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return child.Report{}, err
	}
	return produce(ctx, l, func(ctx context.Context, stamp time.Time) error {
		var opts *river.InsertOpts
		if l.Spec.Delay > 0 {
			opts = &river.InsertOpts{ScheduledAt: stamp}
		}
		_, err := client.Insert(ctx, riverArgs{Payload: stamped(stamp)}, opts)
		return err
	})
}

// riverConsume works jobs with River's defaults until it is told to stop.
func riverConsume(ctx context.Context, l *child.Link) (child.Report, error) {
	late := newLateness(l.Spec.Jobs)
	pool, client, err := openRiver(ctx, l.Spec, river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: l.Spec.Workers}},
	}, func(job *river.Job[riverArgs]) error { return late.started(time.Now(), job.Args.Payload) })
	if err != nil {
		return child.Report{}, err
	}
	defer pool.Close()
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return child.Report{}, err
	}
	late.announce(ctx, l)
	report := late.report(m, &late.timings)
	stop(client.Stop)
	return report, nil
}
