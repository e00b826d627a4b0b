package main

import (
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"
)

// The kinds of faults.
const (
	faultKill     = "kill-client"  // SIGKILL; another takes its place
	faultPause    = "pause-client" // SIGSTOP, then SIGCONT
	faultClock    = "client-clock" // it is wrong by so many minutes from now on
	faultCrash    = "kill-node"    // SIGKILL, then a restart
	faultFreeze   = "pause-node"   // SIGSTOP, then SIGCONT
	faultStepDown = "step-down"    // the primary gives up
	faultCut      = "cut"          // connections end, and none can be made
	faultReset    = "reset"        // connections are reset by what passes
	faultDelay    = "delay"        // what passes is late
	faultMute     = "mute"         // answers vanish: what was asked for is done
	faultDeaf     = "deaf"         // requests vanish
	faultError    = "error"        // commands fail and are not run
	faultHangUp   = "hang-up"      // commands are not run, and their connections end
	faultConcern  = "concern"      // commands are run, and no majority is said to hold them
	faultBlock    = "block"        // commands are run late
)

// primaryNode, as a target, is the node that is the primary when the time comes.
const primaryNode = -1

// A fault is one line of the schedule.
type fault struct {
	N      int           // its number, from 1
	At     time.Duration // from the beginning
	Kind   string
	Target int           // a client's or a node's number
	For    time.Duration // how long it lasts, or how long a killed one is away
	Code   int32         // of an error
	On     string        // the command
	Share  float64       // of the commands, or of the connections
	Amount int           // a delay in ms, a clock's error in minutes
}

func (f fault) String() string {
	s := fmt.Sprintf("%3d %8.2fs  %-12s", f.N, f.At.Seconds(), f.Kind)
	switch f.Kind {
	case faultKill, faultPause, faultClock:
		s += fmt.Sprintf(" client %d", f.Target)
	default:
		if f.Target == primaryNode {
			s += " primary"
		} else {
			s += fmt.Sprintf(" node %d", f.Target)
		}
	}
	if f.On != "" {
		s += fmt.Sprintf(" %s, %.0f %%", f.On, 100*f.Share)
	} else if f.Share > 0 {
		s += fmt.Sprintf(" %.0f %%", 100*f.Share)
	}
	if f.Code != 0 {
		s += fmt.Sprintf(", code %d", f.Code)
	}
	switch {
	case f.Kind == faultClock:
		s += fmt.Sprintf(" %+d min", f.Amount)
	case f.Amount != 0:
		s += fmt.Sprintf(" by %d ms", f.Amount)
	}
	if f.For > 0 {
		s += fmt.Sprintf(" for %.2fs", f.For.Seconds())
	}
	return s
}

// A track is faults of some kinds, one after the other; the tracks go on side by side.
type track struct {
	every time.Duration // from one to the next, on average
	kinds []string
}

var tracks = []track{
	{6 * time.Second, []string{faultKill, faultKill, faultPause, faultPause, faultClock}},
	{25 * time.Second, []string{faultCrash, faultCrash, faultFreeze, faultStepDown}},
	{9 * time.Second, []string{faultCut, faultReset, faultDelay, faultMute, faultDeaf}},
	{5 * time.Second, []string{faultError, faultHangUp, faultConcern, faultBlock}},
}

// nodesTrack is the place of the faults of nodes in tracks.
const nodesTrack = 1

// commands are those that fail points befall; codes what they answer: a network error, the states of a primary that goes
// away, a timeout, a refusal.
var (
	commands = []string{"insert", "update", "delete", "findAndModify", "find", "aggregate", "commitTransaction", "getMore"}
	codes    = []int32{6, 7, 91, 189, 10107, 11600, 11602, 13435, 50, 262, 13}
)

// schedule makes the faults of a run. It follows from its arguments alone.
func schedule(seed uint64, length time.Duration, nodes, clients int) []fault {
	var all []fault
	for i, t := range tracks {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		end := time.Duration(0)
		for {
			gap := time.Duration(rng.ExpFloat64() * float64(t.every))
			f := draw(rng, t.kinds[rng.IntN(len(t.kinds))], nodes, clients)
			f.At = end + min(gap, 4*t.every)
			end = f.At + f.For
			if end >= length {
				break
			}
			all = append(all, f)
		}
	}
	slices.SortStableFunc(all, func(a, b fault) int { return cmp.Compare(a.At, b.At) })
	for i := range all {
		all[i].N = i + 1
	}
	return all
}

// draw gives a fault of a kind its particulars.
func draw(rng *rand.Rand, kind string, nodes, clients int) fault {
	f := fault{Kind: kind}
	span := func(lo, hi float64) time.Duration {
		return time.Duration((lo + rng.Float64()*(hi-lo)) * float64(time.Second)).Round(10 * time.Millisecond)
	}
	node := func() int {
		if n := rng.IntN(nodes + 1); n < nodes && nodes > 1 {
			return n
		}
		return primaryNode
	}
	switch kind {
	case faultKill:
		f.Target, f.For = rng.IntN(clients), span(0, 1)
	case faultPause:
		f.Target, f.For = rng.IntN(clients), span(0.2, 8)
	case faultClock:
		f.Target, f.Amount = rng.IntN(clients), rng.IntN(21)-10
	case faultCrash:
		f.Target, f.For = node(), span(0.1, 3)
	case faultFreeze:
		f.Target, f.For = node(), span(0.3, 5)
	case faultStepDown:
		f.Target, f.For = primaryNode, span(1, 2)
	case faultCut:
		f.Target, f.For = node(), span(0.1, 3)
	case faultReset, faultMute, faultDeaf:
		f.Target, f.For, f.Share = node(), span(0.2, 2), 0.2+0.8*rng.Float64()
	case faultDelay:
		f.Target, f.For, f.Amount = node(), span(0.5, 4), 20+rng.IntN(400)
	case faultError, faultHangUp, faultConcern, faultBlock:
		f.Target, f.For, f.Share = primaryNode, span(0.5, 4), 0.1+0.6*rng.Float64()
		f.On = commands[rng.IntN(len(commands))]
		switch kind {
		case faultError:
			f.Code = codes[rng.IntN(len(codes))]
		case faultBlock:
			f.Amount = 50 + rng.IntN(1500)
		}
	}
	return f
}

func printSchedule(w io.Writer, faults []fault) {
	for _, f := range faults {
		fmt.Fprintln(w, f)
	}
}
