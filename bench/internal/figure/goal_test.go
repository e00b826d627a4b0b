package figure

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var aGoal = ratio("draining", "plain", 15, Ref{"drain", "mongoq", "64 workers"}, Ref{"drain", "plain", ""})

func drained(system, setting string, rate float64) Figure {
	return Figure{Work: "drain", System: system, Setting: setting, Rate: rate, rates: []float64{rate}}
}

func TestARatioIsReachedOrShort(t *testing.T) {
	t.Parallel()
	plain := drained("plain", "16 consumers", 100)
	for _, c := range []struct {
		rate float64
		ok   bool
	}{{1499, false}, {1500, true}, {3000, true}} {
		got := Judge([]Goal{aGoal}, []Figure{drained("mongoq", "64 workers", c.rate), plain}, nil)
		ratio := c.rate / 100
		require.Equal(t, []Outcome{{Goal: got[0].Goal, Measured: ratio, Low: ratio, High: ratio, Runs: 1, OK: c.ok}}, got)
	}
}

func TestRatiosAreThoseOfTheRuns(t *testing.T) {
	t.Parallel()
	// The machine became twice as slow in the course of it, and one system failed in its last run.
	ours, plain := drained("mongoq", "64 workers", 1600), drained("plain", "16 consumers", 100)
	ours.rates, plain.rates = []float64{3000, 2000, 1400, 1000}, []float64{200, 100, 100}
	got := Judge([]Goal{aGoal}, []Figure{ours, plain}, nil)
	require.Equal(t, []Outcome{{Goal: got[0].Goal, Measured: 15, Low: 14, High: 20, Runs: 3, OK: true}}, got)
}

func TestARatioWithoutItsPeerIsMissing(t *testing.T) {
	t.Parallel()
	for _, figures := range [][]Figure{
		{drained("mongoq", "64 workers", 1500)},
		{drained("plain", "16 consumers", 100)},
		{drained("mongoq", "another setting", 1500), drained("plain", "16 consumers", 100)},
		{drained("mongoq", "64 workers", 1500), drained("plain", "16 consumers", 0)},
	} {
		got := Judge([]Goal{aGoal}, figures, nil)
		require.Len(t, got, 1)
		require.True(t, got[0].Missing)
		require.False(t, got[0].OK)
	}
}

func TestAWorkThatWasNotRunHasNoOutcome(t *testing.T) {
	t.Parallel()
	others := []Figure{{Work: "push", System: "mongoq"}}
	require.Empty(t, Judge([]Goal{aGoal}, others, nil))
	require.Equal(t, []Outcome{{Missing: true}}, blank(Judge([]Goal{aGoal}, others, []string{"drain"})), "left, and shown")
}

func TestALimitIsKeptOrNot(t *testing.T) {
	t.Parallel()
	goal := limit("memory", 80, "MiB", Ref{"memory", "mongoq", ""}, func(f Figure) *float64 { return f.PeakRSS })
	for _, c := range []struct {
		rss *float64
		out Outcome
	}{
		{new(80.0), Outcome{Measured: 80, OK: true}},
		{new(80.1), Outcome{Measured: 80.1}},
		{nil, Outcome{Missing: true}},
	} {
		got := Judge([]Goal{goal}, []Figure{{Work: "memory", System: "mongoq", PeakRSS: c.rss}}, nil)
		require.Equal(t, []Outcome{c.out}, blank(got))
	}
}

func TestOutcomesAreWrittenWithTheirVerdict(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	require.NoError(t, WriteOutcomes(&b, []Outcome{
		{Goal: aGoal, Measured: 17.254, Low: 16, High: 18, Runs: 3, OK: true},
		{Goal: aGoal, Measured: 0.9499, Low: 0.9499, High: 0.9499, Runs: 1},
		{Goal: aGoal, Missing: true},
		{Goal: limit("memory", 80, "MiB", Ref{}, rateOf), Measured: 95},
	}))
	lines := strings.Split(b.String(), "\n")
	require.Regexp(t, `15x +17\.25x +16\.00x +18\.00x +ok$`, lines[2])
	require.Regexp(t, `15x +0\.950x +short$`, lines[3])
	require.Regexp(t, `15x +- +not measured$`, lines[4])
	require.Regexp(t, `80 MiB +95\.0 MiB +short$`, lines[5])
}

// blank leaves out the goals, whose functions cannot be compared.
func blank(outcomes []Outcome) []Outcome {
	for i := range outcomes {
		outcomes[i].Goal = Goal{}
	}
	return outcomes
}
