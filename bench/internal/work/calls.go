package work

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

// endless is a number of jobs that only time ends.
const endless = 1 << 40

// pushTrials: goroutines that each push one job after the other, for some seconds. For one see singleTrials.
func pushTrials(e *Env) []trial {
	var trials []trial
	for _, workers := range []int{64, 256} {
		setting := fmt.Sprintf("%d goroutines", workers)
		for _, sys := range e.choose(system.Ours, "plain") {
			trials = append(trials, callsTrial(e, sys, setting, 0, child.Spec{
				Task: "push", Workers: workers, Jobs: endless, Limit: e.lasting(6 * time.Second),
			}))
		}
	}
	return trials
}

// pushManyTrials: one goroutine that pushes one batch after the other.
func pushManyTrials(e *Env) []trial {
	var trials []trial
	for _, sys := range e.choose(system.Ours, "plain") {
		trials = append(trials, callsTrial(e, sys, "batches of 1,000", 0, child.Spec{
			Task: "pushmany", Workers: 1, Jobs: endless, Batch: 1000, Limit: e.lasting(8 * time.Second),
		}))
	}
	return trials
}

// reserveTrials: goroutines that each reserve and commit one job after the other.
func reserveTrials(e *Env) []trial {
	var trials []trial
	for _, sys := range e.choose(system.Ours, "plain") {
		jobs := e.jobs(50_000)
		trials = append(trials, callsTrial(e, sys, "64 goroutines", jobs, child.Spec{
			Task: "reserve", Workers: 64, Jobs: jobs, Limit: e.lasting(20 * time.Second),
		}))
	}
	return trials
}

// callsTrial measures single calls on a new server with so many jobs.
func callsTrial(e *Env, sys system.System, setting string, fill int, spec child.Spec) trial {
	return trial{sys, setting, func(ctx context.Context) ([]figure.Sample, error) {
		s, err := e.open(ctx, sys)
		if err != nil {
			return nil, err
		}
		defer s.close()
		return s.calls(ctx, setting, fill, spec)
	}}
}

// calls fills the server and measures single calls.
func (s *session) calls(ctx context.Context, setting string, fill int, spec child.Spec) ([]figure.Sample, error) {
	if fill > 0 {
		if err := s.fill(ctx, child.Spec{Jobs: fill}); err != nil {
			return nil, err
		}
	}
	spec.Profile = s.env.profile(s.system, spec.Task+" "+setting)
	o, err := s.measure(ctx, spec)
	if err != nil {
		return nil, err
	}
	sample := o.sample(setting, o.elapsed)
	if spec.Jobs < endless && o.jobs < spec.Jobs {
		sample.Note = fmt.Sprintf("stopped after %v, with %s of %s done: rated by that", spec.Limit, figure.Count(o.jobs), figure.Count(spec.Jobs))
	}
	return []figure.Sample{sample}, nil
}
