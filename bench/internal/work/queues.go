package work

import (
	"context"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// queuesTrials: as many workers in one process, on one queue or each on its own.
func queuesTrials(e *Env) []trial {
	var trials []trial
	for _, shape := range []struct {
		setting         string
		queues, workers int
	}{{"1 queue x 200 workers", 1, 200}, {"200 queues x 1 worker", 200, 1}} {
		trials = append(trials, trial{e.ours(), shape.setting, func(ctx context.Context) ([]figure.Sample, error) {
			return e.drainAll(ctx, "queues", e.ours(), shape.setting, child.Spec{
				Queues: shape.queues, Workers: shape.workers, Jobs: e.jobs(drainJobs), Limit: e.Limit,
			})
		}})
	}
	return trials
}
