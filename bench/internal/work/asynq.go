package work

import (
	"context"
	"fmt"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

// asynqConcurrencies are those that are tried; the first is that of its own benchmark.
var asynqConcurrencies = []int{10, 16, 32, 64, 128, 256}

// asynqTrial drains with the concurrency that did best in a shorter drain before.
func asynqTrial(e *Env, sys system.System) trial {
	const setting = "best concurrency"
	return trial{sys, setting, func(ctx context.Context) ([]figure.Sample, error) {
		best, err := e.bestConcurrency(ctx, sys)
		if err != nil {
			return nil, err
		}
		return e.drain(ctx, sys, setting, child.Spec{Workers: best, Jobs: e.jobs(drainJobs), Limit: e.Limit})
	}}
}

// bestConcurrency tries all, once for the bench.
func (e *Env) bestConcurrency(ctx context.Context, sys system.System) (int, error) {
	if best, ok := e.asynqBest[sys.Name]; ok {
		return best, nil
	}
	best, bestRate := 0, 0.0
	for _, n := range asynqConcurrencies {
		got, err := e.drain(ctx, sys, "", child.Spec{Workers: n, Jobs: e.jobs(drainJobs / 5), Limit: e.Limit})
		if err != nil {
			return 0, fmt.Errorf("concurrency %d: %w", n, err)
		}
		e.Progress("%s, concurrency %d: %s jobs/s", sys.Name, n, figure.Number(got[0].Rate))
		if got[0].Rate > bestRate {
			best, bestRate = n, got[0].Rate
		}
	}
	if e.asynqBest == nil {
		e.asynqBest = map[string]int{}
	}
	e.asynqBest[sys.Name] = best
	e.Note("%s: its best concurrency was %d, of %v", sys.Name, best, asynqConcurrencies)
	return best, nil
}
