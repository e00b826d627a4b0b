package work

import (
	"context"
	"fmt"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// processesTrials: as many workers, in one process or in several. The time is until the last job is handled by anyone.
func processesTrials(e *Env) []trial {
	var trials []trial
	for _, shape := range []struct{ processes, workers int }{{1, 64}, {4, 16}, {1, 20}, {20, 1}} {
		setting := fmt.Sprintf("%d processes x %d", shape.processes, shape.workers)
		if shape.processes == 1 {
			setting = fmt.Sprintf("1 process x %d", shape.workers)
		}
		trials = append(trials, trial{e.ours(), setting, func(ctx context.Context) ([]figure.Sample, error) {
			return e.together(ctx, setting, shape.processes, shape.workers)
		}})
	}
	return trials
}

// together drains one queue by several processes.
func (e *Env) together(ctx context.Context, setting string, processes, workers int) ([]figure.Sample, error) {
	jobs := e.jobs(drainJobs)
	specs := make([]child.Spec, processes)
	for i := range specs {
		specs[i] = child.Spec{Task: "drain", Workers: workers, Jobs: jobs, Limit: e.Limit, Shared: true}
	}
	_, sample, err := e.drain(ctx, drain{
		work: "processes", setting: setting, system: e.ours(), goal: jobs, specs: specs, handled: true,
		fills: []child.Spec{{Task: "fill", Jobs: jobs}},
	})
	return []figure.Sample{sample}, err
}
