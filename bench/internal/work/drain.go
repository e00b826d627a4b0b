package work

import (
	"context"
	"fmt"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

const (
	drainJobs = 100_000
	// poolWorkers is the concurrency of our pool.
	poolWorkers = 64
	// consumers is the concurrency of those that take jobs one by one; more of them only meet more conflicts.
	consumers = 16
	// riverWorkers is that of River's own benchmark.
	riverWorkers = 2000
)

// drainTrials: jobs are stored, then drained; the time is from the start of the pool until the last job is gone.
func drainTrials(e *Env) []trial {
	var trials []trial
	for _, sys := range e.choose(system.Ours, "plain", "keuss-mongo", "keuss-bucket", "mongodb-queue", "river") {
		workers, unit := consumers, "consumers"
		switch sys.Name {
		case system.Ours:
			workers, unit = poolWorkers, "workers"
		case "river":
			workers, unit = riverWorkers, "workers"
		}
		trials = append(trials, drainTrial(e, sys, figure.Count(workers)+" "+unit, workers))
	}
	for _, sys := range e.choose("asynq-aof", "asynq-noaof") {
		trials = append(trials, asynqTrial(e, sys))
	}
	return trials
}

func drainTrial(e *Env, sys system.System, setting string, workers int) trial {
	return trial{sys, setting, func(ctx context.Context) ([]figure.Sample, error) {
		return e.drain(ctx, sys, setting, child.Spec{Workers: workers, Jobs: e.jobs(drainJobs), Limit: e.Limit})
	}}
}

// drain fills a new server and drains it.
func (e *Env) drain(ctx context.Context, sys system.System, setting string, spec child.Spec) ([]figure.Sample, error) {
	s, err := e.open(ctx, sys)
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.fill(ctx, child.Spec{Jobs: spec.Jobs}); err != nil {
		return nil, err
	}
	spec.Task = "drain"
	spec.Profile = e.profile(sys, "drain "+setting)
	o, err := s.measure(ctx, spec)
	if err != nil {
		return nil, err
	}
	sample := o.sample(setting, o.elapsed)
	if o.jobs < spec.Jobs {
		sample.Note = fmt.Sprintf("stopped after %v, before all %s jobs were done: rated by what it did", e.Limit, figure.Count(spec.Jobs))
	} else if err := s.finished(ctx, spec); err != nil {
		return nil, err
	}
	samples := []figure.Sample{sample}
	if sys.Name == system.Ours {
		samples = append(samples, costs(o)...)
	}
	return samples, nil
}

// costs are what a job costs our process.
func costs(o outcome) []figure.Sample {
	r := o.results[0]
	if o.jobs == 0 {
		return nil
	}
	return []figure.Sample{
		{Work: "cost", Setting: "drain: client CPU", Unit: "us/job", Rate: r.CPU * 1e6 / float64(o.jobs)},
		{Work: "cost", Setting: "drain: allocations", Unit: "1/job", Rate: float64(r.Allocs) / float64(o.jobs)},
	}
}
