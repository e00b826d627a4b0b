package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// leashScript runs a server until its input ends, which it does with the bench even when that is killed; then it ends
// the server and removes its folder.
const leashScript = `
log=$1 dir=$2 signal=$3
shift 3
"$@" </dev/null >"$log" 2>&1 &
pid=$!
echo "$pid"
read -r word
kill -s "$signal" "$pid" 2>/dev/null
wait "$pid"
rm -rf -- "$dir"
`

// leash holds a server program.
type leash struct {
	cmd *exec.Cmd
	in  io.Closer
	pid int // the server's
	log string
}

// hold starts a program as the given account, nil for one's own. signal is what ends it.
func hold(dir, signal string, account *syscall.Credential, program string, args ...string) (*leash, error) {
	l := &leash{log: filepath.Join(dir, "log")}
	l.cmd = exec.Command("/bin/sh", append([]string{"-c", leashScript, "leash", l.log, dir, signal, program}, args...)...)
	l.cmd.Dir = os.TempDir()                                                     // the account may not look into the bench's own
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: account} // a Ctrl-C is the bench's
	in, err := l.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := l.cmd.Start(); err != nil {
		return nil, err
	}
	l.in = in
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil {
		l.pid, err = strconv.Atoi(strings.TrimSpace(line))
	}
	if err != nil {
		l.stop()
		return nil, fmt.Errorf("%s: %w", filepath.Base(program), err)
	}
	return l, nil
}

func (l *leash) stop() {
	l.in.Close()
	_ = l.cmd.Wait()
}

// logged is the end of what the server logged, to be put behind an error.
func (l *leash) logged() string {
	text, _ := os.ReadFile(l.log)
	text = text[max(0, len(text)-2000):]
	return strings.TrimSpace("\n" + string(text))
}

// poll repeats a check until it succeeds, ctx ends or 15 s have passed.
func poll(ctx context.Context, check func() error) error {
	end := time.Now().Add(15 * time.Second)
	for {
		err := check()
		if err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

var errNoAccount = errors.New("root may not run PostgreSQL, and there is no account postgres or nobody")
