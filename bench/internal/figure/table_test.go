package figure

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNumber(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{
		0: "0", 0.256: "0.26", 9.99: "9.99", 12.34: "12.3", 999.6: "1,000", 12345.6: "12,346", 1234567: "1,234,567",
		-1234: "-1,234", -0.5: "-0.50",
	} {
		require.Equal(t, want, Number(v))
	}
	require.Equal(t, "100,000", Count(100_000))
	require.Equal(t, "64", Count(64))
}

func TestTheTableAlignsItsColumns(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	require.NoError(t, WriteTable(&b, []Figure{
		{Work: "drain", System: "mongoq", Setting: "64 workers", Rate: 12345, Unit: "jobs/s", Runs: 3, Spread: 0.051},
		{Work: "latency", System: "asynq-noaof", Setting: "20 a second", Rate: 20, Unit: "pushes/s", P50: new(1.25), Runs: 3},
	}))
	lines := strings.Split(b.String(), "\n")
	require.Len(t, lines, 5)
	end := strings.Index(lines[0], "rate") + len("rate")
	require.True(t, strings.HasSuffix(lines[2][:end], " 12,345"), lines[2])
	require.True(t, strings.HasSuffix(lines[3][:end], " 20.0"), lines[3])
	require.True(t, strings.HasSuffix(lines[2], "5%"), lines[2])
	require.Contains(t, lines[3], "1.25")
}
