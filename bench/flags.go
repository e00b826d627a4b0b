package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/system"
	"github.com/seed-de459a48/mongoq/bench/internal/work"
)

// options are what the command line says.
type options struct {
	works   []work.Work
	systems []system.System
	json    bool
	runs    int
	scale   float64
	limit   time.Duration
	sustain time.Duration
	profile string
}

// parse reads the command line. Errors and help go to out.
func parse(args []string, out io.Writer) (options, error) {
	var o options
	var run, peers string
	set := flag.NewFlagSet("bench", flag.ContinueOnError)
	set.SetOutput(out)
	set.StringVar(&run, "run", "", "the works to measure, set apart by commas; all that need not be named if empty")
	set.StringVar(&peers, "peers", "all", "the systems to compare with: all, none, or names set apart by commas")
	set.BoolVar(&o.json, "json", false, "write one JSON line per figure to stdout, and all else to stderr")
	set.IntVar(&o.runs, "runs", 3, "how often each is measured; the figures are medians")
	set.Float64Var(&o.scale, "scale", 1, "multiplies counts and times; below 1 shows that all works, but measures nothing")
	set.DurationVar(&o.limit, "limit", time.Minute, "a drain that takes longer is stopped and rated by what it did; 0: never")
	set.DurationVar(&o.sustain, "sustain", 10*time.Minute, "how long the sustained work lasts")
	set.StringVar(&o.profile, "cpuprofile", "", "write CPU profiles of our processes to files whose names begin with this")
	set.Usage = func() {
		fmt.Fprintln(out, "usage: go run ./bench [flags]\n\nworks:")
		for _, w := range work.All {
			note := ""
			if w.OnlyNamed {
				note = " (only when named)"
			}
			fmt.Fprintf(out, "  %-10s %s%s\n", w.Name, w.What, note)
		}
		var names []string
		for _, s := range system.All[1:] {
			names = append(names, s.Name)
		}
		fmt.Fprintf(out, "peers: %s\nflags:\n", strings.Join(names, ", "))
		set.PrintDefaults()
	}
	if err := set.Parse(args); err != nil {
		return o, err
	}
	var errWorks, errSystems error
	o.works, errWorks = work.Choose(run)
	o.systems, errSystems = system.Choose(peers)
	errs := []error{errWorks, errSystems}
	if set.NArg() > 0 {
		errs = append(errs, fmt.Errorf("no arguments are taken, got %q", set.Args()))
	}
	if o.runs < 1 {
		errs = append(errs, fmt.Errorf("-runs must be >= 1, got %d", o.runs))
	}
	if !(o.scale > 0 && o.scale <= 100) {
		errs = append(errs, fmt.Errorf("-scale must be above 0 and at most 100, got %g", o.scale))
	}
	if o.limit < 0 {
		errs = append(errs, fmt.Errorf("-limit must be >= 0, got %v", o.limit))
	}
	if o.sustain < time.Second {
		errs = append(errs, fmt.Errorf("-sustain must be >= 1s, got %v", o.sustain))
	}
	return o, errors.Join(errs...)
}
