package mongoq

import (
	"fmt"
	"slices"
	"strings"
)

// StageError says what is wrong with a stage of a pipeline that cannot be built. It wraps ErrInvalidOption, or what the
// stage's queue or worker was refused with.
type StageError struct {
	Pipeline string
	Stage    string
	Field    string // of Stage: "Next", "Fork", ...
	Err      error
}

func (e *StageError) Error() string {
	return fmt.Sprintf("mongoq: pipeline %q, stage %q, %s: %v", e.Pipeline, e.Stage, e.Field, e.Err)
}

// Unwrap gives the cause to errors.Is and errors.As.
func (e *StageError) Unwrap() error { return e.Err }

// wrong makes the error of a stage.
func (p *Pipeline) wrong(st *stage, field, format string, args ...any) error {
	return &StageError{Pipeline: p.name, Stage: st.Name, Field: field, Err: invalid(format, args...)}
}

// check refuses a graph that does not hold together: what it leads to must be there, what is there must be reached, and
// what leads back must be limited.
func (p *Pipeline) check() error {
	for _, check := range []func(*stage) error{p.checkStage, p.checkTargets} {
		for _, st := range p.stages {
			if err := check(st); err != nil {
				return err
			}
		}
	}
	if err := p.sortStages(); err != nil {
		return err
	}
	for _, check := range []func(*stage) error{p.checkBack, p.checkJoin} {
		for _, st := range p.stages {
			if err := check(st); err != nil {
				return err
			}
		}
	}
	reached := p.reach(p.entries(), (*stage).onward)
	for _, st := range p.stages {
		if !reached[st.Name] {
			return p.wrong(st, "Name", "every stage must be reached from an entry, no link leads to this one")
		}
	}
	for _, st := range p.stages {
		if err := p.checkParts(st); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pipeline) checkStage(st *stage) error {
	dead := deadLetterOf(p.queueOf(st.Name), st.Queue)
	switch {
	case st.Handler == nil:
		return p.wrong(st, "Handler", "a stage needs a handler, got nil")
	case st.Queue.DeadLetter == NoDeadLetter:
		return p.wrong(st, "Queue", "a stage's queue needs a dead-letter queue, got NoDeadLetter")
	case p.stageOf(dead) != dead:
		return p.wrong(st, "Queue", "dead letters must not go to the queue of a stage, those of this one would go to %q", dead)
	case len(st.Worker.Also) > 0:
		return p.wrong(st, "Worker", "a stage's worker serves its queue only, got Also")
	case len(st.Fork) > 0 && !p.s.transactions:
		return p.wrong(st, "Fork", "a fork needs a server that has transactions, a replica set; this one is a standalone")
	}
	return nil
}

// checkTargets sees that links lead to stages of the pipeline, each once.
func (p *Pipeline) checkTargets(st *stage) error {
	one := func(field, name string) error {
		if p.byName[name] == nil {
			return p.wrong(st, field, "a link must lead to a stage of the pipeline, there is no %q", name)
		}
		return nil
	}
	if st.Next != "" {
		if err := one("Next", st.Next); err != nil {
			return err
		}
	}
	for _, b := range st.Back {
		if b.Limit < 1 {
			return p.wrong(st, "Back", "Limit must be >= 1, got %d for %q", b.Limit, b.To)
		}
	}
	for _, list := range []struct {
		field string
		names []string
	}{{"Choice", st.Choice}, {"Fork", st.Fork}, {"Back", backsOf(st)}} {
		for i, name := range list.names {
			if err := one(list.field, name); err != nil {
				return err
			}
			if slices.Contains(list.names[:i], name) {
				return p.wrong(st, list.field, "a stage must stand there once, %q does twice", name)
			}
			if list.field == "Back" && st.leadsTo(name) {
				return p.wrong(st, list.field, "%q is a stage that Next or Choice lead to", name)
			}
		}
	}
	if len(st.Fork) == 1 {
		return p.wrong(st, "Fork", "a fork needs at least two stages, got %q only", st.Fork[0])
	}
	if j := st.Join; j != nil {
		if err := one("Join", j.Of); err != nil {
			return err
		}
		if len(p.byName[j.Of].Fork) == 0 {
			return p.wrong(st, "Join", "Of must name a stage that forks, %q does not", j.Of)
		}
		if j.OnDead != FailWhole && j.OnDead != GoOn {
			return p.wrong(st, "Join", "OnDead must be FailWhole or GoOn, got %d", j.OnDead)
		}
	}
	return nil
}

// undivided are the stages that the envelope itself may go on to.
func (st *stage) undivided() []string {
	var names []string
	if st.Next != "" {
		names = append(names, st.Next)
	}
	return append(names, st.Choice...)
}

// onward are the stages that a stage's links lead on to.
func (st *stage) onward() []string { return append(st.undivided(), st.Fork...) }

// sink is true of a stage that leads nowhere.
func (st *stage) sink() bool { return len(st.onward()) == 0 && len(st.Back) == 0 }

// sortStages puts the stages in the order of the flow, each before those that it leads to.
func (p *Pipeline) sortStages() error {
	const under, over = 1, 2
	state := map[string]int{}
	var order, path []*stage
	var visit func(st *stage) error
	visit = func(st *stage) error {
		switch state[st.Name] {
		case over:
			return nil
		case under:
			i := slices.Index(path, st)
			var way []string
			for _, on := range append(path[i:], st) {
				way = append(way, on.Name)
			}
			return p.wrong(path[len(path)-1], "Back", "a link that leads back must be a Back, with a limit: %s", strings.Join(way, " -> "))
		}
		state[st.Name] = under
		path = append(path, st)
		next := st.onward()
		slices.Reverse(next) // as the stages below: so that the order of those given is kept
		for _, name := range next {
			if err := visit(p.byName[name]); err != nil {
				return err
			}
		}
		path = path[:len(path)-1]
		state[st.Name] = over
		order = append(order, st)
		return nil
	}
	for _, st := range p.stages { // in the order given, so that it is the later stage that leads back
		if err := visit(st); err != nil {
			return err
		}
	}
	state, order = map[string]int{}, nil
	for _, st := range slices.Backward(p.stages) {
		if err := visit(st); err != nil {
			return err
		}
	}
	slices.Reverse(order)
	p.stages = order
	return nil
}

// reach gives the stages that links lead on to from some, those included.
func (p *Pipeline) reach(from []string, links func(*stage) []string) map[string]bool {
	seen := map[string]bool{}
	for len(from) > 0 {
		name := from[0]
		from = from[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		from = append(from, links(p.byName[name])...)
	}
	return seen
}

func (p *Pipeline) entries() []string {
	var names []string
	for _, st := range p.stages {
		if st.Entry {
			names = append(names, st.Name)
		}
	}
	return names
}

// checkBack sees that a link back leads to where the envelope can come from.
func (p *Pipeline) checkBack(st *stage) error {
	for _, b := range st.Back {
		if !p.reach([]string{b.To}, (*stage).onward)[st.Name] {
			return p.wrong(st, "Back", "Back must lead to an earlier stage or to the stage itself, %q does not lead to %q", b.To, st.Name)
		}
	}
	return nil
}

// checkJoin sees that a join gets the parts of its fork, and nothing else.
func (p *Pipeline) checkJoin(st *stage) error {
	if st.Join == nil {
		return nil
	}
	fork := p.byName[st.Join.Of]
	if fork.join != "" {
		return p.wrong(st, "Join", "a fork has one join, %q has another", fork.Name)
	}
	fork.join = p.queueOf(st.Name)
	for _, name := range fork.Fork {
		if !p.reach([]string{name}, (*stage).onward)[st.Name] {
			return p.wrong(fork, "Fork", "every branch must lead to the join %q, %q does not", st.Name, name)
		}
	}
	// Without the fork's branches nothing may lead there.
	around := p.reach(p.entries(), func(from *stage) []string {
		if from == fork {
			return from.undivided()
		}
		return from.onward()
	})
	if around[st.Name] {
		return p.wrong(st, "Join", "a join must be reached through its fork %q only", fork.Name)
	}
	return nil
}

// checkParts sees that the parts of a fork stay between it and its join, and nothing else comes there: they neither go
// back before it, nor fork without a join of their own, nor does anything go back to between them from outside.
func (p *Pipeline) checkParts(fork *stage) error {
	if fork.join == "" {
		return nil
	}
	var join *stage
	for _, st := range p.stages {
		if st.Join != nil && st.Join.Of == fork.Name {
			join = st
		}
	}
	inside := p.reach(fork.Fork, func(from *stage) []string {
		if from == join {
			return nil
		}
		return from.onward()
	})
	for _, st := range p.stages {
		if !inside[st.Name] || st == join {
			for _, b := range st.Back {
				if inside[b.To] {
					return p.wrong(st, "Back", "only a part of the fork %q may go back to %q", fork.Name, b.To)
				}
			}
			continue
		}
		for _, b := range st.Back {
			if !inside[b.To] {
				return p.wrong(st, "Back", "a part of the fork %q must not go back before it, to %q", fork.Name, b.To)
			}
		}
		if len(st.Fork) == 0 {
			continue
		}
		closed := slices.ContainsFunc(p.stages, func(j *stage) bool {
			return j.Join != nil && j.Join.Of == st.Name && inside[j.Name] && j != join
		})
		if !closed {
			return p.wrong(st, "Fork", "a fork among the branches of %q needs a join of its own before %q", fork.Name, join.Name)
		}
	}
	return nil
}
