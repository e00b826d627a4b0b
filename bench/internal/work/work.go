// Package work is what the bench measures: each work in a file of its own.
package work

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

// Work is something that systems are measured at.
type Work struct {
	Name string
	What string

	// OnlyNamed works take so long that they run only when they are named.
	OnlyNamed bool

	// Once works run once, whatever the number of runs.
	Once bool

	trials func(*Env) []trial
}

// trial is one system in one setting.
type trial struct {
	system  system.System
	setting string
	measure func(ctx context.Context) ([]figure.Sample, error)
}

// All are the works, in the order of the table.
var All = []Work{
	{Name: "drain", What: "a pool drains 100,000 no-op jobs", trials: drainTrials},
	{Name: "push", What: "64 and 256 goroutines call Push", trials: pushTrials},
	{Name: "pushmany", What: "PushMany of 1,000", trials: pushManyTrials},
	{Name: "reserve", What: "64 goroutines call Reserve, then Commit", trials: reserveTrials},
	{Name: "single", What: "one goroutine, one call at a time", trials: singleTrials},
	{Name: "processes", What: "several processes on one queue", trials: processesTrials},
	{Name: "backlog", What: "a pool drains 100,000 jobs beside many others", trials: backlogTrials},
	{Name: "queues", What: "200 queues in one process", trials: queuesTrials},
	{Name: "latency", What: "from a push to the start of its handler in another process", trials: latencyTrials},
	{Name: "idle", What: "what a worker on an empty queue costs", trials: idleTrials},
	{Name: "memory", What: "what a process holds that drains 500,000 jobs", trials: memoryTrials},
	{Name: "sustained", What: "producers and a pool together, for -sustain", OnlyNamed: true, Once: true, trials: sustainedTrials},
	{Name: "pipeline", What: "100,000 envelopes through three stages that do nothing", trials: pipelineTrials},
	{Name: "history", What: "keeping and forgetting finished jobs", OnlyNamed: true, trials: historyTrials},
}

// Choose gives the works that a list names, set apart by commas; all that need not be named if it is empty.
func Choose(list string) ([]Work, error) {
	var chosen []Work
	if list == "" {
		for _, w := range All {
			if !w.OnlyNamed {
				chosen = append(chosen, w)
			}
		}
		return chosen, nil
	}
	named := map[string]bool{}
	for name := range strings.SplitSeq(list, ",") {
		named[strings.TrimSpace(name)] = true
	}
	var names []string
	for _, w := range All {
		names = append(names, w.Name)
		if !named[w.Name] {
			continue
		}
		chosen = append(chosen, w)
		delete(named, w.Name)
	}
	for name := range named {
		return nil, fmt.Errorf("there is no work %q; there are %s", name, strings.Join(names, ", "))
	}
	return chosen, nil
}

// Unnamed are those that a list of works leaves out because nobody has named them; none if somebody has chosen.
func Unnamed(chosen []Work) []Work {
	var left []Work
	for _, w := range All {
		in := slices.ContainsFunc(chosen, func(c Work) bool { return c.Name == w.Name })
		switch {
		case in == w.OnlyNamed:
			return nil
		case !in:
			left = append(left, w)
		}
	}
	return left
}

// Measure runs a work: all its trials once, then all again in the opposite order, and so on, so that what changes with
// time, and what one leaves to the next, meets every system. It returns what it has when ctx ends. A trial that fails is
// noted, and tried once more; when it fails again, that is all of it.
func (e *Env) Measure(ctx context.Context, w Work) []figure.Figure {
	trials := w.trials(e)
	samples := make([][][]figure.Sample, len(trials))
	failed := make([]bool, len(trials))
	runs := e.Runs
	if w.Once {
		runs = 1
	}
	e.others = 0
	for run := range runs {
		for i := range trials {
			if run%2 == 1 {
				i = len(trials) - 1 - i
			}
			t := trials[i]
			if failed[i] || ctx.Err() != nil {
				continue
			}
			name := strings.TrimSpace(fmt.Sprintf("%s %s %s", w.Name, t.system.Name, t.setting))
			got, err := t.measure(ctx)
			if err != nil && ctx.Err() == nil && !errors.Is(err, system.ErrMissing) {
				e.Note("%s failed, and was tried once more: %v", name, err)
				got, err = t.measure(ctx)
			}
			if ctx.Err() != nil {
				continue
			}
			if errors.Is(err, system.ErrMissing) {
				failed[i] = true
				e.Note("%s: not measured: %v", t.system.Name, err)
				continue
			}
			if err != nil {
				failed[i] = true
				e.Failed = true
				e.Note("%s failed: %v", name, err)
				e.Progress("%s, run %d of %d: failed: %v", name, run+1, runs, err)
				continue
			}
			samples[i] = append(samples[i], got)
			e.Progress("%s, run %d of %d: %s %s", name, run+1, runs, figure.Number(got[0].Rate), got[0].Unit)
			for _, s := range got {
				if s.Note != "" {
					e.Note("%s: %s", name, s.Note)
				}
			}
		}
	}
	if e.others > 0.1 {
		e.Note("%s: other programs, or other machines of this host, took up to %.0f %% of the processors", w.Name, 100*e.others)
	}
	var figures []figure.Figure
	for i, t := range trials {
		figures = append(figures, figure.Collect(w.Name, t.system.Name, samples[i])...)
	}
	return figures
}
