package work

import (
	"context"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
	"github.com/seed-de459a48/mongoq/bench/internal/task"
)

// pipelineTrials: envelopes go through three stages that do nothing; beside it, a pool drains as many from one queue. A
// move is an envelope that leaves a stage; the last of three is a commit. The time is until the last is settled.
func pipelineTrials(e *Env) []trial {
	trials := []trial{drainTrial(e, e.ours(), "drain, 64 workers", poolWorkers)}
	for _, others := range []int{0, others} {
		setting := "3 stages x 64 workers"
		if others > 0 {
			setting = "500,000 waiting at another stage"
		}
		trials = append(trials, trial{e.ours(), setting, func(ctx context.Context) ([]figure.Sample, error) {
			return e.pipeline(ctx, e.ours(), setting, poolWorkers, others)
		}})
	}
	for _, sys := range e.choose("keuss-pl") {
		setting := figure.Count(len(task.PipelineStages)) + " stages x " + figure.Count(consumers) + " consumers"
		trials = append(trials, trial{sys, setting, func(ctx context.Context) ([]figure.Sample, error) {
			return e.pipeline(ctx, sys, setting, consumers, 0)
		}})
	}
	return trials
}

// pipeline fills the first stage, and another one if others are to wait there, and runs the three.
func (e *Env) pipeline(ctx context.Context, sys system.System, setting string, workers, others int) ([]figure.Sample, error) {
	jobs := e.jobs(drainJobs)
	d := drain{
		work: "pipeline", setting: setting, system: sys, goal: jobs * len(task.PipelineStages),
		fills: []child.Spec{{Task: "fill", Jobs: jobs, Stage: task.PipelineStages[0]}},
		specs: []child.Spec{{Task: "pipeline", Workers: workers, Jobs: jobs, Limit: e.Limit}},
	}
	if others > 0 {
		d.fills = append(d.fills, child.Spec{Task: "fill", Jobs: e.jobs(others), Stage: task.FullStage})
	}
	for _, stage := range task.PipelineStages {
		d.left = append(d.left, child.Spec{Stage: stage})
	}
	_, sample, err := e.drain(ctx, d)
	sample.Unit = "moves/s"
	return []figure.Sample{sample}, err
}
