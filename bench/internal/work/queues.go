package work

import (
	"context"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// queuesTrials: as many workers in one process, on one queue or each on its own.
func queuesTrials(e *Env) []trial {
	const queues = 200
	one := child.Spec{Queues: 1, Workers: queues}
	each := child.Spec{Queues: queues, Workers: 1}
	return []trial{
		{e.ours(), "1 queue x 200 workers", func(ctx context.Context) ([]figure.Sample, error) {
			return e.across(ctx, "1 queue x 200 workers", one)
		}},
		{e.ours(), "200 queues x 1 worker", func(ctx context.Context) ([]figure.Sample, error) {
			return e.across(ctx, "200 queues x 1 worker", each)
		}},
	}
}

func (e *Env) across(ctx context.Context, setting string, spec child.Spec) ([]figure.Sample, error) {
	s, err := e.open(ctx, e.ours())
	if err != nil {
		return nil, err
	}
	defer s.close()
	spec.Jobs, spec.Limit = e.jobs(drainJobs), e.Limit
	if err := s.fill(ctx, spec); err != nil {
		return nil, err
	}
	spec.Task, spec.Profile = "drain", e.profile(s.system, "queues "+setting)
	o, err := s.measure(ctx, spec)
	if err != nil {
		return nil, err
	}
	if o.jobs == spec.Jobs {
		if err := s.finished(ctx, spec); err != nil {
			return nil, err
		}
	}
	return []figure.Sample{o.sample(setting, o.elapsed)}, nil
}
