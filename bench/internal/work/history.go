package work

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// forgotten is how many finished jobs are forgotten.
const forgotten = 1_000_000

// historyTrials: the pool drains without a history and with each form of it; a million finished jobs are forgotten, by
// themselves and while the pool drains.
func historyTrials(e *Env) []trial {
	var trials []trial
	for _, form := range []string{"", "ttl", "partition"} {
		setting := "drain, no history"
		if form != "" {
			setting = "drain, " + form
		}
		trials = append(trials, trial{e.ours(), setting, func(ctx context.Context) ([]figure.Sample, error) {
			return e.drainCosts(ctx, "history", e.ours(), setting, child.Spec{Workers: poolWorkers, Jobs: e.jobs(drainJobs), Limit: e.Limit, History: form})
		}})
	}
	for _, form := range []string{"ttl", "partition"} {
		trials = append(trials, trial{e.ours(), "forget-" + form, func(ctx context.Context) ([]figure.Sample, error) {
			return e.forget(ctx, form)
		}})
		for _, forget := range []bool{false, true} {
			setting := "drain beside it, " + form
			if forget {
				setting = "drain while it is forgotten, " + form
			}
			trials = append(trials, trial{e.ours(), setting, func(ctx context.Context) ([]figure.Sample, error) {
				return e.drainBeside(ctx, setting, form, forget)
			}})
		}
	}
	return trials
}

// forget rates forgetting by what it costs the server: jobs forgotten for each second of its CPU.
func (e *Env) forget(ctx context.Context, form string) ([]figure.Sample, error) {
	s, err := e.open(ctx, e.ours())
	if err != nil {
		return nil, err
	}
	defer s.close()
	spec := child.Spec{Task: "history", Jobs: e.jobs(forgotten), History: form}
	if _, err := s.do(ctx, spec); err != nil {
		return nil, err
	}
	spec.Task = "forget"
	o, err := s.measure(ctx, spec)
	if err != nil {
		return nil, err
	}
	sample := o.sample("forget-"+form, o.elapsed)
	sample.Unit = "jobs/CPU s"
	sample.Rate = float64(e.jobs(forgotten)) / max(o.serverCPU, 0.01) // a tick of its clock
	sample.Note = fmt.Sprintf("took %v and %.2f s of the server's CPU", o.elapsed.Round(time.Millisecond), o.serverCPU)
	return []figure.Sample{sample}, nil
}

// drainBeside drains while finished jobs lie beside the work, or are forgotten. The rate is the pool's.
func (e *Env) drainBeside(ctx context.Context, setting, form string, forget bool) ([]figure.Sample, error) {
	jobs := e.jobs(drainJobs)
	d := drain{
		work: "history", setting: setting, system: e.ours(), goal: jobs,
		fills: []child.Spec{{Task: "history", Jobs: e.jobs(forgotten), History: form}, {Task: "fill", Jobs: jobs}},
		specs: []child.Spec{{Task: "drain", Workers: poolWorkers, Jobs: jobs, Limit: e.Limit, History: form}},
	}
	if forget {
		d.beside = append(d.beside, child.Spec{Task: "forget", Jobs: e.jobs(forgotten), History: form, Delay: time.Second})
	}
	_, sample, err := e.drain(ctx, d)
	return []figure.Sample{sample}, err
}
