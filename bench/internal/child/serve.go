package child

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
)

// Task is a kind of work. Its ctx ends when the process is told to stop. It calls [Link.Begin] when it is warm.
type Task func(ctx context.Context, l *Link) (Report, error)

// Link is a process's end of the conversation.
type Link struct {
	Spec Spec

	mu      sync.Mutex // guards what follows
	out     *json.Encoder
	allowed int
	grown   chan struct{} // closed when allowed grows

	started chan struct{}
}

// Serve runs the task that the bench asks for, and returns when the bench has read the report.
func Serve(in io.Reader, out io.Writer, task func(Spec) (Task, error)) error {
	lines := bufio.NewScanner(in)
	if !lines.Scan() {
		return errors.New("no task: this command is for the bench itself")
	}
	l := &Link{out: json.NewEncoder(out), started: make(chan struct{}), grown: make(chan struct{})}
	if err := json.Unmarshal(lines.Bytes(), &l.Spec); err != nil {
		return fmt.Errorf("task: %w", err)
	}
	run, err := task(l.Spec)
	if err != nil {
		l.send(Message{Event: "error", Error: err.Error()})
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	done := make(chan struct{})
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		for lines.Scan() {
			l.hear(lines.Text(), stop)
		}
		select {
		case <-done:
		default:
			os.Exit(1) // the bench is gone
		}
	}()
	report, err := run(ctx, l)
	close(done)
	if err != nil {
		l.send(Message{Event: "error", Error: err.Error()})
		return err
	}
	l.send(Message{Event: "done", Report: &report})
	<-heard
	return nil
}

func (l *Link) hear(line string, stop func()) {
	word, arg, _ := strings.Cut(line, " ")
	switch word {
	case "go":
		close(l.started)
	case "stop":
		stop()
	case "allow":
		n, err := strconv.Atoi(arg)
		if err != nil {
			return
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.allowed = n
		close(l.grown)
		l.grown = make(chan struct{})
	}
}

func (l *Link) send(m Message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.out.Encode(m) // a bench that is gone is noticed at the input
}

// Begin says that the process is ready, waits for the word, and starts measuring.
func (l *Link) Begin() (*Meter, error) {
	l.send(Message{Event: "ready"})
	<-l.started
	return newMeter(l.Spec.Profile, func() { l.send(Message{Event: "over"}) })
}

// Count tells the bench how many jobs are done by now.
func (l *Link) Count(n int) { l.send(Message{Event: "count", Count: n}) }

// Allowed waits until the bench allows more than n, or ctx ends.
func (l *Link) Allowed(ctx context.Context, n int) error {
	for {
		l.mu.Lock()
		ok, grown := l.allowed > n, l.grown
		l.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-grown:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
