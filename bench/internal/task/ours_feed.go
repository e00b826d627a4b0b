package task

import (
	"context"
	"sync/atomic"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// oursFeed calls Push as fast as the bench allows, until it is told to stop.
func oursFeed(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	const endless = 1 << 40
	var pushed atomic.Int64
	away := context.WithoutCancel(ctx)
	_, err = load{workers: l.Spec.Workers, jobs: endless}.run(ctx, func(ctx context.Context, n int) error {
		if l.Allowed(ctx, n) != nil {
			return nil // told to stop
		}
		_, err := o.queue().Push(away, payload(n))
		pushed.Add(1)
		return err
	})
	if ctx.Err() != nil {
		err = nil
	}
	return m.Stop(int(pushed.Load()), nil), err
}
