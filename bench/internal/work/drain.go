package work

import (
	"context"
	"errors"
	"fmt"
	"slices"

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
	const durable = "64 workers, DurableClaims"
	trials = append(trials, trial{e.ours(), durable, func(ctx context.Context) ([]figure.Sample, error) {
		return e.drainAll(ctx, "drain", e.ours(), durable, child.Spec{
			Workers: poolWorkers, Jobs: e.jobs(drainJobs), Limit: e.Limit, Durable: true,
		})
	}})
	for _, sys := range e.choose("asynq-aof", "asynq-noaof") {
		trials = append(trials, asynqTrial(e, sys))
	}
	return trials
}

func drainTrial(e *Env, sys system.System, setting string, workers int) trial {
	return trial{sys, setting, func(ctx context.Context) ([]figure.Sample, error) {
		return e.drainCosts(ctx, "drain", sys, setting, child.Spec{Workers: workers, Jobs: e.jobs(drainJobs), Limit: e.Limit})
	}}
}

// drainAll drains what is stored by one process.
func (e *Env) drainAll(ctx context.Context, work string, sys system.System, setting string, spec child.Spec) ([]figure.Sample, error) {
	_, sample, err := e.drain(ctx, all(work, sys, setting, spec))
	return []figure.Sample{sample}, err
}

// drainCosts is drainAll that also tells what a job costs, of ours.
func (e *Env) drainCosts(ctx context.Context, work string, sys system.System, setting string, spec child.Spec) ([]figure.Sample, error) {
	o, sample, err := e.drain(ctx, all(work, sys, setting, spec))
	if err != nil || sys.Name != system.Ours {
		return []figure.Sample{sample}, err
	}
	return append([]figure.Sample{sample}, costs(o)...), nil
}

// all is a drain of as many jobs as one process is to do.
func all(work string, sys system.System, setting string, spec child.Spec) drain {
	spec.Task = "drain"
	return drain{
		work: work, setting: setting, system: sys, goal: spec.Jobs, specs: []child.Spec{spec},
		fills: []child.Spec{{Task: "fill", Jobs: spec.Jobs, Queues: spec.Queues}},
	}
}

// drain is jobs that are stored, and then done by one or several processes.
type drain struct {
	work, setting string
	system        system.System

	fills  []child.Spec // what stores them, and what lies beside them
	specs  []child.Spec // what does them
	beside []child.Spec // what else runs meanwhile, and counts for nothing
	goal   int          // how many are to be done
	rest   int          // how many more there are, which need not be done
	left   []child.Spec // where jobs could be left; the queues of the first process, if there are none

	// handled: the time is until the last job was handled, not until it was settled.
	handled bool
}

// drain measures a drain on a new server.
func (e *Env) drain(ctx context.Context, d drain) (outcome, figure.Sample, error) {
	s, err := e.open(ctx, d.system)
	if err != nil {
		return outcome{}, figure.Sample{}, err
	}
	defer s.close()
	for _, fill := range d.fills {
		if _, err := s.do(ctx, fill); err != nil {
			return outcome{}, figure.Sample{}, err
		}
	}
	for i := range d.specs {
		d.specs[i].Profile = e.profile(s.system, d.work+" "+d.setting)
	}
	o, err := s.measure(ctx, slices.Concat(d.specs, d.beside)...)
	if err != nil {
		return o, figure.Sample{}, err
	}
	o.results = o.results[:len(d.specs)]
	o.sum()
	sample := o.sample(d.setting, o.elapsed)
	if d.handled {
		sample = o.sample(d.setting, o.toHandled)
	}
	switch limit := d.specs[0].Limit; {
	case o.jobs > d.goal:
		err = fmt.Errorf("%d jobs were done %d times", d.goal, o.jobs)
	case o.jobs < d.goal:
		sample.Note = fmt.Sprintf("stopped after %v, before all %s jobs were done: rated by what it did", limit, figure.Count(d.goal))
	default:
		if d.left == nil {
			d.left = d.specs[:1]
		}
		for _, spec := range d.left {
			err = errors.Join(err, s.finished(ctx, spec, d.rest))
		}
	}
	return o, sample, err
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
