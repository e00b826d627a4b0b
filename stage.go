package mongoq

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/cenkalti/backoff/v4"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// Stage is a step of a pipeline: a queue, a handler, and links to other stages. A stage without links is a sink: what
// it has handled is done. A link leads on; the only way back is Back.
type Stage struct {
	// Name names the stage in its pipeline. Its queue is "<pipeline>.<name>". The rule: not empty, no two the same.
	Name string

	// Handler does the work of one envelope and says where it goes next. Transform, Step, Sink and Merge make one of a
	// function of the payload.
	Handler StageHandler

	// Next is the stage that Forward leads to.
	Next string

	// Choice are stages that GoTo may lead to, too.
	Choice []string

	// Fork are stages that each get a copy, by Fork, or by Forward if there is no Next. The rule: at least two, and a
	// server that has transactions: a replica set.
	Fork []string

	// Back are earlier stages, or the stage itself, that GoTo may lead back to, each a limited number of times.
	Back []Back

	// Join makes the stage wait for the parts of a fork.
	Join *Join

	// Entry says that envelopes are pushed to this stage from outside. The first stage of a pipeline always is one.
	Entry bool

	// Queue is the stage's queue: its lease, retries, dead-letter queue, history. The rule: it has a dead-letter queue.
	Queue QueueConfig

	// Worker is the stage's worker: its concurrency, timeout, middleware. The rule: no Also.
	Worker WorkerConfig
}

// Back is a link back to an earlier stage.
type Back struct {
	To    string
	Limit int // how often one envelope may go this way: past it, it is dead-lettered. The rule: >= 1
}

// StageHandler does the work of one envelope in a stage, and says where it goes. An error, a panic, RetryIn and Snooze
// mean what they mean to a Handler: the envelope is retried by its stage's policy. What the function does to the
// reservation itself counts, and the Route then says nothing.
type StageHandler func(ctx context.Context, r *Reservation) (Route, error)

// Transform makes a stage's handler of a function of the payload: what it returns is the new payload, and the envelope
// goes Forward; at a sink it is the Result. A payload that cannot be decoded into an In is dead-lettered at once.
func Transform[In, Out any](f func(context.Context, In) (Out, error)) StageHandler {
	if f == nil {
		return nil // which NewPipeline refuses
	}
	return Step(func(ctx context.Context, _ *Reservation, in In) (Route, error) {
		out, err := f(ctx, in)
		return Forward(Payload(out)), err
	})
}

// Step makes a stage's handler of a function that sees the envelope and its payload, and says where it goes.
func Step[In any](f func(context.Context, *Reservation, In) (Route, error)) StageHandler {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, r *Reservation) (Route, error) {
		var in In
		if err := r.Decode(&in); err != nil {
			return Route{}, backoff.Permanent(err)
		}
		return f(ctx, r, in)
	}
}

// Sink makes a handler of a function with which an envelope's way ends.
func Sink[In any](f func(context.Context, In) error) StageHandler {
	if f == nil {
		return nil
	}
	return Step(func(ctx context.Context, _ *Reservation, in In) (Route, error) {
		return Done(), f(ctx, in)
	})
}

// Merge makes the handler of a Join of a function that makes one payload of the parts; whole is the envelope that was
// forked, with its payload as it was.
func Merge[Whole, Out any](f func(ctx context.Context, whole Whole, parts *Joined) (Out, error)) StageHandler {
	if f == nil {
		return nil
	}
	return Step(func(ctx context.Context, r *Reservation, whole Whole) (Route, error) {
		parts := r.Joined
		if parts == nil {
			parts = &Joined{}
		}
		out, err := f(ctx, whole, parts)
		return Forward(Payload(out)), err
	})
}

// stage is a stage of a pipeline that was built.
type stage struct {
	Stage

	p      *Pipeline
	queue  *Queue
	worker *Worker
	counts counts
	links  map[string]*sameMove // by the stage that they lead to
	join   string               // the queue of the join of its fork; empty: none
}

// handle makes the worker's handler of the stage's.
func (st *stage) handle(ctx context.Context, r *Reservation) error {
	route, err := st.Handler(ctx, r)
	if err != nil {
		return err
	}
	c, err := st.course(r, route)
	if err != nil {
		return backoff.Permanent(err) // the same again would be as wrong
	}
	r.course = c
	return nil
}

// course makes of a route what is to be done with the envelope.
func (st *stage) course(r *Reservation, route Route) (course, error) {
	switch route.kind {
	case routeTo:
		return st.goTo(r, route)
	case routeFork:
		return st.fork(r, route)
	case routeDone:
		return st.finish(r, route)
	case routeDrop:
		return st.drop(r, route.reason)
	}
	switch {
	case st.Next != "":
		return st.move(r, st.Next, route.opts, nil)
	case len(st.Fork) > 0:
		return st.fork(r, route)
	case len(st.Choice) > 0 || len(st.Back) > 0:
		return burying{DeadUnroutable, fmt.Sprintf("stage %q forwards, and has no next stage", st.Name)}, nil
	}
	set, err := moveSettingsOf(route.opts)
	if err != nil {
		return nil, err
	}
	return st.end(r, ending{Verb: endedDone}, commitSettings{result: set.patch.payload})
}

func (st *stage) goTo(r *Reservation, route Route) (course, error) {
	if st.leadsTo(route.stage) {
		return st.move(r, route.stage, route.opts, nil)
	}
	for _, back := range st.Back {
		if back.To != route.stage {
			continue
		}
		link := st.Name + ">" + back.To
		if r.Loops[link] >= back.Limit {
			return burying{DeadHops, fmt.Sprintf("it went back from %q to %q %d times, which is the limit", st.Name, back.To, back.Limit)}, nil
		}
		loops := maps.Clone(r.Loops)
		if loops == nil {
			loops = map[string]int{}
		}
		loops[link]++
		return st.move(r, back.To, route.opts, bson.D{field("loops", literal(loops))})
	}
	return burying{DeadUnroutable, fmt.Sprintf("stage %q has no link to %q", st.Name, route.stage)}, nil
}

func (st *stage) leadsTo(name string) bool {
	return name != "" && (name == st.Next || slices.Contains(st.Choice, name))
}

// moveSettings reads the options of a move, and has it carry the trace context on.
func (st *stage) moveSettings(r *Reservation, opts []MoveOption) (moveSettings, error) {
	set, err := moveSettingsOf(opts)
	if err != nil {
		return set, err
	}
	set.patch = traced(r.Headers, set.patch)
	return set, r.fits(set.patch, r.moved())
}

func (st *stage) move(r *Reservation, to string, opts []MoveOption, more bson.D) (course, error) {
	set, err := st.moveSettings(r, opts)
	if err != nil {
		return nil, err
	}
	if j := r.Joined; st.Join != nil && j != nil {
		ways := make(bson.A, len(j.Parts))
		for i := range j.Parts {
			ways[i] = j.Parts[i].way()
		}
		kept, err := encode("the ways of the parts", ways)
		if err != nil {
			return nil, err
		}
		if err := r.fits(set.patch, r.moved()+len(kept.Value)); err != nil {
			return nil, err
		}
		more = append(more, field("ways", literal(kept)))
	}
	set.more = more
	link := st.links[to]
	c := &moving{to: link.to, set: set, ways: link.ways}
	if set.plain() {
		c.same = link
	}
	return c, nil
}

func (st *stage) fork(r *Reservation, route Route) (course, error) {
	if len(st.Fork) == 0 {
		return burying{DeadUnroutable, fmt.Sprintf("stage %q has no fork", st.Name)}, nil
	}
	c := &forking{join: st.join}
	own := map[string][]MoveOption{}
	for _, b := range route.branches {
		own[b.stage] = append(own[b.stage], b.opts...)
	}
	for _, name := range st.Fork {
		opts := slices.Concat(route.opts, own[name])
		delete(own, name)
		set, err := st.moveSettings(r, opts)
		if err != nil {
			return nil, err
		}
		c.branches = append(c.branches, branch{stage: name, to: st.p.queueOf(name), set: set})
	}
	if len(route.whole) > 0 && c.join == "" {
		return nil, invalid("Whole needs a fork that is joined, that of stage %q is not", st.Name)
	}
	var err error
	if c.whole, err = moveSettingsOf(route.whole); err != nil {
		return nil, err
	}
	if w := c.whole; w.prio != 0 || w.start != (start{}) || w.ttl != nil {
		return nil, invalid("Whole changes the payload and the headers of what waits, got another option")
	}
	if err := r.fits(c.whole.patch, r.moved()); err != nil {
		return nil, err
	}
	for name := range own {
		return burying{DeadUnroutable, fmt.Sprintf("stage %q forks, and %q is none of its branches", st.Name, name)}, nil
	}
	return c, nil
}

func (st *stage) finish(r *Reservation, route Route) (course, error) {
	var set commitSettings
	for _, o := range route.commit {
		if err := o.applyCommit(&set); err != nil {
			return nil, err
		}
	}
	return st.end(r, ending{Verb: endedDone}, set)
}

func (st *stage) drop(r *Reservation, reason string) (course, error) {
	v, err := encode("the reason", bson.D{field("dropped", cut(reason))})
	if err != nil {
		return nil, err
	}
	return st.end(r, ending{Verb: endedDropped, Msg: reason}, commitSettings{result: &v})
}

// end is the course of an envelope whose way ends here. A part that a join waits for tells it so: by its place in the
// history, or where there is none, by going there without its content.
func (st *stage) end(r *Reservation, how ending, set commitSettings) (course, error) {
	keep := st.queue.cfg.Retention != 0
	if set.retain != nil {
		keep = *set.retain != 0
	}
	if p := r.Part; p != nil && p.join != "" && !keep {
		doc := partDoc(p.Of, p.fork, p.Index, p.Count, p.Branch, p.join)
		doc = append(doc, field("end", bson.D{field("verb", how.Verb), field("msg", cut(how.Msg))}))
		told := moveSettings{more: bson.D{field("part", literal(doc)), field("payload", nil)}}
		return &moving{to: p.join, set: told}, nil
	}
	if !keep {
		set.result = nil
	}
	if v := set.result; v != nil && r.size+len(v.Value) > MaxEnvelopeSize {
		return nil, tooLargeError(r.size + len(v.Value))
	}
	return &finishing{set: set, how: how}, nil
}
