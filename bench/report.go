package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
	"github.com/seed-de459a48/mongoq/bench/internal/work"
)

// report writes what a person reads: the machine, the table, what had to be reached, and notes.
func report(w io.Writer, env *work.Env, figures []figure.Figure, left []string) error {
	b := &strings.Builder{}
	fmt.Fprintf(b, "\n%s; %s\n%s\n", machine(), strings.Join(env.Versions, ", "), peers())
	if env.Scale != 1 {
		fmt.Fprintf(b, "Scale %g: counts and times are not what the table says, and its figures show only that it works.\n", env.Scale)
	}
	b.WriteString("\n")
	if err := figure.WriteTable(b, figures); err != nil {
		return err
	}
	if outcomes := figure.Judge(figure.Goals, figures, left); len(outcomes) > 0 {
		b.WriteString("\n")
		if err := figure.WriteOutcomes(b, outcomes); err != nil {
			return err
		}
	}
	b.WriteString("\nDurability of what was answered:\n")
	for _, s := range system.All {
		if slices.ContainsFunc(figures, func(f figure.Figure) bool { return f.System == s.Name }) {
			fmt.Fprintf(b, "  %s: %s\n", s.Name, s.Durability)
		}
	}
	if len(env.Notes) > 0 {
		b.WriteString("\nNotes:\n")
		for _, n := range env.Notes {
			fmt.Fprintf(b, "  %s\n", strings.ReplaceAll(n, "\n", "\n    "))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
