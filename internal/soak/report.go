package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// report prints the figures.
func report(out io.Writer, f figures) {
	list := func(m map[string]int) string {
		var s []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			s = append(s, fmt.Sprintf("%s %d", k, m[k]))
		}
		return strings.Join(s, ", ")
	}
	explained := 0
	for _, n := range f.Explained {
		explained += n
	}
	sum := 0
	for _, n := range f.Faults {
		sum += n
	}
	fmt.Fprintf(out, "\njobs          %d acknowledged, %d unknown, %d refused\n", f.Jobs, f.Unknown, f.Refused)
	fmt.Fprintf(out, "ended         %d done, %d in the history, %d dead, %d parts, %d past their deadline, %d popped by who was killed\n",
		f.Done, f.Kept, f.Dead, f.Parts, f.Expired, f.Popped)
	fmt.Fprintf(out, "beside        %d joins, %d redriven, %d replays, %d pauses\n", f.Forks, f.Redriven, f.Replays, f.Pauses)
	fmt.Fprintf(out, "deliveries    %d, with %d effects; %d verbs lost their lease, %d their answer\n", f.Deliveries, f.Effects, f.Lost, f.UnknownVerbs)
	fmt.Fprintf(out, "transactions  %d\n", f.Transactions)
	fmt.Fprintf(out, "processes     %d\n", f.Restarts)
	fmt.Fprintf(out, "faults        %d: %s\n", sum, list(f.Faults))
	fmt.Fprintf(out, "duplicates    %d, %d explained: %s\n", f.Duplicates, explained, list(f.Explained))
	fmt.Fprintf(out, "claims undone %d\n", f.Undone)
	fmt.Fprintf(out, "losses        %d\n", f.Losses)
}
