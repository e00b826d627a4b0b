package task

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// oursDrain runs a pool on each queue until all jobs are handled.
func oursDrain(ctx context.Context, l *child.Link) (child.Report, error) {
	cfg := mongoq.QueueConfig{DurableClaims: l.Spec.Durable}
	if l.Spec.History != "" {
		cfg.Retention = 24 * time.Hour
	}
	o, err := openOurs(ctx, l.Spec, cfg)
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	c := newCounter(l.Spec.Jobs)
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	running, cancel := c.until(ctx, l)
	defer cancel()
	errs := make([]error, len(o.queues))
	var wg sync.WaitGroup
	for i, q := range o.queues {
		wg.Go(func() {
			errs[i] = runPool(running, q, l.Spec.Workers, func(context.Context, *mongoq.Reservation) error {
				c.add()
				return nil
			})
			if errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	return c.report(m, nil), errors.Join(errs...)
}
