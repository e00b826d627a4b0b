package work

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

// asynqConcurrencies are those that are tried; the first is that of its own benchmark.
var asynqConcurrencies = []int{10, 16, 32, 64, 128, 256}

// asynqTrial drains with the concurrency that did best in a shorter drain before.
func asynqTrial(e *Env, sys system.System) trial {
	return trial{sys, "best concurrency", func(ctx context.Context) ([]figure.Sample, error) {
		best, err := e.bestConcurrency(ctx, sys)
		if err != nil {
			return nil, err
		}
		setting := fmt.Sprintf("concurrency %d, the best", best)
		return e.drainAll(ctx, "drain", sys, setting, child.Spec{Workers: best, Jobs: e.jobs(drainJobs), Limit: e.Limit})
	}}
}

// tryouts is how often each concurrency is tried.
const tryouts = 3

// bestConcurrency tries all, for the bench as a whole, and gives that with the best median.
func (e *Env) bestConcurrency(ctx context.Context, sys system.System) (int, error) {
	if best, ok := e.asynqBest[sys.Name]; ok {
		return best, nil
	}
	rates := map[int][]float64{}
	for range tryouts {
		for _, n := range asynqConcurrencies {
			got, err := e.drainAll(ctx, "drain", sys, "", child.Spec{Workers: n, Jobs: e.jobs(drainJobs / 5), Limit: e.Limit})
			if err != nil {
				return 0, fmt.Errorf("concurrency %d: %w", n, err)
			}
			rates[n] = append(rates[n], got[0].Rate)
		}
	}
	best := slices.MaxFunc(asynqConcurrencies, func(a, b int) int {
		return cmp.Compare(figure.Median(rates[a]), figure.Median(rates[b]))
	})
	if e.asynqBest == nil {
		e.asynqBest = map[string]int{}
	}
	e.asynqBest[sys.Name] = best
	e.Note("%s: its best concurrency was %d, of %v", sys.Name, best, asynqConcurrencies)
	return best, nil
}
