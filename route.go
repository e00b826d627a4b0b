package mongoq

import "slices"

// Route says where an envelope goes when its handler has succeeded. The zero Route is Forward without options.
type Route struct {
	kind     routeKind
	stage    string
	opts     []MoveOption
	branches []branchOptions
	whole    []MoveOption
	commit   []CommitOption
	reason   string
}

type routeKind int

const (
	routeForward routeKind = iota
	routeTo
	routeFork
	routeDone
	routeDrop
)

type branchOptions struct {
	stage string
	opts  []MoveOption
}

// Forward sends the envelope the stage's own way: to Next; without a Next into its Fork; at a sink it is done, and a
// Payload among the options becomes its Result. Options: those of MoveToQ; they change it in the same write.
func Forward(opts ...MoveOption) Route { return Route{kind: routeForward, opts: opts} }

// GoTo sends the envelope to a stage that Next, Choice or Back of its stage names. To any other it is a mistake, which
// no retry mends: the envelope is dead-lettered, of the kind DeadUnroutable. Back at its limit it is dead-lettered, of
// the kind DeadHops. Options: those of MoveToQ.
func GoTo(stage string, opts ...MoveOption) Route {
	return Route{kind: routeTo, stage: stage, opts: opts}
}

// Fork sends a copy of the envelope to each stage of its stage's Fork: all of them or, if the lease is lost, none. Each
// copy has an id of its own and says in Part where it comes from. Options: those of MoveToQ, for every copy; Branch adds
// some for one.
func Fork(opts ...MoveOption) Route { return Route{kind: routeFork, opts: opts} }

// Branch gives one copy of a fork options of its own, after those for all.
func (r Route) Branch(stage string, opts ...MoveOption) Route {
	r.branches = append(slices.Clip(r.branches), branchOptions{stage, opts})
	return r
}

// Whole changes the envelope that waits at the join of a fork, which is otherwise as it was: what the parts carry need
// not wait with it. Options: Payload, Headers, AddHeaders. A fork without a join has no whole: ErrInvalidOption.
func (r Route) Whole(opts ...MoveOption) Route {
	r.whole = append(slices.Clip(r.whole), opts...)
	return r
}

// Done ends the envelope's way here, whatever links the stage has. Options: Result, Retain.
func Done(opts ...CommitOption) Route { return Route{kind: routeDone, commit: opts} }

// Drop ends the envelope's way here for a reason. It leaves no trace; a stage whose queue has a Retention keeps it in
// the history, with the reason as its Result: {dropped: reason}.
func Drop(reason string) Route { return Route{kind: routeDrop, reason: reason} }
