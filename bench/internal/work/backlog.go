package work

import (
	"context"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// others is how many jobs there are beside those that are drained.
const others = 500_000

// backlogTrials: the first 100,000 jobs are drained beside many that are delayed, finished or waiting behind them. The
// time is until the last of them is handled.
func backlogTrials(e *Env) []trial {
	setups := []struct {
		setting string
		fills   []child.Spec
		rest    int
	}{
		{"none", []child.Spec{{Task: "fill", Jobs: e.jobs(drainJobs)}}, 0},
		{"500,000 delayed", []child.Spec{
			{Task: "fill", Jobs: e.jobs(others), Delay: time.Hour},
			{Task: "fill", Jobs: e.jobs(drainJobs)},
		}, 0},
		{"500,000 in history", []child.Spec{
			{Task: "history", Jobs: e.jobs(others)},
			{Task: "fill", Jobs: e.jobs(drainJobs)},
		}, 0},
		{"500,000 waiting", []child.Spec{{Task: "fill", Jobs: e.jobs(others)}}, e.jobs(others) - e.jobs(drainJobs)},
	}
	var trials []trial
	for _, setup := range setups {
		trials = append(trials, trial{e.ours(), setup.setting, func(ctx context.Context) ([]figure.Sample, error) {
			_, sample, err := e.drain(ctx, drain{
				work: "backlog", setting: setup.setting, system: e.ours(), goal: e.jobs(drainJobs), rest: setup.rest, handled: true,
				fills: setup.fills,
				specs: []child.Spec{{Task: "drain", Workers: poolWorkers, Jobs: e.jobs(drainJobs), Limit: e.Limit}},
			})
			return []figure.Sample{sample}, err
		}})
	}
	return trials
}
