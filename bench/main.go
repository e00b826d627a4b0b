// Command bench measures mongoq against other queues, on servers that it starts itself. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
	"github.com/seed-de459a48/mongoq/bench/internal/task"
	"github.com/seed-de459a48/mongoq/bench/internal/work"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == system.ChildCommand {
		exit(child.Serve(os.Stdin, os.Stdout, task.Find), 1)
	}
	o, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		exit(err, 2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, o)
	stop()
	exit(err, 1)
}

// exit ends the program, with the code if there is an error.
func exit(err error, code int) {
	if err == nil {
		os.Exit(0)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(code)
}

// run measures and reports. What was measured before an interrupt is reported, too.
func run(ctx context.Context, o options) error {
	text := io.Writer(os.Stdout)
	if o.json {
		text = os.Stderr
	}
	env := &work.Env{
		Runs: o.runs, Scale: o.scale, Limit: o.limit, Sustain: o.sustain, Systems: o.systems,
		Progress: func(format string, args ...any) {
			fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
		},
	}
	if o.profile != "" {
		// The processes may be elsewhere.
		path, err := filepath.Abs(o.profile)
		if err != nil {
			return err
		}
		env.Profile = path
	}
	var left []string
	for _, w := range work.Unnamed(o.works) {
		left = append(left, w.Name)
	}
	if len(left) > 0 {
		env.Note("not run, since they take long: -run %s", strings.Join(left, ","))
	}
	for _, n := range oddities() {
		env.Note("%s", n)
	}
	var figures []figure.Figure
	for _, w := range o.works {
		got := env.Measure(ctx, w)
		figures = append(figures, got...)
		if o.json {
			// At once: a long bench may be cut short.
			if err := figure.WriteJSON(os.Stdout, got); err != nil {
				return err
			}
		}
	}
	if err := report(text, env, figures, left); err != nil {
		return err
	}
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted: not all was measured")
	case env.Failed:
		return errors.New("not all was measured: see the notes")
	}
	return nil
}
