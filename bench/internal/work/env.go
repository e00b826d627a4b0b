package work

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

// Env is what all works share.
type Env struct {
	Runs    int
	Scale   float64       // of counts and times
	Limit   time.Duration // after which a drain is rated by what it did; 0: none
	Sustain time.Duration // how long the sustained work lasts
	Profile string        // beginning of the names of our processes' CPU profiles; "": none

	Systems  []system.System
	Progress func(format string, args ...any)

	Failed   bool     // something that should have been measured was not
	Notes    []string // what a reader of the table should know
	Versions []string // of the servers

	asynqBest map[string]int // concurrency, by system
	others    float64        // the largest share of the processors that neither clients nor servers had
	profiles  int
}

// Note adds a note, once.
func (e *Env) Note(format string, args ...any) {
	if n := fmt.Sprintf(format, args...); !slices.Contains(e.Notes, n) {
		e.Notes = append(e.Notes, n)
	}
}

// choose gives those of the systems that are chosen and can run, in the order of all; what is missing is noted.
func (e *Env) choose(names ...string) []system.System {
	var chosen []system.System
	for _, s := range e.Systems {
		if !slices.Contains(names, s.Name) {
			continue
		}
		if what := s.Missing(); what != "" {
			e.Note("%s: not measured: %s", s.Name, what)
			continue
		}
		chosen = append(chosen, s)
	}
	return chosen
}

// ours is the library.
func (e *Env) ours() system.System { return system.All[0] }

// jobs scales a count, and leaves enough to measure anything at all.
func (e *Env) jobs(n int) int { return e.atLeast(n, 200) }

func (e *Env) atLeast(n, least int) int { return max(int(float64(n)*e.Scale), min(n, least)) }

// lasting scales a time.
func (e *Env) lasting(d time.Duration) time.Duration {
	return max(time.Duration(float64(d)*e.Scale), min(d, 300*time.Millisecond))
}

// profile is the file for the profile of one of our processes; "" if none is wanted.
func (e *Env) profile(sys system.System, what string) string {
	if e.Profile == "" || sys.Name != system.Ours {
		return ""
	}
	e.profiles++
	name := fmt.Sprintf("%s-%s-%d.pprof", e.Profile, strings.ReplaceAll(what, " ", "_"), e.profiles)
	e.Progress("profile: %s", name)
	return name
}
