package mongoq

import (
	"context"
	"errors"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Pipeline is stages that envelopes walk through, each step an atomic move. It is safe for use by many goroutines.
//
// Nothing of it is stored but the envelopes: its stages are the queues "<name>.<stage>" of the store.
type Pipeline struct {
	s      *Store
	name   string
	stages []*stage // in the order of the flow
	byName map[string]*stage
	entry  *stage
}

// NewPipeline builds a pipeline of stages, of which the first is where Push puts envelopes. It costs no round trip.
//
// Errors: a *StageError names the stage and the field that is wrong; it wraps ErrInvalidOption. What is checked: every
// name is there once, every link leads to a stage, every stage is reached, what leads back is a Back with a limit, every
// branch of a fork leads to its join and nothing else does, and a fork has a server with transactions.
func NewPipeline(store *Store, name string, stages ...*Stage) (*Pipeline, error) {
	if store == nil {
		return nil, invalid("NewPipeline needs a store, got nil")
	}
	if err := store.open(); err != nil {
		return nil, err
	}
	if name == "" {
		return nil, invalid("a pipeline's name must not be empty")
	}
	if len(stages) == 0 {
		return nil, invalid("a pipeline needs at least one stage, %q has none", name)
	}
	p := &Pipeline{s: store, name: name, byName: map[string]*stage{}}
	for i, given := range stages {
		if given == nil {
			return nil, invalid("a pipeline's stages must not be nil, number %d of %q is", i+1, name)
		}
		st := &stage{Stage: *given, p: p}
		st.Choice, st.Fork, st.Back = slices.Clone(st.Choice), slices.Clone(st.Fork), slices.Clone(st.Back)
		switch {
		case st.Name == "":
			return nil, p.wrong(st, "Name", "a stage's name must not be empty, that of number %d is", i+1)
		case p.byName[st.Name] != nil:
			return nil, p.wrong(st, "Name", "no two stages may have the same name")
		}
		p.byName[st.Name] = st
		p.stages = append(p.stages, st)
	}
	p.entry = p.stages[0]
	p.entry.Entry = true
	if err := p.check(); err != nil {
		return nil, err
	}
	for _, st := range p.stages {
		if err := st.build(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// queueOf is the name of a stage's queue.
func (p *Pipeline) queueOf(stage string) string { return p.name + "." + stage }

// build makes the stage's queue and worker.
func (st *stage) build() (err error) {
	refused := func(field string, err error) error {
		return &StageError{Pipeline: st.p.name, Stage: st.Name, Field: field, Err: err}
	}
	if st.queue, err = st.p.s.Queue(st.p.queueOf(st.Name), st.Queue); err != nil {
		return refused("Queue", err)
	}
	cfg := st.Worker
	cfg.OnEvent = st.note
	if st.worker, err = st.queue.Worker(st.handle, cfg); err != nil {
		return refused("Worker", err)
	}
	if st.Join != nil {
		// Before the middleware: what is gathered is no job.
		inner := st.worker.sources[0].Handler
		st.worker.sources[0].Handler = func(ctx context.Context, r *Reservation) error {
			if c := st.Join.receive(r); c != nil {
				r.course = c
				return nil
			}
			return inner(ctx, r)
		}
	}
	st.links = map[string]*sameMove{}
	for _, name := range append(st.onward(), backsOf(st)...) {
		to := st.p.queueOf(name)
		st.links[name] = &sameMove{to: to, ways: []string{to}}
	}
	return nil
}

func backsOf(st *stage) []string {
	names := make([]string, len(st.Back))
	for i, b := range st.Back {
		names[i] = b.To
	}
	return names
}

// Name is the pipeline's name.
func (p *Pipeline) Name() string { return p.name }

// Stages gives the names of the stages in the order of the flow: each before those that it leads to.
func (p *Pipeline) Stages() []string {
	names := make([]string, len(p.stages))
	for i, st := range p.stages {
		names[i] = st.Name
	}
	return names
}

// Queue gives the queue of a stage: to push into it, to see its dead letters and its history, to pause it.
// ErrInvalidOption: there is no such stage.
func (p *Pipeline) Queue(stage string) (*Queue, error) {
	st := p.byName[stage]
	if st == nil {
		return nil, invalid("pipeline %q has no stage %q", p.name, stage)
	}
	return st.queue, nil
}

// Push stores an envelope in the queue of the first stage, as Queue.Push does.
func (p *Pipeline) Push(ctx context.Context, payload any, opts ...PushOption) (bson.ObjectID, error) {
	return p.entry.queue.Push(ctx, payload, opts...)
}

// PushMany stores many envelopes in the queue of the first stage, as Queue.PushMany does.
func (p *Pipeline) PushMany(ctx context.Context, payloads []any, opts ...PushOption) ([]bson.ObjectID, error) {
	return p.entry.queue.PushMany(ctx, payloads, opts...)
}

// Run works until ctx ends: on the stages that are named, or on all. Other stages may run in other processes; what is
// moved to one that nobody runs waits there. Each stage has a worker of its own, with the stage's concurrency.
//
// When ctx ends, the stages stop in the order of the flow, each as Worker.Run does: a stage goes on while those before it
// drain. Run returns nil, or the errors of the workers, such as an *AbandonedError. A stage runs once at a time in a
// process: ErrInvalidOption. Errors otherwise: those of Worker.Run.
func (p *Pipeline) Run(ctx context.Context, stages ...string) error {
	chosen := p.stages
	if len(stages) > 0 {
		chosen = nil
		for _, name := range stages {
			if p.byName[name] == nil {
				return invalid("pipeline %q has no stage %q", p.name, name)
			}
		}
		for _, st := range p.stages {
			if slices.Contains(stages, st.Name) {
				chosen = append(chosen, st)
			}
		}
	}
	if inSession(ctx) {
		return ErrInTransaction
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	var mu sync.Mutex
	var tend sync.WaitGroup
	var failed error
	type runner struct {
		stop context.CancelFunc
		done chan struct{}
	}
	runners := make([]runner, len(chosen))
	for i, st := range chosen {
		own, stop := context.WithCancel(context.WithoutCancel(ctx))
		r := runner{stop: stop, done: make(chan struct{})}
		runners[i] = r
		go func() {
			defer close(r.done)
			if err := st.worker.Run(own); err != nil {
				mu.Lock()
				failed = errors.Join(failed, &StageError{Pipeline: p.name, Stage: st.Name, Field: "Worker", Err: err})
				mu.Unlock()
			}
			end() // a stage that cannot run ends the others
		}()
	}
	tending, endTending := context.WithCancel(context.WithoutCancel(ctx))
	defer endTending()
	if slices.ContainsFunc(chosen, func(st *stage) bool { return len(st.Fork) > 0 }) {
		tend.Go(func() { p.s.tendTransactions(tending) })
	}
	<-ctx.Done()
	for _, r := range runners {
		r.stop()
		<-r.done
	}
	endTending()
	tend.Wait()
	return failed
}
