package work

import (
	"context"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// memoryTrials: the most memory that a process has resident while it drains many jobs.
func memoryTrials(e *Env) []trial {
	const setting = "500,000 jobs"
	return []trial{{e.ours(), setting, func(ctx context.Context) ([]figure.Sample, error) {
		return e.drainAll(ctx, "memory", e.ours(), setting, child.Spec{Workers: poolWorkers, Jobs: e.jobs(500_000)})
	}}}
}
