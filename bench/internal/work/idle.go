package work

import (
	"context"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// idleLooked is longer than a minute: some things are done that often.
const idleLooked = 70 * time.Second

// idleTrials: a worker that waits on an empty queue: its calls to the server, and its CPU time.
func idleTrials(e *Env) []trial {
	return []trial{{e.ours(), "empty queue", func(ctx context.Context) ([]figure.Sample, error) {
		s, err := e.open(ctx, e.ours())
		if err != nil {
			return nil, err
		}
		defer s.close()
		o, err := s.measure(ctx, child.Spec{Task: "idle", Workers: poolWorkers, Limit: e.lasting(idleLooked)})
		if err != nil {
			return nil, err
		}
		seconds := o.elapsed.Seconds()
		calls := o.sample("server calls", o.elapsed)
		calls.Unit = "calls/s"
		return []figure.Sample{
			calls,
			{Setting: "client CPU", Unit: "ms/s", Rate: o.results[0].CPU * 1000 / seconds},
		}, nil
	}}}
}
