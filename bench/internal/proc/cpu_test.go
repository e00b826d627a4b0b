package proc

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseStat(t *testing.T) {
	t.Parallel()
	const line = "42 (a (strange) name) S 7 42 42 0 -1 4194304 100 200 0 0 11 22 33 44 20 0 1 0 12345 1000 10"
	s, err := parseStat(line)
	require.NoError(t, err)
	require.Equal(t, stat{pid: 42, parent: 7, ticks: 11 + 22 + 33 + 44}, s)
	s, err = parseStat(strings.Replace(line, ") S", ") Z", 1))
	require.NoError(t, err)
	require.True(t, s.dead)
	for _, bad := range []string{"", "42 name S 7", "42 (name) S 7 1", "x (name) S 7 42 42 0 -1 4 100 200 0 0 11 22 33 44 20"} {
		_, err := parseStat(bad)
		require.Error(t, err, bad)
	}
}

func TestTicksAreSummedOverTheTree(t *testing.T) {
	t.Parallel()
	root := stat{pid: 1, ticks: 1}
	children := map[int][]stat{
		1: {{pid: 2, parent: 1, ticks: 10}, {pid: 3, parent: 1, ticks: 100}},
		3: {{pid: 4, parent: 3, ticks: 1000}},
		9: {{pid: 5, parent: 9, ticks: 5}},
	}
	require.Equal(t, 1111, sumTicks(root, children))
}

func TestTreeCPUOfNoProcess(t *testing.T) {
	t.Parallel()
	_, err := TreeCPU(1 << 30)
	require.ErrorIs(t, err, os.ErrProcessDone)
}

func TestParseHighWater(t *testing.T) {
	t.Parallel()
	mib, err := parseHighWater("Name:\tbench\nVmPeak:\t  999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 10 kB\n")
	require.NoError(t, err)
	require.Equal(t, 2.0, mib)
	_, err = parseHighWater("Name:\tbench\n")
	require.Error(t, err)
	_, err = parseHighWater("VmHWM:\tmuch kB\n")
	require.Error(t, err)
}

func TestTailKeepsTheEnd(t *testing.T) {
	t.Parallel()
	var tl tail
	require.Empty(t, tl.text())
	for range 1000 {
		_, _ = tl.Write([]byte("0123456789"))
	}
	_, _ = tl.Write([]byte("the end\n"))
	require.LessOrEqual(t, len(tl.text()), tailSize+1)
	require.Regexp(t, "the end$", tl.text())
}
