package main

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDefaults(t *testing.T) {
	t.Parallel()
	o, err := parse(nil, io.Discard)
	require.NoError(t, err)
	require.Equal(t, 3, o.runs)
	require.Equal(t, 1.0, o.scale)
	require.Equal(t, time.Minute, o.limit)
	require.Equal(t, 10*time.Minute, o.sustain)
	require.Len(t, o.systems, 9)
	require.NotEmpty(t, o.works)
	require.False(t, o.json)
}

func TestFlags(t *testing.T) {
	t.Parallel()
	o, err := parse([]string{"-run", "drain,push", "-peers", "none", "-runs", "1", "-scale", "0.02", "-json", "-limit", "0"}, io.Discard)
	require.NoError(t, err)
	require.Len(t, o.works, 2)
	require.Len(t, o.systems, 1)
	require.True(t, o.json)
	require.Zero(t, o.limit)
}

func TestFlagsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-run", "dance"}, {"-peers", "kafka"}, {"-runs", "0"}, {"-scale", "0"}, {"-scale", "NaN"}, {"-limit", "-1s"},
		{"-sustain", "1ms"}, {"drain"}, {"-nonsense"},
	} {
		_, err := parse(args, io.Discard)
		require.Error(t, err, "%v", args)
	}
}
