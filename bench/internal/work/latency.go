package work

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

const (
	// idleFor is how long the consumer waits before the first push.
	idleFor = 2 * time.Second
	// patience is how long the last jobs may take to start.
	patience = 20 * time.Second
	// latencyWorkers is more than are ever busy. asynq has its default instead, the number of cores.
	latencyWorkers = 64
)

// latencyTrials: one process pushes, another times when the handlers start: after the call of push began, or after the
// time that a delayed job is due. All systems have their defaults; ours also where no process can ring for another.
func latencyTrials(e *Env) []trial {
	paces := []struct {
		setting   string
		perSecond float64
		jobs      int
		delay     time.Duration
	}{
		{"20 a second", 20, 400, 0},
		{"300 a second", 300, 3000, 0},
		{"delayed", 50, 500, 3 * time.Second},
	}
	var trials []trial
	for _, p := range paces {
		for _, sys := range e.choose(system.Ours, "river", "asynq-aof") {
			trials = append(trials, trial{sys, p.setting, func(ctx context.Context) ([]figure.Sample, error) {
				return e.latency(ctx, sys, p.setting, child.Spec{
					Workers: latencyWorkers, PerSecond: p.perSecond, Jobs: e.atLeast(p.jobs, 40), Delay: p.delay,
				})
			}})
		}
	}
	const refused = "signals refused, 20 a second"
	return append(trials, trial{e.ours(), refused, func(ctx context.Context) ([]figure.Sample, error) {
		return e.latency(ctx, e.ours(), refused, child.Spec{Workers: latencyWorkers, PerSecond: 20, Jobs: e.atLeast(400, 40), Unheard: true})
	}})
}

func (e *Env) latency(ctx context.Context, sys system.System, setting string, spec child.Spec) ([]figure.Sample, error) {
	s, err := e.open(ctx, sys)
	if err != nil {
		return nil, err
	}
	defer s.close()
	spec.Task, spec.Profile = "consume", e.profile(sys, "latency "+setting)
	consumer, err := s.start(ctx, spec)
	if err != nil {
		return nil, err
	}
	defer consumer.Kill()
	spec.Task, spec.Profile = "produce", ""
	producer, err := s.start(ctx, spec)
	if err != nil {
		return nil, err
	}
	defer producer.Kill()

	before, err := s.bill()
	if err != nil {
		return nil, err
	}
	if err := consumer.Go(); err != nil {
		return nil, err
	}
	if err := sleep(ctx, idleFor); err != nil {
		return nil, err
	}
	if err := producer.Go(); err != nil {
		return nil, err
	}
	made, err := producer.Wait(ctx)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(spec.Delay + patience); consumer.Count() < spec.Jobs; {
		if consumer.Ended() || time.Now().After(end) {
			break
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return nil, err
		}
	}
	after, errAfter := s.bill()
	_ = consumer.Stop() // one that has ended says why
	used, err := consumer.Wait(ctx)
	if err == nil {
		err = errAfter
	}
	if err != nil {
		return nil, err
	}
	clients := made.CPU + used.CPU
	server := e.settle(before, after, clients)
	if used.Timed < spec.Jobs {
		return nil, fmt.Errorf("only %d of %d jobs had started %v after the last was pushed", used.Timed, spec.Jobs, spec.Delay+patience)
	}
	sample := figure.Sample{
		Setting: setting, Unit: "pushes/s", Rate: float64(made.Jobs) / made.Elapsed().Seconds(), Paced: true,
		P50: &used.P50, P95: &used.P95, P99: &used.P99,
		ClientCPU: &clients, ServerCPU: &server, PeakRSS: &used.PeakRSS,
	}
	return []figure.Sample{sample, {
		Setting: setting + ": push answered", Unit: "pushes/s", Rate: sample.Rate, Paced: true,
		P50: &made.P50, P95: &made.P95, P99: &made.P99,
	}}, nil
}

// sleep waits for d or for ctx to end.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
