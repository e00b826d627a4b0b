package work

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/proc"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

func names(works []Work) []string {
	var all []string
	for _, w := range works {
		all = append(all, w.Name)
	}
	return all
}

func TestChoose(t *testing.T) {
	t.Parallel()
	all, err := Choose("")
	require.NoError(t, err)
	require.Contains(t, names(all), "drain")
	require.NotContains(t, names(all), "sustained", "takes ten minutes")
	require.NotContains(t, names(all), "history", "takes half an hour")
	require.Equal(t, []string{"sustained", "history"}, names(Unnamed(all)))

	some, err := Choose("push, drain,sustained")
	require.NoError(t, err)
	require.Equal(t, []string{"drain", "push", "sustained"}, names(some), "in the order of the table")
	require.Empty(t, Unnamed(some), "who names works knows what is left out")

	_, err = Choose("drain,dance")
	require.ErrorContains(t, err, "dance")
}

func quietly(runs int) *Env {
	return &Env{Runs: runs, Scale: 1, Systems: system.All, Progress: func(string, ...any) {}}
}

// TestGoalsNameWhatIsMeasured, since a goal whose figure nobody gives is shown as not measured, like that of a peer
// which is not installed.
func TestGoalsNameWhatIsMeasured(t *testing.T) {
	t.Parallel()
	env := quietly(1)
	within := map[string][]string{ // the figures of trials that give others than one of their own name
		env.Sustain.String(): {"first minute", "last minute"},
		"empty queue":        {"server calls", "client CPU"},
	}
	var figures []figure.Figure
	for _, w := range All {
		for _, tr := range w.trials(env) {
			settings, ok := within[tr.setting]
			if !ok {
				settings = []string{tr.setting}
			}
			var samples []figure.Sample
			for _, setting := range settings {
				samples = append(samples, figure.Sample{Setting: setting, Rate: 1, P50: new(1.0), P99: new(1.0), PeakRSS: new(1.0)})
			}
			figures = append(figures, figure.Collect(w.Name, tr.system.Name, [][]figure.Sample{samples})...)
		}
	}
	outcomes := figure.Judge(figure.Goals, figures, nil)
	require.Len(t, outcomes, len(figure.Goals))
	for _, o := range outcomes {
		require.False(t, o.Missing, "%s (%s): nothing measures %+v or %+v", o.Goal.What, o.Goal.Against, o.Goal.Ours, o.Goal.Base)
	}
}

func TestRunsInterleave(t *testing.T) {
	t.Parallel()
	var order []string
	measured := func(name string) trial {
		return trial{system.System{Name: name}, "s", func(context.Context) ([]figure.Sample, error) {
			order = append(order, name)
			return []figure.Sample{{Setting: "s", Rate: float64(len(order))}}, nil
		}}
	}
	w := Work{Name: "drain", trials: func(*Env) []trial { return []trial{measured("a"), measured("b")} }}
	figures := quietly(3).Measure(t.Context(), w)
	require.Equal(t, []string{"a", "b", "b", "a", "a", "b"}, order)
	require.Len(t, figures, 2)
	require.Equal(t, 4.0, figures[0].Rate)
	require.Equal(t, 3.0, figures[1].Rate)
	require.Equal(t, 3, figures[1].Runs)
}

func TestATrialThatFailsIsNotedAndLeavesTheOthers(t *testing.T) {
	t.Parallel()
	tries := 0
	w := Work{Name: "drain", trials: func(*Env) []trial {
		return []trial{
			{system.System{Name: "bad"}, "s", func(context.Context) ([]figure.Sample, error) {
				tries++
				return nil, errors.New("no server")
			}},
			{system.System{Name: "good"}, "s", func(context.Context) ([]figure.Sample, error) {
				return []figure.Sample{{Setting: "s", Rate: 1, Note: "mind this"}}, nil
			}},
		}
	}}
	env := quietly(3)
	figures := env.Measure(t.Context(), w)
	require.Equal(t, 2, tries)
	require.Len(t, figures, 1)
	require.Equal(t, "good", figures[0].System)
	require.True(t, env.Failed)
	require.Equal(t, []string{
		"drain bad s failed, and was tried once more: no server", "drain bad s failed: no server", "drain good s: mind this",
	}, env.Notes)
}

func TestAnInterruptedWorkGivesWhatItHas(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	w := Work{Name: "drain", trials: func(*Env) []trial {
		return []trial{{system.System{Name: "a"}, "s", func(context.Context) ([]figure.Sample, error) {
			if ctx.Err() == nil {
				defer cancel()
			}
			return []figure.Sample{{Setting: "s", Rate: 1}}, nil
		}}}
	}}
	env := quietly(3)
	require.Empty(t, env.Measure(ctx, w), "the run that was interrupted does not count")
	require.Empty(t, env.Notes)
}

func TestASystemThatIsMissingIsNoted(t *testing.T) {
	t.Parallel()
	env := quietly(1)
	env.Systems = []system.System{
		{Name: "river", Missing: func() string { return "apt-get install postgresql" }},
		{Name: "plain", Missing: func() string { return "" }},
		{Name: "other", Missing: func() string { return "" }},
	}
	chosen := env.choose("plain", "river")
	require.Len(t, chosen, 1)
	require.Equal(t, "plain", chosen[0].Name)
	require.Equal(t, []string{"river: not measured: apt-get install postgresql"}, env.Notes)
	env.choose("river")
	require.Len(t, env.Notes, 1, "said once")
}

func TestScale(t *testing.T) {
	t.Parallel()
	env := quietly(1)
	require.Equal(t, 100_000, env.jobs(100_000))
	env.Scale = 0.02
	require.Equal(t, 2000, env.jobs(100_000))
	require.Equal(t, 200, env.jobs(1000), "enough to measure anything")
	require.Equal(t, 40, env.atLeast(400, 40))
	require.Equal(t, 400*time.Millisecond, env.lasting(20*time.Second))
	require.Equal(t, 300*time.Millisecond, env.lasting(time.Second))
}

func TestProcessesAreSummedUp(t *testing.T) {
	t.Parallel()
	const second = int64(time.Second)
	o := outcome{serverCPU: 7, results: []proc.Result{
		{Report: child.Report{Jobs: 60, Start: 10 * second, Handled: 12 * second, End: 15 * second, CPU: 1}, PeakRSS: 20},
		{Report: child.Report{Jobs: 40, Start: 11 * second, Handled: 14 * second, End: 14 * second, CPU: 2}, PeakRSS: 30},
	}}
	o.sum()
	require.Equal(t, 100, o.jobs)
	require.Equal(t, 5*time.Second, o.elapsed)
	require.Equal(t, 4*time.Second, o.toHandled)

	s := o.sample("2 processes", o.toHandled)
	require.Equal(t, 25.0, s.Rate)
	require.Equal(t, 3.0, *s.ClientCPU)
	require.Equal(t, 7.0, *s.ServerCPU)
	require.Equal(t, 30.0, *s.PeakRSS)
	require.Nil(t, s.P50)
}

func TestCosts(t *testing.T) {
	t.Parallel()
	o := outcome{jobs: 1000, results: []proc.Result{{Report: child.Report{Jobs: 1000, CPU: 0.05, Allocs: 30_000}}}}
	got := costs(o)
	require.Len(t, got, 2)
	require.InDelta(t, 50, got[0].Rate, 1e-9)
	require.InDelta(t, 30, got[1].Rate, 1e-9)
	require.Empty(t, costs(outcome{results: o.results}))
}

func TestMarks(t *testing.T) {
	t.Parallel()
	m := marks{window: 2 * time.Second}
	for i, done := range []int{0, 100, 200, 250, 270, 280, 290} {
		m.add(time.Duration(i)*time.Second, done)
	}
	require.Equal(t, 100.0, m.first())
	require.Equal(t, 10.0, m.last())
	require.InDelta(t, 290.0/6, m.all(), 1e-9)

	short := marks{window: time.Minute}
	short.add(0, 0)
	require.Zero(t, short.first())
	require.Zero(t, short.last())
}
