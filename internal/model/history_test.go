package model_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// The verbs of a history. Those that claim give a token; those that a holder calls name it.
const (
	opPush       = "push"
	opClaim      = "claim"
	opCommit     = "commit"
	opRollback   = "rollback"
	opRelease    = "release"
	opMove       = "move"
	opDeadLetter = "dead-letter"
	opExtend     = "extend"
	opRedrive    = "redrive"
	opLapse      = "lapse" // the lease runs out
	opRead       = "read"  // of what is stored, when all is over
)

// call is what a consumer asked for, of one envelope.
type call struct {
	verb  string
	id    bson.ObjectID
	token int    // the reservation that it is a verb of, or that a claim gave
	q     string // of a claim, a push and a move: the queue
	lost  []int  // the fencing numbers of the envelope that nobody was told
}

// answer is what it was told.
type answer int

const (
	succeeded answer = iota
	refused          // the lease was lost; of a redrive and a lapse: there was nothing to do
	unknown          // it may have happened, or may happen still
)

// claimed is what a claim has told beside the token.
type claimed struct{ deliveries, retries int }

type outcome struct {
	answer
	claimed
	read place
}

// place is the state of one envelope.
type place struct {
	exists, held, lapsed, dead, done bool

	q     string
	token int
	claimed
}

// nobody is the token of a claim that was made for one who had left, or whose answer was late. Its envelope is given back;
// it counts a delivery, and so its fencing number is missing among those that were told.
const nobody = -1

// reach gives the states that an envelope in one state may have come to unseen: by claims for nobody, as many as there are
// numbers missing.
func reach(s place, lost []int) []place {
	all := []place{s}
	for i := 0; i < len(all); i++ {
		n := all[i]
		switch {
		case n.held && n.token == nobody:
			n.held, n.lapsed, n.token = false, false, 0
		case n.exists && !n.done && (!n.held || n.lapsed) && slices.Contains(lost, n.deliveries+1):
			if n.held {
				n.retries++
			}
			n.held, n.lapsed, n.token, n.deliveries = true, false, nobody, n.deliveries+1
		default:
			continue
		}
		if !slices.Contains(all, n) {
			all = append(all, n)
		}
	}
	return all
}

// step gives the states that an envelope may be in after a call with that outcome; none: it cannot have had it.
func step(s place, c call, o outcome) []place {
	switch c.verb {
	case opPush:
		if s.exists {
			return nil
		}
		return []place{{exists: true, q: c.q}}
	case opRead:
		s.token, s.lapsed = 0, false
		if s != o.read {
			return nil
		}
		return []place{s}
	case opClaim:
		if !s.exists || s.done || s.q != c.q || s.held && !s.lapsed {
			return nil
		}
		n := s
		if s.held {
			n.retries++
		}
		n.deliveries++
		if o.claimed != n.claimed {
			return nil
		}
		n.held, n.lapsed, n.token = true, false, c.token
		return []place{n}
	case opLapse:
		if may := s.exists && !s.done && s.held && !s.lapsed; may != (o.answer == succeeded) {
			return nil
		}
		s.lapsed = s.lapsed || o.answer == succeeded
		return []place{s}
	case opRedrive:
		if may := s.exists && !s.done && s.dead && (!s.held || s.lapsed); may != (o.answer == succeeded) {
			return nil
		}
		if o.answer == succeeded {
			return []place{{exists: true, q: c.q, claimed: claimed{deliveries: s.deliveries}}}
		}
		return []place{s}
	}
	if may := s.exists && !s.done && s.held && s.token == c.token; !may {
		if o.answer == succeeded {
			return nil
		}
		return []place{s}
	}
	after := s.after(c)
	switch o.answer {
	case refused:
		return nil
	case unknown:
		return []place{s, after}
	}
	return []place{after}
}

// after is the state that a holder's verb leaves.
func (s place) after(c call) place {
	switch c.verb {
	case opExtend:
		s.lapsed = false
		return s
	case opCommit:
		return place{exists: true, done: true, dead: s.dead, q: s.q, claimed: s.claimed}
	case opRollback:
		s.retries++
	case opMove:
		s.q, s.dead, s.retries = c.q, false, 0
	case opDeadLetter:
		s.q, s.dead = c.q, true
	}
	s.held, s.lapsed, s.token = false, false, 0
	return s
}

// lifeOfAnEnvelope is what porcupine checks histories against, each envelope for itself.
func lifeOfAnEnvelope() porcupine.Model {
	nm := porcupine.NondeterministicModel{
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			byID := map[bson.ObjectID][]porcupine.Operation{}
			for _, op := range history {
				id := op.Input.(call).id
				byID[id] = append(byID[id], op)
			}
			var parts [][]porcupine.Operation
			for _, part := range byID {
				parts = append(parts, part)
			}
			return parts
		},
		Init: func() []any { return []any{place{}} },
		Step: func(state, input, output any) []any {
			var next []any
			for _, from := range reach(state.(place), input.(call).lost) {
				for _, s := range step(from, input.(call), output.(outcome)) {
					next = append(next, s)
				}
			}
			return next
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v: %+v", input, output) },
		DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
	}
	return nm.ToModel()
}

// record is a history in the making.
type record struct {
	began time.Time

	mu     sync.Mutex
	ops    []porcupine.Operation
	tokens int
}

func (r *record) now() int64 { return time.Since(r.began).Nanoseconds() }

func (r *record) token() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokens++
	return r.tokens
}

func (r *record) note(client int, at int64, c call, o outcome) {
	op := porcupine.Operation{ClientId: client, Input: c, Call: at, Output: o, Return: r.now()}
	if o.answer == unknown { // it may happen at any time
		op.Return = time.Hour.Nanoseconds()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, op)
}

// answerOf makes an answer of an error; any other one is the run's.
func answerOf(err error) (answer, error) {
	switch {
	case err == nil:
		return succeeded, nil
	case errors.Is(err, mongoq.ErrLeaseLost):
		return refused, nil
	case errors.Is(err, mongoq.ErrOutcomeUnknown):
		return unknown, nil
	}
	return 0, err
}

// worker is one of many that work on the same few envelopes at once.
type worker struct {
	no    int
	w     *world
	rec   *record
	known *reservations // of all workers
	rnd   *rand.Rand
}

// reservations are what workers were given, those that were lost or settled among them: any worker calls verbs of any.
type reservations struct {
	mu  sync.Mutex
	all []reserved
	ids []bson.ObjectID
}

type reserved struct {
	token int
	r     *mongoq.Reservation
}

func (k *reservations) add(r reserved) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, r)
}

// pick gives one of the latest, so that there are those that still hold and those that don't.
func (k *reservations) pick(rnd *rand.Rand) (reserved, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.all) == 0 {
		return reserved{}, false
	}
	from := max(0, len(k.all)-8)
	return k.all[from+rnd.IntN(len(k.all)-from)], true
}

func (k *worker) id() bson.ObjectID { return k.known.ids[k.rnd.IntN(len(k.known.ids))] }

// queue is a queue of the worker's process.
func (k *worker) queue(i int) *mongoq.Queue { return k.w.handle[k.no%consumers][k.w.names[i]] }

func (k *worker) act(ctx context.Context) error {
	switch n := k.rnd.IntN(10); {
	case n < 4:
		return k.claim(ctx)
	case n < 8:
		return k.settle(ctx)
	case n < 9:
		return k.lapse(ctx)
	}
	return k.redrive(ctx)
}

func (k *worker) claim(ctx context.Context) error {
	q := k.queue([]int{1, 1, 2, 4}[k.rnd.IntN(4)])
	at := k.rec.now()
	var rs []*mongoq.Reservation
	var err error
	if k.rnd.IntN(2) == 0 {
		var r *mongoq.Reservation
		if r, err = q.TryReserve(ctx); err == nil {
			rs = append(rs, r)
		}
	} else {
		brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		rs, err = q.ReserveMany(brief, 2)
	}
	for _, r := range rs {
		token := k.rec.token()
		k.rec.note(k.no, at, call{verb: opClaim, id: r.ID, token: token, q: q.Name()},
			outcome{claimed: claimed{deliveries: r.Deliveries, retries: r.Retries}})
		k.known.add(reserved{token, r})
	}
	if errors.Is(err, mongoq.ErrEmpty) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// settle calls a verb of a reservation, which another worker may have.
func (k *worker) settle(ctx context.Context) error {
	held, ok := k.known.pick(k.rnd)
	if !ok {
		return nil
	}
	c := call{id: held.r.ID, token: held.token}
	at := k.rec.now()
	var err error
	switch n := k.rnd.IntN(12); {
	case n < 3:
		c.verb = opCommit
		err = held.r.Commit(ctx, mongoq.Retain(mongoq.KeepForever)) // it leaves a trace
	case n < 5:
		c.verb = opRollback
		err = held.r.Rollback(ctx, errFailed)
	case n < 7:
		c.verb = opRelease
		err = held.r.Release(ctx)
	case n < 9:
		c.verb, c.q = opMove, k.w.names[1+k.rnd.IntN(2)]
		err = held.r.MoveToQ(ctx, c.q)
	case n < 11 || held.r.Dead != nil || k.w.deadLetterOf(held.r.Q) == "":
		c.verb = opExtend
		err = held.r.Extend(ctx, long)
	default:
		c.verb, c.q = opDeadLetter, k.w.deadLetterOf(held.r.Q)
		err = held.r.DeadLetter(ctx, errFailed)
	}
	told, err := answerOf(err)
	k.rec.note(k.no, at, c, outcome{answer: told})
	return err
}

// lapse has a lease run out, as time would.
func (k *worker) lapse(ctx context.Context) error {
	c := call{verb: opLapse, id: k.id()}
	at := k.rec.now()
	res, err := k.w.coll().UpdateOne(ctx, bson.D{
		{Key: "_id", Value: c.id}, {Key: "processed", Value: nil}, {Key: "lease", Value: bson.D{{Key: "$exists", Value: true}}},
		{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$when", "$$NOW"}}}},
	}, bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "when", Value: "$$NOW"}}}}})
	if err != nil {
		return err
	}
	k.rec.note(k.no, at, c, outcome{answer: succeededIf(res.MatchedCount == 1)})
	return nil
}

func succeededIf(yes bool) answer {
	if yes {
		return succeeded
	}
	return refused
}

func (k *worker) redrive(ctx context.Context) error {
	c := call{verb: opRedrive, id: k.id(), q: k.w.names[1]}
	at := k.rec.now()
	n, err := k.queue(1).DeadLetters().Redrive(ctx, mongoq.IDs(c.id))
	if err != nil {
		return err
	}
	k.rec.note(k.no, at, c, outcome{answer: succeededIf(n == 1)})
	return nil
}

// forEver is a policy that retries at once and for ever: nobody dies but by a verb.
func forEver() backoff.BackOff { return &backoff.ZeroBackOff{} }

// runOf has several workers in two processes work on a few envelopes at once, and gives the history of that.
func runOf(t testing.TB, db *mongo.Database, stores []*mongoq.Store, seed uint64) []porcupine.Operation {
	t.Helper()
	const workers, acts, envelopes = 6, 50, 5
	w := newWorld(t, db, stores, forEver)
	rec := &record{began: time.Now()}
	known := &reservations{}
	for range envelopes {
		at := rec.now()
		id, err := w.handle[0][w.names[1]].Push(t.Context(), "x")
		require.NoError(t, err)
		rec.note(0, at, call{verb: opPush, id: id, q: w.names[1]}, outcome{})
		known.ids = append(known.ids, id)
	}
	var all sync.WaitGroup
	errs := make([]error, workers)
	for no := range workers {
		k := &worker{no: no, w: w, rec: rec, known: known, rnd: rand.New(rand.NewPCG(seed, uint64(no)))}
		all.Go(func() {
			for range acts {
				errs[no] = errors.Join(errs[no], k.act(t.Context()))
			}
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	for _, id := range known.ids {
		rec.readLast(t, w, id)
	}
	return rec.ops
}

// readLast notes what is stored of an envelope when all is over, and which of its fencing numbers nobody was told.
func (r *record) readLast(t testing.TB, w *world, id bson.ObjectID) {
	t.Helper()
	at := r.now()
	d, there := w.stored(t.Context(), t)[id]
	require.True(t, there, "nothing is deleted here")
	r.note(0, at, call{verb: opRead, id: id}, outcome{read: place{
		exists: true, held: !d.Lease.IsZero() && d.Processed.IsZero(), dead: d.Dead != nil, done: !d.Processed.IsZero(), q: d.Q,
		claimed: claimed{deliveries: d.Deliveries, retries: d.Retries},
	}})
	told := map[int]bool{}
	for _, op := range r.ops {
		if c := op.Input.(call); c.id == id && c.verb == opClaim {
			told[op.Output.(outcome).deliveries] = true
		}
	}
	var lost []int
	for n := 1; n <= d.Deliveries; n++ {
		if !told[n] {
			lost = append(lost, n)
		}
	}
	for i := range r.ops {
		if c := r.ops[i].Input.(call); c.id == id {
			c.lost = lost
			r.ops[i].Input = c
		}
	}
}

func check(history []porcupine.Operation) porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(lifeOfAnEnvelope(), history, time.Minute)
}

// doctor gives a copy of a history with the last of the operations that are chosen told otherwise; false: there is none.
func doctor(history []porcupine.Operation, chosen func(call, outcome) bool, otherwise func(*call, *outcome)) ([]porcupine.Operation, bool) {
	for i, op := range slices.Backward(history) {
		c, o := op.Input.(call), op.Output.(outcome)
		if chosen(c, o) {
			otherwise(&c, &o)
			doctored := slices.Clone(history)
			doctored[i].Input, doctored[i].Output = c, o
			return doctored, true
		}
	}
	return nil, false
}

// numberOfAnother is the fencing number of another claim of the same envelope.
func numberOfAnother(history []porcupine.Operation, c call) int {
	for _, op := range history {
		if other := op.Input.(call); other.verb == opClaim && other.id == c.id && other.token != c.token {
			return op.Output.(outcome).deliveries
		}
	}
	return 0
}

// What concurrent consumers were told of an envelope must be what they could have been told one after the other: of
// claims by whoever came first, of verbs by whoever holds the lease.
func TestHistories(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	stores := openStores(t, db)
	told := map[string]int{}
	caught := map[string]int{}
	for seed := range uint64(*histories) {
		history := runOf(t, db, stores, seed)
		require.Equal(t, porcupine.Ok, check(history), "seed %d", seed)
		for _, op := range history {
			if n := len(op.Input.(call).lost); n > 0 && op.Input.(call).verb == opRead {
				told["claim, for nobody"] += n
			}
			told[fmt.Sprint(op.Input.(call).verb, []string{"", ", refused", ", unknown"}[op.Output.(outcome).answer])]++
		}
		// The check can fail: a history in which one answer is another has no linear order.
		for what, doctored := range map[string]func() ([]porcupine.Operation, bool){
			"a stale commit that succeeded": func() ([]porcupine.Operation, bool) {
				return doctor(history, func(c call, o outcome) bool { return c.verb == opCommit && o.answer == refused },
					func(_ *call, o *outcome) { o.answer = succeeded })
			},
			"a commit that came to nothing": func() ([]porcupine.Operation, bool) {
				return doctor(history, func(c call, o outcome) bool { return c.verb == opCommit && o.answer == succeeded },
					func(_ *call, o *outcome) { o.answer = refused })
			},
			"a claim of what was not there": func() ([]porcupine.Operation, bool) {
				return doctor(history, func(c call, o outcome) bool { return c.verb == opClaim },
					func(c *call, _ *outcome) { c.q = "elsewhere" })
			},
			"a fencing number twice": func() ([]porcupine.Operation, bool) {
				return doctor(history, func(c call, o outcome) bool { return c.verb == opClaim && numberOfAnother(history, c) > 0 },
					func(c *call, o *outcome) { o.deliveries = numberOfAnother(history, *c) })
			},
		} {
			if wrong, ok := doctored(); ok {
				require.Equal(t, porcupine.Illegal, check(wrong), "seed %d: %s", seed, what)
				caught[what]++
			}
		}
	}
	t.Logf("told: %v; doctored and caught: %v", told, caught)
	require.Len(t, caught, 4)
	for _, verb := range []string{opClaim, opCommit, opRollback, opRelease, opMove, opExtend, opLapse} {
		require.NotZero(t, told[verb], verb)
	}
	require.NotZero(t, told[opRollback+", refused"]+told[opRelease+", refused"]+told[opMove+", refused"], "nobody was stale")
}
