package mongoq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// TraceState says where an envelope of a pipeline stands.
type TraceState string

// The states of a Trace.
const (
	TraceWaiting   TraceState = "waiting"   // for its turn, or for a later time
	TraceWorking   TraceState = "working"   // under a lease
	TraceGathering TraceState = "gathering" // at a join, for its parts
	TraceArrived   TraceState = "arrived"   // a part, in the envelope that it was joined into
	TraceForked    TraceState = "forked"    // into its parts, which no join brings together
	TraceDone      TraceState = "done"      // in the history
	TraceDead      TraceState = "dead"      // in a dead-letter queue
)

// Trace is an envelope's way through a pipeline.
type Trace struct {
	ID    bson.ObjectID
	State TraceState
	Steps []TraceStep // oldest first
	Cut   int         // steps before these, which are not kept: an envelope knows its last 32 moves
	Parts []*Trace    // of a fork: those that can still be found, by branch
}

// TraceStep is a stay in one queue.
type TraceStep struct {
	Stage string    // or the name of a queue that is none of the pipeline's
	In    time.Time // when it came; zero: not known
	Out   time.Time // when it left; zero: it is there
}

// Trace follows an envelope by its id, and its parts if it was forked. What is done and not kept in a history leaves no
// trace: ErrNotFound.
func (p *Pipeline) Trace(ctx context.Context, id bson.ObjectID) (*Trace, error) {
	forks := slices.ContainsFunc(p.stages, func(st *stage) bool { return len(st.Fork) > 0 })
	return p.trace(ctx, id, forks)
}

func (p *Pipeline) trace(ctx context.Context, id bson.ObjectID, forks bool) (*Trace, error) {
	e, err := p.s.Get(ctx, id)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	var parts []*Envelope
	if forks {
		if parts, err = p.partsOf(ctx, id); err != nil {
			return nil, err
		}
	}
	if e == nil && len(parts) == 0 {
		return nil, ErrNotFound
	}
	t := &Trace{ID: id, State: TraceForked}
	if e != nil {
		t.State, t.Cut = stateOf(e), max(e.Moves-len(e.Hops), 0)
		t.Steps = p.steps(e.Hops, e.Pushed, e.Q, e.Processed)
		joined := e.Ways
		if e.Joined != nil {
			joined = e.Joined.Parts
		}
		for i := range joined {
			w := &joined[i]
			hops, since := p.sinceFork(w.Hops, w.Branch)
			t.Parts = append(t.Parts, &Trace{ID: w.ID, State: TraceArrived, Steps: p.steps(hops, since, "", w.At)})
		}
	} else if before := parts[0]; len(before.Hops) > 0 {
		after, forked := p.sinceFork(before.Hops, before.Part.Branch)
		hops := before.Hops[:len(before.Hops)-len(after)]
		t.Cut = max(before.Moves-len(before.Hops), 0)
		t.Steps = p.steps(hops, before.Pushed, "", forked)
	}
	for _, part := range parts {
		if slices.ContainsFunc(t.Parts, func(have *Trace) bool { return have.ID == part.ID }) {
			continue // it has arrived, and is about to be deleted
		}
		sub, err := p.trace(ctx, part.ID, true)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		hops, since := p.sinceFork(part.Hops, part.Part.Branch)
		sub.Steps = p.steps(hops, since, part.Q, part.Processed)
		t.Parts = append(t.Parts, sub)
	}
	return t, nil
}

func stateOf(e *Envelope) TraceState {
	switch {
	case !e.Processed.IsZero():
		return TraceDone
	case e.Dead != nil:
		return TraceDead
	case e.Joined != nil && e.Joined.at == e.Q && !e.Joined.Closed:
		return TraceGathering
	case !e.Reserved.IsZero():
		return TraceWorking
	}
	return TraceWaiting
}

// steps makes stays of hops: each ends where the next begins. The last is in the queue q, if there is one.
func (p *Pipeline) steps(hops []Hop, since time.Time, q string, end time.Time) []TraceStep {
	var steps []TraceStep
	if len(hops) == keptHops {
		since = time.Time{} // what was before is not kept
	}
	for _, h := range hops {
		steps = append(steps, TraceStep{Stage: p.stageOf(h.From), In: since, Out: h.At})
		since = h.At
	}
	if q != "" {
		steps = append(steps, TraceStep{Stage: p.stageOf(q), In: since, Out: end})
	}
	return steps
}

// sinceFork are the hops of a part since it was made, and when that was.
func (p *Pipeline) sinceFork(hops []Hop, branch string) ([]Hop, time.Time) {
	for i, h := range slices.Backward(hops) {
		st := p.byName[p.stageOf(h.From)]
		if st != nil && slices.Contains(st.Fork, branch) {
			return hops[i+1:], h.At
		}
	}
	return hops, time.Time{}
}

// stageOf is the stage of a queue, or the queue's own name.
func (p *Pipeline) stageOf(queue string) string {
	if name, ok := strings.CutPrefix(queue, p.name+"."); ok && p.byName[name] != nil {
		return name
	}
	return queue
}

func (p *Pipeline) partsOf(ctx context.Context, id bson.ObjectID) ([]*Envelope, error) {
	var parts []*Envelope
	match := bson.D{field("part.of", id), field("part", op("$exists", true))}
	for e, err := range p.s.list(ctx, p.s.envs, match, options.Find().SetHint(p.s.parts)) {
		if err != nil {
			return nil, err
		}
		if e.Part != nil {
			parts = append(parts, e)
		}
	}
	filed, err := p.s.partitions(ctx)
	if err != nil {
		return nil, err
	}
	for raw, err := range p.s.across(ctx, filed, false, bson.A{op("$match", match)}) {
		if err != nil {
			return nil, err
		}
		e := read(raw).Envelope
		if e.Part != nil && !slices.ContainsFunc(parts, func(have *Envelope) bool { return have.ID == e.ID }) {
			parts = append(parts, &e)
		}
	}
	slices.SortFunc(parts, func(a, b *Envelope) int { return a.Part.Index - b.Part.Index })
	return parts, nil
}

// String shows the trace in lines, the parts indented.
func (t *Trace) String() string {
	var b strings.Builder
	t.write(&b, "")
	return b.String()
}

func (t *Trace) write(b *strings.Builder, indent string) {
	fmt.Fprintf(b, "%s%s %s\n", indent, t.ID.Hex(), t.State)
	for _, s := range t.Steps {
		fmt.Fprintf(b, "%s  %s", indent, s.Stage)
		if !s.In.IsZero() {
			fmt.Fprintf(b, " from %s", s.In.UTC().Format("15:04:05.000"))
		}
		if !s.Out.IsZero() {
			fmt.Fprintf(b, " to %s", s.Out.UTC().Format("15:04:05.000"))
		}
		b.WriteByte('\n')
	}
	for _, p := range t.Parts {
		p.write(b, indent+"    ")
	}
}
