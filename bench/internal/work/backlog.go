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
	}{
		{"none", []child.Spec{{Task: "fill", Jobs: e.jobs(drainJobs)}}},
		{"500,000 delayed", []child.Spec{
			{Task: "fill", Jobs: e.jobs(others), Delay: time.Hour},
			{Task: "fill", Jobs: e.jobs(drainJobs)},
		}},
		{"500,000 in history", []child.Spec{
			{Task: "history", Jobs: e.jobs(others)},
			{Task: "fill", Jobs: e.jobs(drainJobs)},
		}},
		{"500,000 waiting", []child.Spec{{Task: "fill", Jobs: e.jobs(others)}}},
	}
	var trials []trial
	for _, setup := range setups {
		trials = append(trials, trial{e.ours(), setup.setting, func(ctx context.Context) ([]figure.Sample, error) {
			return e.beside(ctx, setup.setting, setup.fills)
		}})
	}
	return trials
}

func (e *Env) beside(ctx context.Context, setting string, fills []child.Spec) ([]figure.Sample, error) {
	s, err := e.open(ctx, e.ours())
	if err != nil {
		return nil, err
	}
	defer s.close()
	for _, fill := range fills {
		if _, err := s.do(ctx, fill); err != nil {
			return nil, err
		}
	}
	o, err := s.measure(ctx, child.Spec{
		Task: "drain", Workers: poolWorkers, Jobs: e.jobs(drainJobs), Limit: e.Limit,
		Profile: e.profile(s.system, "backlog "+setting),
	})
	if err != nil {
		return nil, err
	}
	return []figure.Sample{o.sample(setting, o.toHandled)}, nil
}
