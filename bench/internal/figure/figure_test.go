package figure

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCollectTakesMediansOverTheRunsOfASetting(t *testing.T) {
	t.Parallel()
	run := func(rate, cpu float64) []Sample {
		return []Sample{
			{Setting: "a", Unit: "jobs/s", Rate: rate, ClientCPU: &cpu},
			{Work: "cost", Setting: "a", Unit: "us/job", Rate: 2 * rate},
		}
	}
	figures := Collect("drain", "mongoq", [][]Sample{run(100, 1), run(300, 3), run(200, 2)})
	require.Len(t, figures, 2)
	require.Equal(t, Figure{
		Work: "drain", System: "mongoq", Setting: "a", Unit: "jobs/s", Rate: 200, Runs: 3, Spread: 1, ClientCPU: new(2.0),
		rates: []float64{100, 300, 200},
	}, figures[0])
	require.Equal(t, "cost", figures[1].Work)
	require.Equal(t, 400.0, figures[1].Rate)
}

func TestMemoryIsTheMostOfAllRuns(t *testing.T) {
	t.Parallel()
	run := func(rss float64) []Sample { return []Sample{{Setting: "a", PeakRSS: &rss}} }
	require.Equal(t, 95.0, *Collect("memory", "mongoq", [][]Sample{run(78), run(95), run(79)})[0].PeakRSS)
}

func TestCollectOfNothingIsNothing(t *testing.T) {
	t.Parallel()
	require.Empty(t, Collect("drain", "plain", nil))
}

func TestThePacesSpreadIsThatOfTheLatency(t *testing.T) {
	t.Parallel()
	run := func(p99 float64) []Sample {
		return []Sample{{Setting: "20 a second", Rate: 20, Paced: true, P99: &p99}}
	}
	f := Collect("latency", "mongoq", [][]Sample{run(10), run(20), run(15)})[0]
	require.InDelta(t, 10.0/15, f.Spread, 1e-3)
	require.Equal(t, 15.0, *f.P99)
}

func TestJSONIsOneLinePerFigureWithAllFields(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	require.NoError(t, WriteJSON(&b, []Figure{
		{Work: "drain", System: "mongoq", Setting: "64 workers", Rate: 12, Unit: "jobs/s", Runs: 3, Spread: 0.1},
		{Work: "latency", System: "river", Setting: "delayed", P50: new(1.5)},
	}))
	lines := bytes.Split(bytes.TrimSpace(b.Bytes()), []byte("\n"))
	require.Len(t, lines, 2)
	for _, line := range lines {
		var fields map[string]any
		require.NoError(t, json.Unmarshal(line, &fields))
		for _, name := range []string{
			"work", "system", "setting", "rate", "unit", "p50_ms", "p95_ms", "p99_ms",
			"client_cpu_s", "server_cpu_s", "peak_rss_mib", "runs", "spread",
		} {
			require.Contains(t, fields, name)
		}
		require.Len(t, fields, 13)
	}
}
