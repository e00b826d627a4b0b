package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
)

// The stages of the pipeline.
const (
	stageIn    = "in"
	stageLeft  = "left"
	stageRight = "right"
	stageJoin  = "join"
	stageOut   = "out"
)

// mendedHeader marks what a redrive has brought back: it does not fail again.
const mendedHeader = "mended"

// An attempt is one claim of an envelope by a consumer, and what comes of it.
type attempt struct {
	c   *client
	n   int64
	job job
	r   *mongoq.Reservation
}

// claimed notes that a consumer has an envelope.
func (c *client) claimed(r *mongoq.Reservation) *attempt {
	a := &attempt{c: c, n: c.tries.Add(1), r: r}
	if err := r.Decode(&a.job); err != nil {
		c.trouble("payload of "+r.ID.Hex(), err)
	}
	e := entry{
		What: noteClaim, Key: a.job.Key, ID: r.ID.Hex(), Q: r.Q, Try: a.n, Deliveries: r.Deliveries, Retries: r.Retries, Moves: r.Moves,
		Reserved: r.Reserved.UnixMilli(), Until: r.When.UnixMilli(), Mended: r.Headers[mendedHeader] != "",
	}
	if !r.ReplayOf.IsZero() {
		e.Replay, e.Of = r.ReplayID, []string{r.ReplayOf.Hex()}
	}
	if p := r.Part; p != nil {
		e.Part = &part{Of: p.Of.Hex(), Index: p.Index, Count: p.Count}
	}
	c.ledger.write(e)
	return a
}

func (a *attempt) entry(what string) entry {
	return entry{What: what, Key: a.job.Key, ID: a.r.ID.Hex(), Q: a.r.Q, Try: a.n, Deliveries: a.r.Deliveries}
}

// effect notes that the work of the attempt was done.
func (a *attempt) effect() { a.c.ledger.write(a.entry(noteEffect)) }

// asks notes that a verb is about to be sent.
func (a *attempt) asks(verb, to string) {
	e := a.entry(noteAsk)
	e.Verb, e.To = verb, to
	a.c.ledger.write(e)
}

// answered notes what became of it.
func (a *attempt) answered(verb, to string, err error) {
	result, text := resultOf(err)
	a.answeredAs(verb, to, result, text)
}

func (a *attempt) answeredAs(verb, to, result, text string) {
	e := a.entry(noteAnswer)
	e.Verb, e.To, e.Result, e.Err = verb, to, result, text
	a.c.ledger.write(e)
}

// settle sends a verb; one whose outcome is unknown is sometimes called again, as its documentation says.
func (a *attempt) settle(verb, to string, f func(context.Context) error) error {
	a.asks(verb, to)
	ctx, cancel := a.c.patience()
	err := f(ctx)
	cancel()
	if errors.Is(err, mongoq.ErrOutcomeUnknown) && a.c.rng.chance(0.5) {
		again, cancel := context.WithTimeout(context.Background(), callTimeout)
		second := f(again)
		cancel()
		// Only a success is better than what is known.
		if second == nil {
			err = nil
		}
	}
	a.answered(verb, to, err)
	return err
}

// The verbs, by the names that the ledger has them under.
const (
	verbCommit   = "commit"
	verbRollback = "rollback"
	verbRelease  = "release"
	verbMove     = "move"
	verbDead     = "dead"
	verbFork     = "fork"
	verbArrive   = "arrive"
	verbForward  = "forward" // what a pool's handler ends with; its event says what it came to
)

func (a *attempt) commit() error {
	return a.settle(verbCommit, "", func(ctx context.Context) error {
		return a.r.Commit(ctx, mongoq.Result(a.job.Key))
	})
}

func (a *attempt) rollback() error {
	cause := a.c.rng.error()
	return a.settle(verbRollback, "", func(ctx context.Context) error { return a.r.Rollback(ctx, cause) })
}

func (a *attempt) release() error {
	d := a.c.rng.span(0, 500*time.Millisecond)
	return a.settle(verbRelease, "", func(ctx context.Context) error { return a.r.Release(ctx, mongoq.Delay(d)) })
}

func (a *attempt) move(to string) error {
	return a.settle(verbMove, to, func(ctx context.Context) error {
		return a.r.MoveToQ(ctx, to, mongoq.AddHeaders(map[string]string{"from": a.r.Q}))
	})
}

func (a *attempt) deadLetter() error {
	return a.settle(verbDead, "", func(ctx context.Context) error { return a.r.DeadLetter(ctx, a.c.rng.error()) })
}

// works takes the time that the job takes.
func (a *attempt) works(ctx context.Context) {
	_ = pause(ctx, time.Duration(a.job.Work)*time.Millisecond)
}

// consume works until ctx ends, in every way there is.
func (c *client) consume(ctx context.Context) {
	var all sync.WaitGroup
	pipe, err := c.pipeline()
	if err != nil {
		c.trouble("pipeline", err)
		return
	}
	open := newOpenAttempts(c)
	all.Go(func() { c.pool(ctx, open) })
	if !c.spec.Calm {
		all.Go(func() {
			if err := pipe.Run(ctx); err != nil {
				c.trouble("the pipeline's end", err)
			}
		})
		for q, f := range map[string]func(*attempt){
			qHop1: c.hops, qHop2: c.hops, qHop3: c.hops, qSlow: c.slowly, qFenced: c.fenced, qTx: c.together,
			qBrief: c.late, qFleet: c.late,
		} {
			for range 2 {
				all.Go(func() { c.each(ctx, q, f) })
			}
		}
		all.Go(func() { c.batches(ctx) })
		for range 2 {
			all.Go(func() { c.pops(ctx) })
		}
		unsettled, cancel := context.WithCancel(ctx)
		defer cancel()
		all.Go(func() {
			select {
			case <-c.settle:
			case <-ctx.Done():
			}
			cancel()
		})
		all.Go(func() { c.redrives(unsettled) })
		all.Go(func() { c.replays(unsettled) })
		all.Go(func() { c.pauses(ctx, unsettled) })
	}
	all.Wait()
}

// each reserves one by one.
func (c *client) each(ctx context.Context, q string, f func(*attempt)) {
	for ctx.Err() == nil {
		r, err := c.queues[q].Reserve(ctx)
		if err == nil {
			f(c.claimed(r))
			continue
		}
		if ctx.Err() == nil {
			slog.Info("no reservation", "queue", q, "error", err)
		}
		_ = pause(ctx, 50*time.Millisecond)
	}
}

// fails does what else than success may become of an attempt; true: it has.
func (c *client) fails(a *attempt) bool {
	switch n := c.rng.float(); {
	case n < 0.06:
		_ = a.rollback()
	case n < 0.1:
		_ = a.release()
	case n < 0.105:
		_ = a.deadLetter()
	default:
		return false
	}
	return true
}

// hops moves an envelope on, and commits it where its way ends.
func (c *client) hops(a *attempt) {
	a.works(context.Background())
	if c.fails(a) {
		return
	}
	a.effect()
	switch a.r.Q {
	case qHop1:
		_ = a.move(qHop2)
	case qHop2:
		_ = a.move(qHop3)
	default:
		_ = a.commit()
	}
}

// slowly works for longer than the lease: with extensions, or without, so that the verb comes late.
func (c *client) slowly(a *attempt) {
	ctx := context.Background()
	switch n := c.rng.float(); {
	case n < 0.2:
		_ = pause(ctx, c.rng.span(700*time.Millisecond, 2500*time.Millisecond))
	case n < 0.4:
		for range 3 {
			_ = pause(ctx, c.rng.span(100*time.Millisecond, 500*time.Millisecond))
			ctx, cancel := context.WithTimeout(ctx, callTimeout)
			err := a.r.Extend(ctx, time.Second)
			cancel()
			if errors.Is(err, mongoq.ErrLeaseLost) {
				break // and see what the verb says
			}
		}
	}
	if c.fails(a) {
		return
	}
	a.effect()
	_ = a.commit()
}

// fenced commits what was claimed by a majority.
func (c *client) fenced(a *attempt) {
	a.works(context.Background())
	if c.fails(a) {
		return
	}
	a.effect()
	_ = a.commit()
}

// late takes long enough for what waits behind to miss its deadline.
func (c *client) late(a *attempt) {
	_ = pause(context.Background(), c.rng.span(0, 500*time.Millisecond))
	if c.fails(a) {
		return
	}
	a.effect()
	_ = a.commit()
}

// pops takes for good.
func (c *client) pops(ctx context.Context) {
	for ctx.Err() == nil {
		n := c.tries.Add(1)
		c.ledger.write(entry{What: notePop, Q: qPop, Try: n})
		e, err := c.queues[qPop].Pop(ctx)
		if e != nil {
			a := c.claimed(&mongoq.Reservation{Envelope: *e})
			a.effect()
			a.asks(verbCommit, "")
			a.answered(verbCommit, "", err)
		}
		popped := entry{What: notePopped, Q: qPop, Try: n}
		if e == nil {
			popped.Err = err.Error()
		}
		c.ledger.write(popped)
		if err != nil {
			_ = pause(ctx, 50*time.Millisecond)
		}
	}
}

// together commits in a transaction with a document that stands for the effect, and with a push of what follows.
func (c *client) together(a *attempt) {
	if c.fails(a) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	var follow *pushed
	next := job{Key: a.job.Key + "+" + a.c.spec.Proc + "-" + strconv.FormatInt(a.n, 10)}
	if c.rng.chance(0.3) {
		p := c.pushes(qWork, draft{job: next}, bson.NilObjectID)
		follow = &p
	}
	abort := c.rng.chance(0.05)
	a.asks(verbCommit, "")
	var id bson.ObjectID
	err := c.transaction(ctx, func(ctx context.Context) error {
		if err := a.r.Commit(ctx); err != nil {
			return err
		}
		if _, err := c.db.Collection(effectsName).InsertOne(ctx, bson.D{{Key: "_id", Value: a.job.Key}, {Key: "n", Value: a.r.Deliveries}}); err != nil {
			return err
		}
		if follow != nil {
			var err error
			if id, err = c.queues[qWork].Push(ctx, next); err != nil {
				return err
			}
		}
		if abort {
			return errOnPurpose
		}
		return nil
	})
	result, text := resultOK, ""
	switch {
	case errors.Is(err, mongoq.ErrLeaseLost):
		result = resultLost
	case errors.Is(err, errOnPurpose):
		result, text = resultRefused, err.Error()
	case err != nil:
		result, text = resultUnknown, err.Error()
	}
	a.answeredAs(verbCommit, "", result, text)
	if follow != nil {
		if result == resultLost {
			result = resultRefused
		}
		if result != resultOK {
			id = bson.NilObjectID
		}
		follow.toldAs(id, result, text)
	}
	if abort && result == resultRefused {
		_ = a.rollback()
	}
}

// batches reserves and commits many at once.
func (c *client) batches(ctx context.Context) {
	for ctx.Err() == nil {
		rs, err := c.queues[qBatch].ReserveMany(ctx, 1+c.rng.intn(40))
		if err != nil {
			_ = pause(ctx, 50*time.Millisecond)
			continue
		}
		var good []*attempt
		for _, r := range rs {
			if a := c.claimed(r); !c.fails(a) {
				a.effect()
				a.asks(verbCommit, "")
				good = append(good, a)
			}
		}
		if len(good) == 0 {
			continue
		}
		commits := make([]*mongoq.Reservation, len(good))
		for i, a := range good {
			commits[i] = a.r
		}
		call, cancel := c.patience()
		err = c.queues[qBatch].CommitMany(call, commits)
		cancel()
		for i, err := range singly(err, len(good)) {
			good[i].answered(verbCommit, "", err)
		}
	}
}

// redrives brings back what failed for ever, mended.
func (c *client) redrives(ctx context.Context) {
	for pause(ctx, c.rng.span(3*time.Second, 9*time.Second)) == nil {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		n, err := c.queues[qFlaky].DeadLetters().Redrive(call, mongoq.Limit(10), mongoq.AddHeaders(map[string]string{mendedHeader: "yes"}))
		cancel()
		e := entry{What: noteRedrive, Q: qFlaky, N: int(n)}
		if err != nil {
			e.Err = err.Error()
		}
		c.ledger.write(e)
	}
}

// replays does again what was done, and repeats that until its outcome is known.
func (c *client) replays(ctx context.Context) {
	for pause(ctx, c.rng.span(2*time.Second, 6*time.Second)) == nil {
		history := c.queues[qKept].History()
		e := entry{What: noteReplay, Q: qKept, Replay: c.key()}
		var ids []bson.ObjectID
		for done, err := range history.List(ctx, mongoq.Limit(1+c.rng.intn(20))) {
			if err != nil {
				break
			}
			ids, e.Of = append(ids, done.ID), append(e.Of, done.ID.Hex())
		}
		if len(ids) == 0 {
			continue
		}
		c.ledger.write(e)
		e.What, e.Result = noteAgain, resultUnknown
		for range 5 {
			call, cancel := context.WithTimeout(ctx, callTimeout)
			n, err := history.ReplayMany(call, e.Replay, mongoq.IDs(ids...), mongoq.To(c.queues[qAgain]))
			cancel()
			e.N, e.Err = int(n), ""
			if err == nil {
				e.Result = resultOK
				break
			}
			e.Err = err.Error()
		}
		c.ledger.write(e)
	}
}

// pauses stops a queue for a while, again and again until unsettled ends; and in the end has all go on, also what
// somebody paused who was killed then.
func (c *client) pauses(ctx, unsettled context.Context) {
	resume := func(q string) {
		for ctx.Err() == nil && c.queues[q].Resume(ctx) != nil {
			_ = pause(ctx, 50*time.Millisecond)
		}
		c.ledger.write(entry{What: noteResumed, Q: q})
	}
	specs := queueSpecs()
	for pause(unsettled, c.rng.span(4*time.Second, 12*time.Second)) == nil {
		q := specs[c.rng.intn(len(specs))].name
		e := entry{What: notePaused, Q: q}
		if err := c.queues[q].Pause(unsettled); err != nil {
			e.Err = err.Error()
		}
		c.ledger.write(e)
		_ = pause(unsettled, c.rng.span(0, 3*time.Second))
		resume(q)
	}
	for _, s := range specs {
		resume(s.name)
	}
}

// openAttempts are those of pools, whose events tell what became of them.
type openAttempts struct {
	c  *client
	mu sync.Mutex
	by map[attemptKey][]*attempt
}

// attemptKey tells the attempts at one envelope apart, but for those that a failover undid.
type attemptKey struct {
	id         bson.ObjectID
	deliveries int
}

func newOpenAttempts(c *client) *openAttempts {
	return &openAttempts{c: c, by: map[attemptKey][]*attempt{}}
}

func (o *openAttempts) add(a *attempt) {
	o.mu.Lock()
	defer o.mu.Unlock()
	k := attemptKey{a.r.ID, a.r.Deliveries}
	o.by[k] = append(o.by[k], a)
}

func (o *openAttempts) take(k attemptKey) *attempt {
	o.mu.Lock()
	defer o.mu.Unlock()
	as := o.by[k]
	if len(as) == 0 {
		return nil
	}
	if len(as) == 1 {
		delete(o.by, k)
	} else {
		o.by[k] = as[1:]
	}
	return as[0]
}

var verbOf = map[mongoq.EventKind]string{
	mongoq.EventCommitted: verbCommit, mongoq.EventFailed: verbRollback, mongoq.EventReleased: verbRelease,
	mongoq.EventDeadLettered: verbDead, mongoq.EventMoved: verbMove, mongoq.EventForked: verbFork,
	mongoq.EventArrived: verbArrive, mongoq.EventDropped: verbCommit,
}

// hear is the OnEvent of the pools.
func (o *openAttempts) hear(e mongoq.Event) {
	if e.Kind == mongoq.EventReserved || e.Kind == mongoq.EventHeld {
		return
	}
	var a *attempt
	if e.Ran > 0 { // else it was given back unstarted, and the next attempt may have begun already
		a = o.take(attemptKey{e.ID, e.Deliveries})
	}
	verb, result, text := verbOf[e.Kind], resultOK, ""
	switch e.Kind {
	case mongoq.EventLeaseLost:
		verb, result = verbForward, resultLost
	case mongoq.EventUnsettled:
		verb = verbForward
		result, text = resultOf(e.Err)
	}
	if a == nil { // no handler had it; a part that arrives has none
		if verb == verbArrive {
			o.c.ledger.write(entry{What: noteAnswer, ID: e.ID.Hex(), Q: e.Q, Verb: verb, Result: result})
		}
		return
	}
	to := ""
	if verb == verbMove && len(e.To) == 1 {
		to = e.To[0]
	}
	a.answeredAs(verb, to, result, text)
}

// begins notes the beginning of a pool's attempt; ends what its handler came to. What the handler asks for, the pool
// sends later.
func (o *openAttempts) begins(r *mongoq.Reservation) *attempt {
	a := o.c.claimed(r)
	o.add(a)
	return a
}

// pool runs a worker over several queues.
func (c *client) pool(ctx context.Context, open *openAttempts) {
	plain := func(ctx context.Context, r *mongoq.Reservation) error {
		a := open.begins(r)
		a.works(ctx)
		if c.rng.chance(0.03) {
			a.asks(verbRollback, "")
			return c.rng.error()
		}
		if c.rng.chance(0.02) {
			a.asks(verbRelease, "")
			return mongoq.Snooze(c.rng.span(0, 500*time.Millisecond))
		}
		a.effect()
		a.asks(verbCommit, "")
		return nil
	}
	flaky := func(ctx context.Context, r *mongoq.Reservation) error {
		a := open.begins(r)
		a.works(ctx)
		if mended := r.Headers[mendedHeader] != ""; !mended && (a.job.Fails == always || r.Retries < a.job.Fails) {
			a.asks(verbRollback, "")
			return c.rng.error()
		}
		a.effect()
		a.asks(verbCommit, "")
		return nil
	}
	w, err := c.queues[qWork].Worker(plain, mongoq.WorkerConfig{
		Concurrency: 8, OnEvent: open.hear, DrainTimeout: 5 * time.Second,
		Also: []mongoq.Source{
			{Queue: c.queues[qKept], Handler: plain}, {Queue: c.queues[qFlaky], Handler: flaky}, {Queue: c.queues[qAgain], Handler: plain},
		},
	})
	if err == nil {
		err = w.Run(ctx)
	}
	if err != nil {
		c.trouble("the pool's end", err)
	}
}

// pipeline is a fork and its join, of which some have a part that dies.
func (c *client) pipeline() (*mongoq.Pipeline, error) {
	open := newOpenAttempts(c)
	through := func(f func(a *attempt) (mongoq.Route, error)) mongoq.StageHandler {
		return func(ctx context.Context, r *mongoq.Reservation) (mongoq.Route, error) {
			a := open.begins(r)
			a.works(ctx)
			if c.rng.chance(0.03) {
				a.asks(verbRollback, "")
				return mongoq.Route{}, c.rng.error()
			}
			route, err := f(a)
			if err == nil {
				a.effect()
				a.asks(verbForward, "")
			} else {
				a.asks(verbRollback, "")
			}
			return route, err
		}
	}
	on := through(func(a *attempt) (mongoq.Route, error) { return mongoq.Forward(), nil })
	left := through(func(a *attempt) (mongoq.Route, error) {
		if a.job.Fails == always {
			return mongoq.Route{}, backoff.Permanent(errors.New("this part never works"))
		}
		return mongoq.Forward(), nil
	})
	join := through(func(a *attempt) (mongoq.Route, error) {
		e := a.entry(noteJoined)
		for _, p := range a.r.Joined.Parts {
			e.Parts = append(e.Parts, slices.Index([]string{stageLeft, stageRight}, p.Branch))
		}
		e.N = a.r.Joined.Count
		c.ledger.write(e)
		return mongoq.Forward(), nil
	})
	queue := mongoq.QueueConfig{Lease: 5 * time.Second, Retry: retries(100)}
	kept := queue
	kept.Retention = mongoq.KeepForever
	w := mongoq.WorkerConfig{Concurrency: 3, OnEvent: open.hear, DrainTimeout: 5 * time.Second}
	return mongoq.NewPipeline(c.store, pipeName,
		&mongoq.Stage{Name: stageIn, Handler: on, Fork: []string{stageLeft, stageRight}, Queue: queue, Worker: w},
		&mongoq.Stage{Name: stageLeft, Handler: left, Next: stageJoin, Queue: queue, Worker: w},
		&mongoq.Stage{Name: stageRight, Handler: on, Next: stageJoin, Queue: queue, Worker: w},
		&mongoq.Stage{Name: stageJoin, Handler: join, Join: &mongoq.Join{Of: stageIn}, Next: stageOut, Queue: queue, Worker: w},
		&mongoq.Stage{Name: stageOut, Handler: on, Queue: kept, Worker: w},
	)
}
