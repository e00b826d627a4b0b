package figure

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{nil, 0},
		{[]float64{7}, 7},
		{[]float64{9, 1, 5}, 5},
		{[]float64{9, 1, 5, 6}, 5.5},
	} {
		require.Equal(t, c.want, Median(c.values), "%v", c.values)
	}
}

func TestMedianLeavesItsInputAsItIs(t *testing.T) {
	t.Parallel()
	values := []float64{3, 1, 2}
	Median(values)
	require.Equal(t, []float64{3, 1, 2}, values)
}

func TestSpread(t *testing.T) {
	t.Parallel()
	require.Zero(t, Spread(nil))
	require.Zero(t, Spread([]float64{5}))
	require.Zero(t, Spread([]float64{0, 0}), "no median to divide by")
	require.InDelta(t, 0.4, Spread([]float64{12, 8, 10}), 1e-9)
}

func TestPercentileIsTheNearestRank(t *testing.T) {
	t.Parallel()
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	require.Equal(t, 50.0, Percentile(hundred, 50))
	require.Equal(t, 99.0, Percentile(hundred, 99))
	require.Equal(t, 100.0, Percentile(hundred, 100))
	require.Equal(t, 1.0, Percentile(hundred, 0))
	require.Equal(t, 4.0, Percentile([]float64{4}, 99))
	require.Equal(t, 2.0, Percentile([]float64{1, 2}, 99), "the worst of few")
	require.Zero(t, Percentile(nil, 50))
}

func TestRoundKeepsFourDigits(t *testing.T) {
	t.Parallel()
	require.Equal(t, 12346.0, round(12345.6))
	require.Equal(t, 1.235, round(1.23456))
	require.Equal(t, 0.001235, round(0.00123456))
	require.Equal(t, -1.235, round(-1.23456))
	require.Zero(t, round(0))
}
