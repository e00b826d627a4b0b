package work

import (
	"context"
	"fmt"

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
	s, err := e.open(ctx, sys)
	if err != nil {
		return nil, err
	}
	defer s.close()
	jobs := e.jobs(drainJobs)
	if err := s.fill(ctx, child.Spec{Jobs: jobs, Stage: task.PipelineStages[0]}); err != nil {
		return nil, err
	}
	if others > 0 {
		if err := s.fill(ctx, child.Spec{Jobs: e.jobs(others), Stage: task.FullStage}); err != nil {
			return nil, err
		}
	}
	o, err := s.measure(ctx, child.Spec{
		Task: "pipeline", Workers: workers, Jobs: jobs, Limit: e.Limit, Profile: e.profile(sys, "pipeline "+setting),
	})
	if err != nil {
		return nil, err
	}
	sample := o.sample(setting, o.elapsed)
	sample.Unit = "moves/s"
	if o.jobs < jobs*len(task.PipelineStages) {
		sample.Note = fmt.Sprintf("stopped after %v, before all moves were made: rated by what it did", e.Limit)
		return []figure.Sample{sample}, nil
	}
	for _, stage := range task.PipelineStages {
		left, err := s.do(ctx, child.Spec{Task: "left", Stage: stage})
		if err == nil && left.Jobs > 0 {
			err = fmt.Errorf("%d jobs are left at stage %s, though all were counted as done", left.Jobs, stage)
		}
		if err != nil {
			return nil, err
		}
	}
	return []figure.Sample{sample}, nil
}
