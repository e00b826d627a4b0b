package model_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// program is a random sequence of verbs, by several consumers, on a real server and on the model. After each verb all
// that is stored must be what the model says.
//
// No time passes: leases and delays are longer than a test. That a lease lapses, and that a deadline passes, are verbs
// of the program, so that nothing depends on how fast the machine is.
type program struct {
	*world
	m       *model
	ctx     context.Context
	tickets []*ticket
	ids     []bson.ObjectID // that pushes name
	paused  map[string]bool
	pauser  map[string]int // the consumer that last paused or resumed: it knows, others within a second
}

func newProgram(t *rapid.T, w *world, r rules) *program {
	return &program{
		world: w, m: newModel(r), ctx: t.Context(),
		ids:    []bson.ObjectID{bson.NewObjectID(), bson.NewObjectID()},
		paused: map[string]bool{}, pauser: map[string]int{},
	}
}

func (p *program) verbs() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"":            p.agree,
		"push":        p.push,
		"pushMany":    p.pushMany,
		"tryReserve":  p.tryReserve,
		"tryAgain":    p.tryReserve, // twice as often as others
		"reserve":     p.reserve,
		"reserveMany": p.reserveMany,
		"tryPop":      p.tryPop,
		"commit":      p.commit,
		"commitMany":  p.commitMany,
		"rollback":    p.rollback,
		"release":     p.release,
		"extend":      p.extend,
		"move":        p.move,
		"deadLetter":  p.deadLetter,
		"lapse":       p.lapse,
		"expire":      p.expire,
		"redrive":     p.redrive,
		"remove":      p.remove,
		"purge":       p.purge,
		"purgeDead":   p.purgeDead,
		"pause":       p.pause,
		"replay":      p.replay,
		"replayMany":  p.replayMany,
		"look":        p.look,
	}
}

// agree compares what is stored with the model, and lets the model know how what it cannot know has ended.
func (p *program) agree(t *rapid.T) {
	stored := p.ended(t)
	for _, e := range p.m.all(func(*envelope) bool { return true }) {
		d, there := stored[e.id]
		delete(stored, e.id)
		switch {
		case e.doomed() && !there:
			delete(p.m.envs, e.id)
		case e.doomed():
			for e.deliveries < d.Deliveries { // claims met it; one whose asker had left gave it back
				p.m.claim(e, &ticket{})
				e.giveUp(false)
			}
			if d.Dead != nil {
				require.Equal(t, string(mongoq.DeadExpired), d.Dead.Kind)
				require.Equal(t, p.deadLetterOf(e.q), d.Q)
				p.m.bury(e, p.deadLetterOf(e.q), mongoq.DeadExpired)
			}
		case p.m.hopeless(e, p.world) && there && d.Dead != nil:
			p.m.claim(e, &ticket{})
			p.m.bury(e, p.deadLetterOf(e.q), mongoq.DeadLost)
		}
		if p.m.envs[e.id] == e {
			require.True(t, there, "gone: %s", e.describe())
			require.Equal(t, e.describe(), d.describe())
		}
	}
	for _, d := range stored {
		t.Fatalf("not in the model: %s", d.describe())
	}
}

// ended is what is stored, once a claim that met what it does not deliver is through with it: that is after its answer.
func (p *program) ended(t *rapid.T) map[bson.ObjectID]document {
	for until := time.Now().Add(soon); ; {
		stored := p.stored(p.ctx, t)
		under := p.m.all(func(e *envelope) bool {
			d, there := stored[e.id]
			aside := e.doomed() || p.m.hopeless(e, p.world)
			return aside && there && !d.Lease.IsZero() && d.Deliveries > e.deliveries
		})
		if len(under) == 0 || time.Now().After(until) {
			return stored
		}
		select {
		case <-time.After(time.Millisecond):
		case <-p.ctx.Done():
		}
	}
}

func one[T any](t *rapid.T, what string, of ...T) T { return rapid.SampledFrom(of).Draw(t, what) }

// some picks one of what there is, or has rapid choose another verb.
func some[T any](t *rapid.T, what string, of []T) T {
	if len(of) == 0 {
		t.Skip("none")
	}
	return of[rapid.IntRange(0, len(of)-1).Draw(t, what)]
}

func chance(t *rapid.T, what string, oneIn int) bool {
	return rapid.IntRange(0, oneIn-1).Draw(t, what) == oneIn-1
}

func (p *program) consumer(t *rapid.T) int { return rapid.IntRange(0, consumers-1).Draw(t, "consumer") }

// live are the queues that envelopes begin in, and move to.
func (p *program) live(t *rapid.T) string { return one(t, "queue", p.names[:3]...) }

func (p *program) any(t *rapid.T) string { return one(t, "queue", p.names...) }

// What stands here would be an operator, or the path of a field, to a server that took values for expressions.
var payloads = []any{
	"x", nil, "$q", "$$ROOT", int32(7), bson.D{{Key: "$set", Value: bson.D{{Key: "q", Value: "$payload"}}}},
	bson.A{bson.D{{Key: "$literal", Value: 1}}}, bson.D{{Key: "a.b", Value: bson.NewObjectID()}},
}

var headerSets = []map[string]string{nil, {"h": "1"}, {"$set": "$q"}, {"a.b": "$$NOW", "h": "2"}}

// pushing draws a push, as the call's options and as the model has it.
func (p *program) pushing(t *rapid.T, q string) (payload any, opts []mongoq.PushOption, e *envelope) {
	payload = one(t, "payload", payloads...)
	e = &envelope{q: q, payload: value(payload), prio: 2, state: waiting}
	if e.headers = one(t, "headers", headerSets...); e.headers != nil {
		opts = append(opts, mongoq.Headers(e.headers))
	}
	if chance(t, "with a priority", 3) {
		e.prio = rapid.IntRange(1, 4).Draw(t, "priority")
		opts = append(opts, mongoq.Priority(e.prio))
	}
	if e.later = chance(t, "for later", 6); e.later {
		opts = append(opts, mongoq.Delay(long))
	}
	if e.mortal = chance(t, "with a TTL", 5); e.mortal {
		opts = append(opts, mongoq.TTL(24*long))
	}
	return payload, opts, e
}

func (p *program) push(t *rapid.T) {
	q := p.live(t)
	payload, opts, e := p.pushing(t, q)
	var had *envelope
	if chance(t, "with an id", 4) {
		e.id = one(t, "id", p.ids...)
		e.pushedAs = fmt.Sprint(q, e.prio, e.payload, e.headers)
		opts = append(opts, mongoq.ID(e.id))
		if had = p.m.envs[e.id]; had != nil && had.doomed() {
			t.Skip("it may be gone, or not")
		}
	}
	id, err := p.handle[p.consumer(t)][q].Push(p.ctx, payload, opts...)
	switch {
	case had != nil && had.pushedAs != e.pushedAs:
		require.ErrorIs(t, err, mongoq.ErrDuplicate)
	case had != nil:
		require.NoError(t, err)
		require.Equal(t, e.id, id)
	default:
		require.NoError(t, err)
		e.id = id
		p.m.add(e)
	}
}

func (p *program) pushMany(t *rapid.T) {
	q := p.live(t)
	var all []any
	var es []*envelope
	for range rapid.IntRange(1, 4).Draw(t, "how many") {
		payload, opts, e := p.pushing(t, q)
		all, es = append(all, mongoq.With(payload, opts...)), append(es, e)
	}
	ids, err := p.handle[p.consumer(t)][q].PushMany(p.ctx, all)
	require.NoError(t, err)
	require.Len(t, ids, len(es))
	for i, e := range es {
		e.id = ids[i]
		p.m.add(e)
	}
}

// isPaused tells what a consumer may be told of a pause: what it did itself holds at once.
func (p *program) isPaused(q string, consumer int) (yes, no bool) {
	by, ever := p.pauser[q]
	return p.paused[q] || ever && by != consumer, !p.paused[q] || ever && by != consumer
}

// deliverable are those that a claim of the queue may hand out.
func (p *program) deliverable(q string) []*envelope {
	return p.m.in(q, func(e *envelope) bool { return p.m.deliverable(e, p.world) })
}

// take notes that a consumer was given a reservation.
func (p *program) take(t *rapid.T, q string, consumer int, r *mongoq.Reservation, short bool) {
	e := p.m.envs[r.ID]
	require.NotNil(t, e, "delivered, and not in the model")
	require.Equal(t, q, e.q)
	require.True(t, p.m.deliverable(e, p.world), "delivered: %s", e.describe())
	tk := &ticket{no: len(p.tickets), r: r, q: q, e: e, sure: true, consumer: consumer}
	p.m.claim(e, tk)
	p.tickets = append(p.tickets, tk)
	require.Equal(t, e.retries, r.Retries)
	require.Equal(t, e.deliveries, r.Deliveries)
	require.Equal(t, e.moves, r.Moves)
	require.Equal(t, e.prio, r.Priority)
	require.Equal(t, q, r.Q)
	require.True(t, e.payload.Equal(r.Payload), "payload %v, want %v", r.Payload, e.payload)
	require.Len(t, r.Headers, len(e.headers))
	for k, v := range e.headers {
		require.Equal(t, v, r.Headers[k])
	}
	require.Equal(t, e.dead != "", r.Dead != nil)
	if short {
		p.awaitDue(p.ctx, t, e.id)
		e.lapsed = true
	}
}

// empty notes that a claim has found nothing: what it had to take aside is not there any more.
func (p *program) empty(t *rapid.T, q string) {
	require.Empty(t, p.deliverable(q))
	stored := p.stored(p.ctx, t)
	for _, e := range p.m.in(q, func(e *envelope) bool { return e.doomed() && e.due() || p.m.hopeless(e, p.world) }) {
		d, there := stored[e.id]
		require.False(t, there && d.Dead == nil, "the queue is empty, they say, but: %s", e.describe())
	}
}

// withDue are the queues that something can be claimed of.
func (p *program) withDue() (names []string) {
	for _, q := range p.names {
		if len(p.deliverable(q)) > 0 {
			names = append(names, q)
		}
	}
	return names
}

// asking draws a claim. short: the lease is over before the consumer does anything.
func (p *program) asking(t *rapid.T) (q string, consumer int, handle *mongoq.Queue, opts []mongoq.ReserveOption, short bool) {
	q, consumer = p.any(t), p.consumer(t)
	if there := p.withDue(); len(there) > 0 && !chance(t, "whatever is there", 5) {
		q = some(t, "queue with work", there)
	}
	if short = chance(t, "with a short lease", 6); short {
		opts = append(opts, mongoq.LeaseFor(time.Millisecond))
	}
	return q, consumer, p.handle[consumer][q], opts, short
}

func (p *program) tryReserve(t *rapid.T) {
	q, consumer, handle, opts, short := p.asking(t)
	r, err := handle.TryReserve(p.ctx, opts...)
	p.got(t, q, consumer, r, short, err)
}

// got judges the answer to a claim that does not wait.
func (p *program) got(t *rapid.T, q string, consumer int, r *mongoq.Reservation, short bool, err error) {
	paused, open := p.isPaused(q, consumer)
	switch {
	case errors.Is(err, mongoq.ErrQueuePaused):
		require.True(t, paused, "nobody has paused it")
	case errors.Is(err, mongoq.ErrEmpty):
		require.True(t, open, "it is paused")
		p.empty(t, q)
	default:
		require.NoError(t, err)
		require.True(t, open, "it is paused")
		p.take(t, q, consumer, r, short)
	}
}

// reserve waits: for what is there, or in vain.
func (p *program) reserve(t *rapid.T) {
	q, consumer, handle, opts, short := p.asking(t)
	if paused, _ := p.isPaused(q, consumer); paused {
		t.Skip("paused")
	}
	if len(p.deliverable(q)) == 0 {
		ctx, cancel := context.WithTimeout(p.ctx, 5*time.Millisecond)
		defer cancel()
		_, err := handle.Reserve(ctx, opts...)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		// It may have left a claim behind, which is over when the next of this process is answered.
		r, err := handle.TryReserve(p.ctx)
		p.got(t, q, consumer, r, false, err)
		return
	}
	ctx, cancel := context.WithTimeout(p.ctx, soon)
	defer cancel()
	r, err := handle.Reserve(ctx, opts...)
	require.NoError(t, err)
	p.take(t, q, consumer, r, short)
}

func (p *program) reserveMany(t *rapid.T) {
	q, consumer, handle, opts, short := p.asking(t)
	there := len(p.deliverable(q))
	if paused, _ := p.isPaused(q, consumer); paused || there == 0 {
		t.Skip("paused, or empty")
	}
	n := rapid.IntRange(1, 4).Draw(t, "how many")
	aside := p.m.in(q, func(e *envelope) bool { return e.doomed() || p.m.hopeless(e, p.world) })
	ctx, cancel := context.WithTimeout(p.ctx, soon)
	defer cancel()
	rs, err := handle.ReserveMany(ctx, n, opts...)
	require.NoError(t, err)
	if len(aside) == 0 {
		require.Len(t, rs, min(n, there))
	}
	require.LessOrEqual(t, len(rs), n)
	for _, r := range rs {
		p.take(t, q, consumer, r, short)
	}
}

func (p *program) tryPop(t *rapid.T) {
	q, consumer := p.any(t), p.consumer(t)
	e, err := p.handle[consumer][q].TryPop(p.ctx)
	if err != nil {
		require.Nil(t, e)
		p.got(t, q, consumer, nil, false, err)
		return
	}
	_, open := p.isPaused(q, consumer)
	require.True(t, open, "it is paused")
	had := p.m.envs[e.ID]
	require.NotNil(t, had, "popped, and not in the model")
	require.True(t, had.q == q && p.m.deliverable(had, p.world), "popped: %s", had.describe())
	p.m.claim(had, &ticket{})
	require.Equal(t, had.deliveries, e.Deliveries)
	require.Equal(t, had.retries, e.Retries)
	p.m.commit(had, p.keeps(q), bson.RawValue{})
}

// ticket picks a reservation, whatever has become of it, and says whether its verbs are still allowed. Where the server's
// TTL index may delete the envelope at any time, that is not known, and nobody asks.
func (p *program) ticket(t *rapid.T) (tk *ticket, holds bool) {
	known := slices.DeleteFunc(slices.Clone(p.tickets), func(tk *ticket) bool {
		e := p.m.envs[tk.e.id]
		return e != nil && e.doomed()
	})
	// Those of which the outcome is not plain: nothing has settled them yet.
	if live := slices.DeleteFunc(slices.Clone(known), func(tk *ticket) bool { return tk.settled }); len(live) > 0 && !chance(t, "whatever became of it", 5) {
		known = live
	}
	tk = some(t, "reservation", known)
	return tk, p.m.holds(tk)
}

// outcome judges the answer to a holder's verb; true: it is done.
func (p *program) outcome(t *rapid.T, tk *ticket, holds bool, err error) bool {
	if !holds {
		require.ErrorIs(t, err, mongoq.ErrLeaseLost)
		tk.settled = true
		return false
	}
	require.NoError(t, err)
	tk.settled = true
	return true
}

// vanished is true of a reservation whose envelope is gone, while its consumer has reason to believe that nobody else
// can have taken it: the server's clock jumped.
func (p *program) vanished(tk *ticket) bool {
	return !tk.sure && !tk.settled && !p.keeps(tk.q) && p.m.envs[tk.e.id] != tk.e
}

func (p *program) commit(t *rapid.T) {
	tk, holds := p.ticket(t)
	var opts []mongoq.CommitOption
	var result bson.RawValue
	keeps := p.keeps(tk.q)
	if chance(t, "with a result", 3) {
		v := one(t, "result", payloads...)
		opts = append(opts, mongoq.Result(v))
		result = value(v)
	}
	if chance(t, "to be kept otherwise", 5) {
		keeps = !keeps
		opts = append(opts, mongoq.Retain(map[bool]time.Duration{true: mongoq.KeepForever}[keeps]))
	}
	vanished := !tk.sure && !tk.settled && !keeps && p.m.envs[tk.e.id] != tk.e
	err := tk.r.Commit(p.ctx, opts...)
	if vanished && errors.Is(err, mongoq.ErrOutcomeUnknown) {
		p.forget(tk)
		return
	}
	if p.outcome(t, tk, holds, err) {
		p.m.commit(tk.e, keeps, result)
	}
}

// forget ends the use of a reservation.
func (p *program) forget(tk *ticket) {
	p.tickets = slices.DeleteFunc(p.tickets, func(other *ticket) bool { return other == tk })
}

func (p *program) commitMany(t *rapid.T) {
	first, _ := p.ticket(t)
	var tks []*ticket
	for _, tk := range p.tickets {
		e := p.m.envs[tk.e.id]
		if tk.q == first.q && tk.consumer == first.consumer && !p.vanished(tk) && (e == nil || !e.doomed()) && len(tks) < 5 {
			tks = append(tks, tk)
		}
	}
	if len(tks) == 0 {
		t.Skip("none")
	}
	rs := make([]*mongoq.Reservation, len(tks))
	holds := make([]bool, len(tks))
	for i, tk := range tks {
		rs[i], holds[i] = tk.r, p.m.holds(tk)
	}
	err := p.handle[first.consumer][first.q].CommitMany(p.ctx, rs)
	errs := make([]error, len(tks))
	if err != nil {
		var be *mongoq.BatchError
		require.ErrorAs(t, err, &be)
		for _, f := range be.Failed {
			errs[f.Index] = f.Err
		}
	}
	for i, tk := range tks {
		if p.outcome(t, tk, holds[i], errs[i]) {
			p.m.commit(tk.e, p.keeps(tk.q), bson.RawValue{})
		}
	}
}

var errFailed = errors.New("it failed")

func (p *program) rollback(t *rapid.T) {
	tk, holds := p.ticket(t)
	var opts []mongoq.RollbackOption
	cause := errFailed
	later := chance(t, "later", 4)
	if later {
		opts = append(opts, mongoq.After(long))
	}
	permanent := chance(t, "permanent", 6)
	if permanent {
		cause = backoff.Permanent(errFailed)
	}
	replaced := chance(t, "with a payload", 4)
	payload := payloads[0]
	if replaced {
		payload = one(t, "payload", payloads...)
		opts = append(opts, mongoq.Payload(payload))
	}
	if !p.outcome(t, tk, holds, tk.r.Rollback(p.ctx, cause, opts...)) {
		return
	}
	if replaced {
		tk.e.payload = value(payload)
	}
	if to := p.deadLetterOf(tk.e.q); permanent && tk.e.dead == "" && to != "" {
		p.m.bury(tk.e, to, mongoq.DeadPermanent)
		return
	}
	p.m.fail(tk.e, later, p.world)
}

func (p *program) release(t *rapid.T) {
	tk, holds := p.ticket(t)
	var opts []mongoq.ReleaseOption
	later := chance(t, "later", 4)
	if later {
		opts = append(opts, mongoq.Delay(long))
	}
	if p.outcome(t, tk, holds, tk.r.Release(p.ctx, opts...)) {
		tk.e.giveUp(later)
	}
}

func (p *program) extend(t *rapid.T) {
	tk, holds := p.ticket(t)
	err := tk.r.Extend(p.ctx, long)
	if !holds {
		require.ErrorIs(t, err, mongoq.ErrLeaseLost)
		tk.settled = true
		return
	}
	require.NoError(t, err)
	tk.e.lapsed, tk.sure = false, true
}

func (p *program) move(t *rapid.T) {
	tk, holds := p.ticket(t)
	to := p.live(t)
	var opts []mongoq.MoveOption
	later := chance(t, "later", 6)
	if later {
		opts = append(opts, mongoq.Delay(long))
	}
	prio, ttl, replaced := 0, chance(t, "with a TTL", 8), chance(t, "with headers", 4)
	if chance(t, "with a priority", 4) {
		prio = rapid.IntRange(1, 4).Draw(t, "priority")
		opts = append(opts, mongoq.Priority(prio))
	}
	if ttl {
		opts = append(opts, mongoq.TTL(24*long))
	}
	headers := map[string]string{"$moved": "$q"}
	if replaced {
		opts = append(opts, mongoq.AddHeaders(headers))
	}
	if !p.outcome(t, tk, holds, tk.r.MoveToQ(p.ctx, to, opts...)) {
		return
	}
	p.m.move(tk.e, to, later)
	if prio != 0 {
		tk.e.prio = prio
	}
	if ttl {
		tk.e.mortal, tk.e.expired = true, false
	}
	if replaced {
		merged := maps.Clone(headers)
		maps.Copy(merged, tk.e.headers)
		tk.e.headers = merged
	}
}

func (p *program) deadLetter(t *rapid.T) {
	tk, holds := p.ticket(t)
	err := tk.r.DeadLetter(p.ctx, errFailed)
	if p.deadLetterOf(tk.q) == "" && tk.r.Dead == nil {
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		return
	}
	if p.outcome(t, tk, holds, err) {
		p.m.deadLetter(tk.e, p.world)
	}
}

// lapse ends a lease: as its holder asked for, or since the server's clock jumped, of which its holder knows nothing.
func (p *program) lapse(t *rapid.T) {
	tk := some(t, "reservation", slices.DeleteFunc(slices.Clone(p.tickets), func(tk *ticket) bool {
		return p.m.envs[tk.e.id] != tk.e || tk.e.holder != tk || tk.e.state != held || tk.e.lapsed
	}))
	if chance(t, "as asked for", 2) {
		require.NoError(t, tk.r.Extend(p.ctx, time.Millisecond))
		p.awaitDue(p.ctx, t, tk.e.id)
		tk.sure = true
	} else {
		p.set(p.ctx, t, tk.e.id, bson.D{{Key: "when", Value: "$$NOW"}})
		tk.sure = false
	}
	tk.e.lapsed = true
}

// expire lets a deadline pass.
func (p *program) expire(t *rapid.T) {
	e := some(t, "envelope", p.m.all(func(e *envelope) bool {
		return e.mortal && !e.expired && e.dead == "" && e.state != done
	}))
	p.set(p.ctx, t, e.id, bson.D{{Key: "deadline", Value: "$$NOW"}})
	e.expired = true
}

// withDead picks a queue that dead letters come from.
func (p *program) withDead(t *rapid.T) string { return one(t, "queue", p.names[:2]...) }

func (p *program) redrive(t *rapid.T) {
	q, consumer := p.withDead(t), p.consumer(t)
	to := q
	var opts []mongoq.RedriveOption
	if chance(t, "elsewhere", 4) {
		to = p.names[2]
		opts = append(opts, mongoq.To(p.handle[consumer][to]))
	}
	chosen := p.m.died(q, (*envelope).idle)
	if chance(t, "one", 3) && len(chosen) > 0 {
		e := some(t, "envelope", chosen)
		chosen = []*envelope{e}
		opts = append(opts, mongoq.IDs(e.id))
	}
	n, err := p.handle[consumer][q].DeadLetters().Redrive(p.ctx, opts...)
	require.NoError(t, err)
	require.EqualValues(t, len(chosen), n)
	for _, e := range chosen {
		p.m.redrive(e, to)
	}
}

func (p *program) remove(t *rapid.T) {
	e := some(t, "envelope", p.m.all(func(e *envelope) bool { return !e.doomed() }))
	q, consumer := e.q, p.consumer(t)
	if chance(t, "in another queue", 5) {
		q = p.any(t)
	}
	err := p.handle[consumer][q].Remove(p.ctx, e.id)
	switch {
	case q != e.q || e.state == done:
		require.ErrorIs(t, err, mongoq.ErrNotFound)
	case !e.idle():
		require.ErrorIs(t, err, mongoq.ErrReserved)
	default:
		require.NoError(t, err)
		delete(p.m.envs, e.id)
	}
}

func (p *program) purge(t *rapid.T) {
	q := p.any(t)
	n, err := p.handle[p.consumer(t)][q].Purge(p.ctx)
	require.NoError(t, err)
	p.purged(t, n, p.m.in(q, func(e *envelope) bool { return e.idle() && e.dead == "" }))
}

func (p *program) purgeDead(t *rapid.T) {
	q := p.withDead(t)
	n, err := p.handle[p.consumer(t)][q].DeadLetters().Purge(p.ctx)
	require.NoError(t, err)
	p.purged(t, n, p.m.died(q, (*envelope).idle))
}

func (p *program) purged(t *rapid.T, n int64, es []*envelope) {
	least := 0
	for _, e := range es {
		if !e.doomed() { // that may have been gone
			least++
		}
		delete(p.m.envs, e.id)
	}
	require.GreaterOrEqual(t, n, int64(least))
	require.LessOrEqual(t, n, int64(len(es)))
}

func (p *program) pause(t *rapid.T) {
	q, consumer := p.live(t), p.consumer(t)
	if p.paused[q] {
		require.NoError(t, p.handle[consumer][q].Resume(p.ctx))
	} else {
		require.NoError(t, p.handle[consumer][q].Pause(p.ctx))
	}
	p.paused[q], p.pauser[q] = !p.paused[q], consumer
}

// again is the envelope that a replay makes of a finished one.
func again(e *envelope, to string, id bson.ObjectID, by string) *envelope {
	n := &envelope{id: id, q: to, payload: e.payload, headers: e.headers, prio: e.prio, state: waiting, replayOf: e.id, replayID: by}
	if by != "" {
		n.pushedAs = "replay"
	}
	return n
}

func (p *program) replay(t *rapid.T) {
	e := some(t, "envelope", p.m.all(func(e *envelope) bool { return !e.doomed() }))
	id, err := p.handle[p.consumer(t)][e.q].History().Replay(p.ctx, e.id)
	if e.state != done {
		require.ErrorIs(t, err, mongoq.ErrNotFound)
		return
	}
	require.NoError(t, err)
	p.m.add(again(e, e.q, id, ""))
}

// replayMany pushes again all that a queue has done: under the same id what is there is not pushed twice.
func (p *program) replayMany(t *rapid.T) {
	q, consumer, by := p.names[1], p.consumer(t), one(t, "replay", "first", "$second")
	to := q
	var opts []mongoq.ReplayOption
	if by == "first" {
		to = p.names[0]
		opts = append(opts, mongoq.To(p.handle[consumer][to]))
	}
	var fresh []*envelope
	finished := p.m.in(q, func(e *envelope) bool { return e.state == done && e.replayID != by })
	for _, e := range finished {
		if len(p.m.all(func(n *envelope) bool { return n.replayOf == e.id && n.replayID == by })) == 0 {
			fresh = append(fresh, e)
		}
	}
	n, err := p.handle[consumer][q].History().ReplayMany(p.ctx, by, opts...)
	require.NoError(t, err)
	require.EqualValues(t, len(finished), n)
	pushed := map[bson.ObjectID]bson.ObjectID{}
	for id, d := range p.stored(p.ctx, t) {
		if p.m.envs[id] == nil && d.ReplayOf != nil && d.ReplayOf.By == by {
			pushed[d.ReplayOf.ID] = id
		}
	}
	require.Len(t, pushed, len(fresh))
	for _, e := range fresh {
		require.Contains(t, pushed, e.id)
		p.m.add(again(e, to, pushed[e.id], by))
	}
}

// look reads, in each way there is.
func (p *program) look(t *rapid.T) {
	q, consumer := p.any(t), p.consumer(t)
	handle := p.handle[consumer][q]
	if len(p.m.in(q, (*envelope).doomed)) == 0 {
		s, err := handle.Stats(p.ctx)
		require.NoError(t, err)
		count := func(es []*envelope) int64 { return int64(len(es)) }
		ready := count(p.m.in(q, (*envelope).due))
		scheduled := count(p.m.in(q, func(e *envelope) bool { return e.state == waiting && e.later }))
		reserved := count(p.m.in(q, func(e *envelope) bool { return e.state == held && !e.lapsed }))
		processed := count(p.m.in(q, func(e *envelope) bool { return e.state == done }))
		dead := count(p.m.died(q, func(*envelope) bool { return true }))
		require.Equal(t, []int64{ready + scheduled + reserved, ready, scheduled, reserved, processed, dead},
			[]int64{s.Total, s.Ready, s.Scheduled, s.Reserved, s.Processed, s.Dead})
		paused, open := p.isPaused(q, consumer)
		require.True(t, s.Paused && paused || !s.Paused && open)
	}
	due := p.m.in(q, func(e *envelope) bool { return e.due() && !e.doomed() })
	seen, err := handle.Peek(p.ctx, 3)
	require.NoError(t, err)
	require.Len(t, seen, min(3, len(due)))
	last := 1
	for _, e := range seen {
		require.True(t, slices.Contains(due, p.m.envs[e.ID]))
		require.GreaterOrEqual(t, e.Priority, last)
		last = e.Priority
	}
	var finished []bson.ObjectID
	var before time.Time
	for e, err := range handle.History().List(p.ctx) {
		require.NoError(t, err)
		require.False(t, !before.IsZero() && e.Processed.After(before), "the latest comes first")
		before = e.Processed
		finished = append(finished, e.ID)
	}
	require.ElementsMatch(t, idsOf(p.m.in(q, func(e *envelope) bool { return e.state == done })), finished)
	var dead []bson.ObjectID
	for e, err := range handle.DeadLetters().List(p.ctx) {
		require.NoError(t, err)
		dead = append(dead, e.ID)
	}
	require.ElementsMatch(t, idsOf(p.m.died(q, func(*envelope) bool { return true })), dead)
	for _, e := range p.m.all(func(e *envelope) bool { return !e.doomed() }) {
		_, err := handle.Get(p.ctx, e.id)
		if e.q == q {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, mongoq.ErrNotFound)
		}
	}
}

func idsOf(es []*envelope) []bson.ObjectID {
	ids := []bson.ObjectID{}
	for _, e := range es {
		ids = append(ids, e.id)
	}
	return ids
}

// finish lets every lease lapse, and consumes what is left: nothing is lost, nothing is stuck.
func (p *program) finish(t *rapid.T) {
	for _, e := range p.m.all(func(e *envelope) bool { return e.state != done }) {
		if e.state == held && !e.lapsed || e.later {
			p.set(p.ctx, t, e.id, bson.D{{Key: "when", Value: "$$NOW"}})
			e.lapsed, e.later = e.state == held, false
		}
	}
	for _, q := range p.names {
		require.NoError(t, p.handle[0][q].Resume(p.ctx))
		p.paused[q], p.pauser[q] = false, 0
		for {
			r, err := p.handle[0][q].TryReserve(p.ctx)
			p.got(t, q, 0, r, false, err)
			p.agree(t)
			if err != nil {
				break
			}
			require.NoError(t, r.Commit(p.ctx))
			p.m.commit(p.m.envs[r.ID], p.keeps(q), bson.RawValue{})
		}
	}
	p.agree(t)
	require.Empty(t, p.m.all(func(e *envelope) bool { return e.state != done }))
}

// Random programs do on a server what they do in the model.
func TestPrograms(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	stores := openStores(t, db)
	rapid.Check(t, func(t *rapid.T) {
		p := newProgram(t, newWorld(t, db, stores, atOnce), rules{})
		t.Repeat(p.verbs())
		p.finish(t)
	})
}

// In queues that have been much used consumers look from where the head was, not from the head.
func TestProgramsInBusyQueues(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	w := newWorld(t, db, openStores(t, db), atOnce)
	w.use(t.Context(), t, 600)
	require.Eventually(t, func() bool {
		n, err := w.coll().CountDocuments(t.Context(), bson.D{{Key: "divider", Value: true}})
		require.NoError(t, err)
		return n == 4*3
	}, soon, time.Millisecond, "nobody holds them for busy")
	rapid.Check(t, func(rt *rapid.T) {
		w.empty(t.Context(), rt)
		p := newProgram(rt, w, rules{})
		rt.Repeat(p.verbs())
		p.finish(rt)
	})
}

// The check can fail: a model with a wrong rule is found out, by a program that shrinks to a few verbs.
func TestProgramsFindAWrongModel(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	stores := openStores(t, db)
	for name, wrong := range map[string]rules{
		"a stale consumer may commit":         {staleCommits: true},
		"a lost consumer counts no retry":     {forgivenLosses: true},
		"a move leaves a dead letter as dead": {undeadMoves: true},
	} {
		var ran []string // by the last program, which is the shortest
		first := 0       // how many the first had that failed
		rec := &recorder{}
		for tries := 0; tries < 5 && !rec.failed; tries++ {
			finished := make(chan struct{})
			go func() { // rapid ends it
				defer close(finished)
				rapid.Check(rec, func(t *rapid.T) {
					p := newProgram(t, newWorld(t, db, stores, atOnce), wrong) //nolint:testifylint // t is rapid's, which may fail here
					ran = nil
					passed := false
					defer func() {
						if !passed && first == 0 {
							first = len(ran)
						}
					}()
					verbs := map[string]func(*rapid.T){"": p.agree}
					for verb, run := range p.verbs() {
						if slices.Contains([]string{"push", "tryReserve", "lapse", "commit", "rollback", "deadLetter", "move"}, verb) {
							verbs[verb] = func(t *rapid.T) {
								run(t)
								ran = append(ran, verb) // but the one that fails
							}
						}
					}
					t.Repeat(verbs)
					passed = true
				})
			}()
			<-finished
		}
		require.True(t, rec.failed, "%s: nobody noticed", name)
		require.Contains(t, strings.Join(rec.said, "\n"), "[rapid] failed")
		require.LessOrEqual(t, len(ran), first, name)
		t.Logf("%s: noticed after %d verbs, and shrunk to %d: %v", name, first, len(ran), ran)
	}
}
