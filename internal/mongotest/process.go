package mongotest

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// pollEvery is how often things are looked at that give no notice.
const pollEvery = 5 * time.Millisecond

// launchScript waits for the word that the watchdog knows the process. A parent
// that dies before it gave the word leaves nothing behind.
const launchScript = `read -r go && exec "$@" </dev/null`

// A process is one run of a mongod.
type process struct {
	cmd     *exec.Cmd
	logPath string
	logFrom int64         // where this run's log begins
	done    chan struct{} // closed when the process has ended
	err     error         // how it ended; read it after done
}

// launch starts binary with args. Its output is appended to the file logPath and
// copied to tee, if not nil.
func launch(w *watchdog, binary string, args []string, logPath string, tee io.Writer) (*process, error) {
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of mongod: %w", err)
	}
	defer log.Close()
	info, err := log.Stat()
	if err != nil {
		return nil, fmt.Errorf("log of mongod: %w", err)
	}
	r, gate, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe to mongod: %w", err)
	}
	defer r.Close()
	defer gate.Close()

	cmd := exec.Command("/bin/sh", append([]string{"-c", launchScript, "mongotest-launch", binary}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = r, log, log
	cmd.SysProcAttr = ownGroup()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting mongod: %w", err)
	}
	p := &process{cmd: cmd, logPath: logPath, logFrom: info.Size(), done: make(chan struct{})}
	err = w.add(cmd.Process.Pid)
	if err == nil {
		_, err = io.WriteString(gate, "go\n")
	}
	go func() {
		p.err = cmd.Wait()
		_ = w.remove(cmd.Process.Pid)
		close(p.done)
	}()
	if err != nil {
		p.kill()
		return nil, fmt.Errorf("starting mongod: %w", err)
	}
	if tee != nil {
		go p.follow(tee)
	}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// alive reports whether the process has not ended yet.
func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// kill ends the process at once and waits until it is gone.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails only where the process has ended already
	<-p.done
}

// awaitListening returns when mongod accepts connections. It goes by this
// process's own log, since on the port someone else might answer.
func (p *process) awaitListening(ctx context.Context) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if strings.Contains(strings.ToLower(p.log()), "waiting for connections") {
			return nil
		}
		select {
		case <-p.done:
			return p.startError()
		case <-ctx.Done():
			return fmt.Errorf("mongod did not listen in time: %w%s", context.Cause(ctx), p.tail())
		case <-tick.C:
		}
	}
}

// awaitStopped returns when a process that was sent SIGSTOP stands still, as far as the
// system tells: the signal takes a moment.
func (p *process) awaitStopped() {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for range 200 {
		// The state follows the program's name, which is in parentheses.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid()))
		if err != nil || strings.Contains(string(stat), ") T ") {
			return
		}
		<-tick.C
	}
}

// follow copies the log of this run to w until the process has ended.
func (p *process) follow(w io.Writer) {
	f, err := os.Open(p.logPath)
	if err != nil {
		return
	}
	defer f.Close()
	if _, err := f.Seek(p.logFrom, io.SeekStart); err != nil {
		return
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for ended := false; !ended; {
		select {
		case <-p.done:
			ended = true
		case <-tick.C:
		}
		if _, err := io.Copy(w, f); err != nil {
			return
		}
	}
}
