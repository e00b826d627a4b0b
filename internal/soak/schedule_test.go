package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestScheduleFollowsFromTheSeed(t *testing.T) {
	t.Parallel()
	one := schedule(7, 10*time.Minute, 3, 5)
	require.Equal(t, one, schedule(7, 10*time.Minute, 3, 5))
	require.NotEqual(t, one, schedule(8, 10*time.Minute, 3, 5))

	kinds := map[string]bool{}
	for i, f := range one {
		require.Equal(t, i+1, f.N)
		require.Less(t, f.At+f.For, 10*time.Minute)
		if i > 0 {
			require.GreaterOrEqual(t, f.At, one[i-1].At)
		}
		require.NotEmpty(t, f.String())
		kinds[f.Kind] = true
	}
	for _, track := range tracks {
		for _, k := range track.kinds {
			require.Contains(t, kinds, k)
		}
	}
}

func TestScheduleOfOneNodeHasNoOther(t *testing.T) {
	t.Parallel()
	for _, f := range schedule(1, 10*time.Minute, 1, 2) {
		switch f.Kind {
		case faultKill, faultPause, faultClock:
			require.Contains(t, []int{0, 1}, f.Target)
		default:
			require.Equal(t, primaryNode, f.Target)
		}
	}
}
