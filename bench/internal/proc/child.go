package proc

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// Command is how a system's processes are started.
type Command struct {
	Path string
	Args []string
	Dir  string
}

// Child is a process that does a task.
type Child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Scanner
	errs  *tail
	what  string
	count atomic.Int64

	result chan result
	ready  chan struct{}
	over   chan struct{} // closed when what is measured is done, or the process has ended
}

// Result is what a task came to.
type Result struct {
	child.Report
	PeakRSS float64 // MiB; 0: unknown
}

type result struct {
	Result
	err error
}

// Start starts a process and tells it its task. It is killed when ctx ends.
func Start(ctx context.Context, command Command, spec child.Spec) (*Child, error) {
	c := &Child{
		cmd:    exec.CommandContext(ctx, command.Path, command.Args...),
		errs:   &tail{},
		what:   spec.System + " " + spec.Task,
		result: make(chan result, 1),
		ready:  make(chan struct{}),
		over:   make(chan struct{}),
	}
	c.cmd.Dir = command.Dir
	c.cmd.Stderr = c.errs
	c.cmd.WaitDelay = 5 * time.Second
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("%s: %w", c.what, err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.what, err)
	}
	c.out = bufio.NewScanner(out)
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", c.what, err)
	}
	go c.listen()
	line, err := json.Marshal(spec)
	if err == nil {
		err = c.Tell(string(line))
	}
	if err != nil {
		c.Kill()
		return nil, fmt.Errorf("%s: %w", c.what, err)
	}
	return c, nil
}

// listen reads what the process says until it has ended.
func (c *Child) listen() {
	var r result
	var said bool
	over := sync.OnceFunc(func() { close(c.over) })
	defer over()
	for c.out.Scan() {
		var m child.Message
		if err := json.Unmarshal(c.out.Bytes(), &m); err != nil {
			_, _ = c.errs.Write(append(c.out.Bytes(), '\n')) // not for us: a library that prints
			continue
		}
		switch m.Event {
		case "ready":
			close(c.ready)
		case "count":
			c.count.Store(int64(m.Count))
		case "error":
			r.err, said = errors.New(m.Error), true
			c.in.Close()
		case "over":
			over()
		case "done":
			over()
			if m.Report != nil {
				r.Report, said = *m.Report, true
			}
			r.PeakRSS, _ = peakRSS(c.cmd.Process.Pid)
			c.in.Close()
		}
	}
	err := c.cmd.Wait()
	if r.err == nil && (err != nil || !said) {
		r.err = fmt.Errorf("it ended without a report: %w", errors.Join(err, c.out.Err()))
	}
	if r.err != nil {
		r.err = fmt.Errorf("%s: %w%s", c.what, r.err, c.errs.text())
	}
	c.result <- r
}

// Ready waits until the process is connected and warm.
func (c *Child) Ready(ctx context.Context) error {
	select {
	case <-c.ready:
		return nil
	case r := <-c.result:
		c.result <- r
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Go tells the process to begin.
func (c *Child) Go() error { return c.Tell("go") }

// Stop tells the process to end its task.
func (c *Child) Stop() error { return c.Tell("stop") }

// Tell sends a line.
func (c *Child) Tell(line string) error {
	_, err := io.WriteString(c.in, line+"\n")
	return err
}

// Count is what the process counted last.
func (c *Child) Count() int { return int(c.count.Load()) }

// Ended tells whether the process has reported or failed.
func (c *Child) Ended() bool { return len(c.result) > 0 }

// Over waits until the process has done what is measured, or has ended.
func (c *Child) Over(ctx context.Context) {
	select {
	case <-c.over:
	case <-ctx.Done():
	}
}

// Wait waits for the report.
func (c *Child) Wait(ctx context.Context) (Result, error) {
	select {
	case r := <-c.result:
		c.result <- r
		return r.Result, r.err
	case <-ctx.Done():
		return Result{}, ctx.Err()
	}
}

// Kill ends the process at once and waits for that. One that has ended stays so.
func (c *Child) Kill() {
	_ = c.cmd.Process.Kill()
	c.result <- <-c.result
}
