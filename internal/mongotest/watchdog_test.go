//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package mongotest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const childVariable = "MONGOTEST_CHILD"

// running reports whether a process runs. A zombie, which only waits for its parent to
// notice, does not.
func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err == nil {
		return !strings.Contains(string(stat), ") Z ")
	}
	return syscall.Kill(pid, 0) == nil
}

// TestChild is not a test: it is the process that TestDiesWithParent kills.
func TestChild(t *testing.T) {
	if os.Getenv(childVariable) == "" {
		t.Skip("only run by TestDiesWithParent")
	}
	s, err := Start(t.Context(), Options{ReplicaSet: 1})
	require.NoError(t, err)
	require.NoError(t, s.Node(0).Restart(t.Context())) // what was restarted is watched as well
	require.NoError(t, s.Node(0).Pause())              // so is what cannot end by itself
	fmt.Println("started", s.Node(0).proc.pid(), s.dir)
	_, _ = io.Copy(io.Discard, os.Stdin) // does not end before its parent does
}

func TestDiesWithParent(t *testing.T) {
	t.Parallel()
	turns.take(t, privateServer)
	child := exec.Command(os.Args[0], "-test.run=^TestChild$")
	child.Env = append(os.Environ(), childVariable+"=1")
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	in, err := child.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	require.NoError(t, child.Start())
	defer child.Wait() //nolint:errcheck // it is killed
	defer child.Process.Kill()

	var pid int
	var dir string
	lines := bufio.NewScanner(out)
	for pid == 0 && lines.Scan() {
		_, _ = fmt.Sscanf(lines.Text(), "started %d %s", &pid, &dir)
	}
	require.NotZero(t, pid, "the child started no server")
	require.True(t, running(pid))
	require.DirExists(t, dir)

	require.NoError(t, child.Process.Kill())
	require.Eventually(t, func() bool { return !running(pid) }, 10*time.Second, 5*time.Millisecond)
	require.Eventually(t, func() bool {
		_, err := os.Stat(dir)
		return os.IsNotExist(err)
	}, 10*time.Second, 5*time.Millisecond)
}

// Ctrl-C in a terminal goes to the process group in the foreground.
func TestOwnProcessGroup(t *testing.T) {
	t.Parallel()
	s := Private(t, Options{})
	for _, pid := range []int{s.Node(0).proc.pid(), s.dog.cmd.Process.Pid} {
		group, err := syscall.Getpgid(pid)
		require.NoError(t, err)
		require.Equal(t, pid, group)
	}
}

// The parent may die when mongod's process is there but the watchdog does not know it yet.
func TestLaunchNeedsTheWord(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("/bin/sh", "-c", launchScript, "launch", "echo", "started")
	out, err := cmd.Output() // its standard input is empty
	require.Error(t, err)
	require.Empty(t, out)
}

func TestWatchdogForgets(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, err := watch(dir)
	require.NoError(t, err)
	kept, forgotten := exec.Command("sleep", "1000"), exec.Command("sleep", "1000")
	for _, c := range []*exec.Cmd{kept, forgotten} {
		require.NoError(t, c.Start())
		defer c.Wait() //nolint:errcheck // it is killed
		defer c.Process.Kill()
		require.NoError(t, w.add(c.Process.Pid))
	}
	require.NoError(t, w.remove(forgotten.Process.Pid))
	w.close()
	require.NoDirExists(t, dir)
	require.ErrorContains(t, kept.Wait(), "signal: killed")
	require.True(t, running(forgotten.Process.Pid))
	require.Error(t, w.add(1), "it has ended")
}
