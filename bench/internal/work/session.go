package work

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/proc"
	"github.com/seed-de459a48/mongoq/bench/internal/server"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

// queueName is the queue of every work, or the beginning of the names of several.
const queueName = "jobs"

// session is a system on a new server of its own.
type session struct {
	env     *Env
	system  system.System
	server  server.Server
	command proc.Command
}

func (e *Env) open(ctx context.Context, sys system.System) (*session, error) {
	tell := func(what string) { e.Progress("%s: %s", sys.Name, what) }
	command, err := sys.Command(ctx, tell)
	if err != nil {
		return nil, err
	}
	srv, err := sys.Start(ctx, func(what string) {
		if strings.HasPrefix(what, "fetching") { // that it starts goes without saying
			tell(what)
		}
	})
	if err != nil {
		return nil, err
	}
	for _, version := range []string{srv.Version(), sys.Runtime()} {
		if version != "" && !slices.Contains(e.Versions, version) {
			e.Versions = append(e.Versions, version)
		}
	}
	s := &session{env: e, system: sys, server: srv, command: command}
	if sys.Prepare != "" {
		if _, err := s.do(ctx, child.Spec{Task: sys.Prepare}); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

func (s *session) close() { s.server.Stop() }

// start starts a process and waits until it is ready.
func (s *session) start(ctx context.Context, spec child.Spec) (*proc.Child, error) {
	spec.System, spec.URI, spec.Queue = s.system.Client, s.server.URI(), queueName
	c, err := proc.Start(ctx, s.command, spec)
	if err != nil {
		return nil, err
	}
	if err := c.Ready(ctx); err != nil {
		c.Kill()
		return nil, err
	}
	return c, nil
}

// longest is how long a process may take in all before it is held to hang.
const longest = 30 * time.Minute

// do runs a task that is not measured.
func (s *session) do(ctx context.Context, spec child.Spec) (proc.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	c, err := s.start(ctx, spec)
	if err != nil {
		return proc.Result{}, err
	}
	defer c.Kill()
	if err := c.Go(); err != nil {
		return proc.Result{}, err
	}
	return c.Wait(ctx)
}

// fill stores jobs.
func (s *session) fill(ctx context.Context, spec child.Spec) error {
	spec.Task = "fill"
	_, err := s.do(ctx, spec)
	return err
}

// finished checks that no more jobs are left than may be: each was done, and none counted twice.
func (s *session) finished(ctx context.Context, spec child.Spec, rest int) error {
	left, err := s.do(ctx, child.Spec{Task: "left", Queues: spec.Queues, Stage: spec.Stage, History: spec.History})
	if err == nil && left.Jobs > rest {
		err = fmt.Errorf("%d jobs are left that were counted as done", left.Jobs-rest)
	}
	return err
}

// outcome is what measured processes came to together.
type outcome struct {
	jobs      int
	elapsed   time.Duration // until all was settled
	toHandled time.Duration // until the last job was handled
	results   []proc.Result
	serverCPU float64
}

// bill is what the server and the whole machine spend while something is measured.
type bill struct {
	server, machine float64 // CPU seconds
	at              time.Time
}

func (s *session) bill() (b bill, err error) {
	if b.server, err = s.server.CPU(); err != nil {
		return b, fmt.Errorf("the server's CPU time: %w", err)
	}
	b.machine, err = proc.Busy()
	b.at = time.Now()
	return b, err
}

// settle gives what the server has spent between two bills, and notes what neither it nor the clients have.
func (e *Env) settle(before, after bill, clients float64) (server float64) {
	server = after.server - before.server
	if took := after.at.Sub(before.at); took > time.Second { // less is too short for the kernel's ticks
		others := after.machine - before.machine - server - clients
		e.others = max(e.others, others/took.Seconds()/float64(runtime.NumCPU()))
	}
	return server
}

// measure runs processes at once, each with its spec, and waits for all.
func (s *session) measure(ctx context.Context, specs ...child.Spec) (outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	if err := s.server.Settle(ctx); err != nil {
		return outcome{}, fmt.Errorf("settling the server: %w", err)
	}
	var children []*proc.Child
	defer func() {
		for _, c := range children {
			c.Kill()
		}
	}()
	for _, spec := range specs {
		c, err := s.start(ctx, spec)
		if err != nil {
			return outcome{}, err
		}
		children = append(children, c)
	}
	before, err := s.bill()
	if err != nil {
		return outcome{}, err
	}
	for _, c := range children {
		if err := c.Go(); err != nil {
			return outcome{}, err
		}
	}
	if specs[0].Shared {
		stopWhenDone(ctx, children, specs[0].Jobs)
	}
	for _, c := range children {
		c.Over(ctx)
	}
	after, errAfter := s.bill() // before they close what they have opened
	o, err := gather(ctx, children)
	if err == nil {
		err = errAfter // a server that has ended has done less than it could
	}
	if err != nil {
		return outcome{}, err
	}
	o.serverCPU = s.env.settle(before, after, o.clientCPU())
	return o, nil
}

// stopWhenDone stops processes that share jobs when together they have counted all of them, or when one has ended.
func stopWhenDone(ctx context.Context, children []*proc.Child, jobs int) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for sum, ended := 0, false; sum < jobs && !ended && ctx.Err() == nil; <-tick.C {
		sum = 0
		for _, c := range children {
			sum += c.Count()
			ended = ended || c.Ended()
		}
	}
	for _, c := range children {
		_ = c.Stop() // one that has ended says why
	}
}

// gather waits for all reports and sums them up.
func gather(ctx context.Context, children []*proc.Child) (outcome, error) {
	var o outcome
	var errs []error
	for _, c := range children {
		r, err := c.Wait(ctx)
		errs = append(errs, err)
		o.results = append(o.results, r)
	}
	o.sum()
	return o, errors.Join(errs...)
}

// sum sets what is the sum, or the span, of the results.
func (o *outcome) sum() {
	var start, end, handled int64
	o.jobs = 0
	for i, r := range o.results {
		last := r.Start + r.ToHandled().Nanoseconds()
		if r.Jobs == 0 && r.Handled == 0 {
			last = r.Start // it has handled none
		}
		if i == 0 || r.Start < start {
			start = r.Start
		}
		end, handled = max(end, r.End), max(handled, last)
		o.jobs += r.Jobs
	}
	o.elapsed, o.toHandled = time.Duration(end-start), time.Duration(handled-start)
}

// clientCPU is what all clients have spent.
func (o *outcome) clientCPU() (sum float64) {
	for _, r := range o.results {
		sum += r.CPU
	}
	return sum
}

// sample is the rate over the given time, with its costs.
func (o *outcome) sample(setting string, over time.Duration) figure.Sample {
	s := figure.Sample{Setting: setting, Unit: "jobs/s", ClientCPU: new(o.clientCPU()), ServerCPU: &o.serverCPU}
	if over > 0 {
		s.Rate = float64(o.jobs) / over.Seconds()
	}
	var rss float64
	for _, r := range o.results {
		rss = max(rss, r.PeakRSS)
	}
	if rss > 0 {
		s.PeakRSS = &rss
	}
	if r := o.results[0]; len(o.results) == 1 && r.Timed > 0 {
		s.P50, s.P95, s.P99 = &r.P50, &r.P95, &r.P99
	}
	return s
}
