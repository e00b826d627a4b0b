package task

import (
	"context"

	"github.com/seed-de459a48/mongoq"
)

// runPool runs a pool of n workers on a queue until ctx ends, and returns when all that it did is settled.
func runPool(ctx context.Context, q *mongoq.Queue, n int, h mongoq.Handler) error {
	w, err := q.Worker(h, mongoq.WorkerConfig{Concurrency: n})
	if err != nil {
		return err
	}
	return w.Run(ctx)
}
