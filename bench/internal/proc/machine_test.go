package proc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBusyIsAllButIdle(t *testing.T) {
	t.Parallel()
	got, err := parseBusy("cpu  100 20 30 9999 8888 4 5 600 77 88\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
	require.NoError(t, err)
	require.InDelta(t, 7.59, got, 1e-9)
	for _, bad := range []string{"", "cpu 1 2 3", "cpu0 1 2 3 4 5 6 7 8 9 10", "cpu a 2 3 4 5 6 7 8"} {
		_, err := parseBusy(bad)
		require.Error(t, err, bad)
	}
	_, err = Busy()
	require.NoError(t, err)
}
