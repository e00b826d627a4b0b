package work

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/proc"
)

// ahead is how many jobs the producers may be ahead of the pool, so that it never lacks any and the queue does not
// grow.
const ahead = 20_000

// sustainedTrials: one process with 64 goroutines that call Push and another with a pool, for a long time. The first
// minute is compared with the last; of a shorter run, the first tenth with the last.
func sustainedTrials(e *Env) []trial {
	return []trial{{e.ours(), fmt.Sprint(e.Sustain), e.sustained}}
}

func (e *Env) sustained(ctx context.Context) ([]figure.Sample, error) {
	s, err := e.open(ctx, e.ours())
	if err != nil {
		return nil, err
	}
	defer s.close()
	pool, err := s.start(ctx, child.Spec{
		Task: "drain", Workers: poolWorkers, Jobs: endless, Shared: true, Profile: e.profile(s.system, "sustained"),
	})
	if err != nil {
		return nil, err
	}
	defer pool.Kill()
	producer, err := s.start(ctx, child.Spec{Task: "feed", Workers: 64})
	if err != nil {
		return nil, err
	}
	defer producer.Kill()

	before, err := s.bill()
	if err != nil {
		return nil, err
	}
	if err := pool.Go(); err != nil {
		return nil, err
	}
	if err := producer.Go(); err != nil {
		return nil, err
	}
	window := min(e.Sustain/10, time.Minute)
	marks, err := e.watch(ctx, pool, producer, window)
	if err != nil {
		return nil, err
	}
	after, err := s.bill()
	if err != nil {
		return nil, err
	}
	for _, c := range []*proc.Child{producer, pool} {
		_ = c.Stop() // one that has ended says why
	}
	o, err := gather(ctx, []*proc.Child{producer, pool})
	if err != nil {
		return nil, err
	}
	o.serverCPU = e.settle(before, after, o.clientCPU())
	whole := o.sample("whole", 0)
	whole.Rate = marks.all()
	return []figure.Sample{
		{Setting: "first minute", Unit: "jobs/s", Rate: marks.first()},
		{Setting: "last minute", Unit: "jobs/s", Rate: marks.last()},
		whole,
	}, nil
}

// watch lets the producers run ahead of the pool, and notes how far the pool has come.
func (e *Env) watch(ctx context.Context, pool, producer *proc.Child, window time.Duration) (marks, error) {
	m := marks{window: window}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	start := time.Now()
	for said := time.Duration(0); ; {
		at := time.Since(start)
		m.add(at, pool.Count())
		if at >= e.Sustain {
			return m, nil
		}
		if at-said >= window {
			said = at
			e.Progress("sustained, after %v: %s jobs", at.Round(time.Second), figure.Count(pool.Count()))
		}
		err := producer.Tell(fmt.Sprintf("allow %d", pool.Count()+ahead))
		for _, c := range []*proc.Child{producer, pool} {
			if c.Ended() {
				_, why := c.Wait(ctx)
				return m, fmt.Errorf("a process ended early: %w", cmp.Or(why, err, context.Canceled))
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return m, ctx.Err()
		}
	}
}
