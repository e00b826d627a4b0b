package mongotest

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
)

// watchScript reads "+ pid" and "- pid" until its standard input ends, which it
// does when the parent dies, then kills what is left and removes the folder.
// The folder is removed in a loop: a process that was just killed may still be
// finishing a write into it.
const watchScript = `
trap '' INT TERM HUP QUIT PIPE
pids=
while read -r op pid; do
	case $op in
	+) pids="$pids $pid" ;;
	-)
		left=
		for p in $pids; do [ "$p" = "$pid" ] || left="$left $p"; done
		pids=$left
		;;
	esac
done
for p in $pids; do kill -9 "$p"; done
i=0
while [ -e "$1" ] && [ $i -lt 200 ]; do
	rm -rf -- "$1"
	[ -e "$1" ] && sleep 0.05
	i=$((i + 1))
done
`

// A watchdog outlives this process for as long as it takes to clean up after it.
type watchdog struct {
	cmd *exec.Cmd

	mu   sync.Mutex // guards pipe
	pipe *os.File   // the write end; no other process ever has it
}

// watch starts a watchdog for dir, which need not exist yet.
func watch(dir string) (*watchdog, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe to the watchdog: %w", err)
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", watchScript, "mongotest-watchdog", dir)
	// It must not hold the test's output open: "go test" waits for its end.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = r, nil, nil
	cmd.Dir = "/"
	cmd.SysProcAttr = ownGroup()
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("starting the watchdog: %w", err)
	}
	return &watchdog{cmd: cmd, pipe: w}, nil
}

// add makes the watchdog kill pid when this process is gone.
func (w *watchdog) add(pid int) error { return w.tell('+', pid) }

// remove makes the watchdog forget pid, which has been waited for: the system
// may give the number to another process.
func (w *watchdog) remove(pid int) error { return w.tell('-', pid) }

func (w *watchdog) tell(op rune, pid int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := fmt.Fprintf(w.pipe, "%c %d\n", op, pid); err != nil {
		return fmt.Errorf("telling the watchdog: %w", err)
	}
	return nil
}

// close lets the watchdog do its work and waits for its end.
func (w *watchdog) close() {
	w.mu.Lock()
	w.pipe.Close()
	w.mu.Unlock()
	_ = w.cmd.Wait() // its status says nothing: kill fails for what is dead already
}
