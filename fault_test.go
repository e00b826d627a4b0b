package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Codes that the tests make the server answer with.
const (
	codeUnauthorized = 13
	codeIllegal      = 20
	codeMaxTime      = 50
	codeWCFailed     = 64
	codeShuttingDown = 91
	codeSteppedDown  = 189
	codeTimeLimit    = 262
	codeNotPrimary   = 10107
	codeAtShutdown   = 11600

	codeOfNetwork = 0 // stands for an error of the network
)

// stage is where transitions are tried: a store on a client of its own.
type stage struct {
	kind    mongotest.Kind
	retries bool // the client's retryWrites
	db      *mongo.Database
	store   *mongoq.Store
	met     chan string // tells the name of each command that failed
}

var stageQueues atomic.Int64

// queue is a queue that no other trial uses. Its leases are long, and nobody polls: what is stranded is missed.
func (s *stage) queue(t testing.TB, cfg ...mongoq.QueueConfig) *mongoq.Queue {
	t.Helper()
	c := only(cfg)
	c.Lease, c.PollInterval = time.Hour, time.Minute
	return newQueue(t, s.store, fmt.Sprintf("q%d", stageQueues.Add(1)), c)
}

// faultClient has a client look for its server at once after a fault, if its last look was half a second ago.
func faultClient(retries bool, met chan string) *options.ClientOptions {
	return options.Client().SetRetryWrites(retries).
		SetHeartbeatInterval(10 * time.Second).SetServerMonitoringMode("poll").
		SetMonitor(tellFailed(met))
}

// tellFailed tells of each command that failed or that no majority acknowledged.
func tellFailed(met chan string) *event.CommandMonitor {
	return &event.CommandMonitor{
		Failed: func(_ context.Context, e *event.CommandFailedEvent) { met <- e.CommandName },
		Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
			if _, err := e.Reply.LookupErr("writeConcernError"); err == nil {
				met <- e.CommandName
			}
		},
	}
}

func newMet() chan string { return make(chan string, 100_000) }

func drain(met chan string) {
	for len(met) > 0 {
		<-met
	}
}

// awaitFailed waits until a command of this name has failed.
func awaitFailed(t testing.TB, met chan string, command string) {
	t.Helper()
	timeout := time.After(soon)
	for {
		select {
		case name := <-met:
			if name == command {
				return
			}
		case <-timeout:
			require.FailNow(t, "no command failed: "+command)
		}
	}
}

func faultyStage(t testing.TB, kind mongotest.Kind, retries bool, opts ...*options.ClientOptions) *stage {
	t.Helper()
	met := newMet()
	db := mongotest.Faulty(t, kind, append(opts, faultClient(retries, met))...)
	return &stage{kind: kind, retries: retries, db: db, store: openStore(t, db), met: met}
}

// beside is a stage of the same database, whose commands fail by themselves.
func (s *stage) beside(t testing.TB, retries bool, opts ...*options.ClientOptions) *stage {
	t.Helper()
	met := newMet()
	db := mongotest.Faulty(t, s.kind, append(opts, faultClient(retries, met))...).Client().Database(s.db.Name())
	return &stage{kind: s.kind, retries: retries, db: db, store: openStore(t, db), met: met}
}

// another is a stage on the same client: nothing of it goes together with what others do.
func (s *stage) another(t testing.TB) *stage {
	t.Helper()
	return &stage{kind: s.kind, retries: s.retries, db: s.db, store: openStore(t, s.db), met: s.met}
}

// transition is a guarded write as a caller makes it.
type transition struct {
	name     string
	command  string // that carries it, by its name on the wire
	retried  bool   // the driver may send it again by itself
	push     bool   // an insert, which the library sends again only when it was refused
	claim    bool
	pop      bool
	harmless bool // done twice is done
	batch    bool // of several, which are sent singly after a refusal
	numbered bool // the library sends it again, by a number, where the server has those
	prepare  func(t testing.TB, s *stage) *trial
}

// trial is one call of a transition, of one envelope or of several.
type trial struct {
	call func(context.Context) []error // one outcome for each envelope
	// effect tells of each envelope whether the transition is stored; the test fails on anything but once or not at all.
	effect func(t testing.TB) []bool
	again  bool // a second call asks for the same thing
}

// singly gives each of n members its error.
func singly(err error, n int) []error {
	errs := make([]error, n)
	var be *mongoq.BatchError
	if errors.As(err, &be) {
		for _, f := range be.Failed {
			errs[f.Index] = f.Err
		}
		return errs
	}
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// storedIn counts the envelopes of a queue, whatever their state.
func storedIn(t testing.TB, db *mongo.Database, q string) int {
	t.Helper()
	n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "q", Value: q}})
	require.NoError(t, err)
	return int(n)
}

// storedNow is a stored envelope; nil: there is none.
func storedNow(t testing.TB, db *mongo.Database, id bson.ObjectID) bson.Raw {
	t.Helper()
	raw, err := db.Collection("mongoq").FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	require.NoError(t, err)
	return raw
}

// transitions are all guarded writes.
var transitions = []transition{
	pushing("push", false),
	pushing("push with an id", true),
	{name: "push of many", command: "insert", push: true, batch: true, numbered: true, prepare: preparePushMany},
	{name: "claim", command: "findAndModify", claim: true, prepare: claiming(1)},
	{name: "claim of many", command: "update", claim: true, prepare: claiming(3)},
	settling("commit", "delete", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Commit(ctx)
	}, isDone(0)),
	settling("commit into the history", "update", mongoq.QueueConfig{Retention: time.Hour}, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Commit(ctx, mongoq.Result("done"))
	}, func(now bson.Raw) bool { return has(now, "processed") && has(now, "result") && has(now, "lease") }),
	settling("rollback", "update", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Rollback(ctx, errFailed, mongoq.After(time.Hour))
	}, func(now bson.Raw) bool {
		return !has(now, "lease") && numberOf(now, "retries") == 1 && lengthOf(now, "errs") == 1
	}),
	settling("release", "update", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Release(ctx, mongoq.Delay(time.Hour))
	}, func(now bson.Raw) bool { return !has(now, "lease") && numberOf(now, "retries") == 0 }),
	settling("move", "update", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.MoveToQ(ctx, "elsewhere")
	}, func(now bson.Raw) bool {
		return now.Lookup("q").StringValue() == "elsewhere" && numberOf(now, "moves") == 1 && lengthOf(now, "hops") == 1
	}),
	settling("dead-letter", "update", mongoq.QueueConfig{DeadLetter: "dead"}, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.DeadLetter(ctx, errFailed)
	}, func(now bson.Raw) bool {
		return now.Lookup("q").StringValue() == "dead" && numberOf(now, "moves") == 1 && has(now, "dead") && lengthOf(now, "errs") == 1
	}),
	extending("extend", mongoq.QueueConfig{}),
	popping("pop", "delete", mongoq.QueueConfig{}),
	popping("pop into the history", "update", mongoq.QueueConfig{Retention: time.Hour}),
	committingMany("commit of many", "delete", mongoq.QueueConfig{}),
	committingMany("commit of many into the history", "update", mongoq.QueueConfig{Retention: time.Hour}),
}

func extending(name string, cfg mongoq.QueueConfig) transition {
	tr := settling(name, "update", cfg, func(ctx context.Context, r *mongoq.Reservation) error {
		return r.Extend(ctx, 24*time.Hour)
	}, isExtended)
	tr.harmless = true
	return tr
}

func isExtended(now bson.Raw) bool {
	return has(now, "lease") && now.Lookup("when").Time().After(time.Now().Add(12*time.Hour))
}

func has(doc bson.Raw, field string) bool {
	_, err := doc.LookupErr(field)
	return err == nil
}

func numberOf(doc bson.Raw, field string) int64 {
	n, _ := doc.Lookup(field).AsInt64OK()
	return n
}

func lengthOf(doc bson.Raw, field string) int {
	a, _ := doc.Lookup(field).ArrayOK()
	all, _ := a.Values()
	return len(all)
}

func isDone(retention time.Duration) func(bson.Raw) bool {
	return func(now bson.Raw) bool {
		if retention == 0 {
			return now == nil
		}
		return has(now, "processed")
	}
}

// pushing is a push of one, under an id of the caller's or not.
func pushing(name string, named bool) transition {
	return transition{name: name, command: "insert", retried: true, push: true, prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t)
		var opts []mongoq.PushOption
		if named {
			opts = append(opts, mongoq.ID(bson.NewObjectID()))
		}
		return &trial{
			call: func(ctx context.Context) []error {
				id, err := q.Push(ctx, "x", opts...)
				if (err == nil || errors.Is(err, mongoq.ErrOutcomeUnknown)) == id.IsZero() {
					err = errors.Join(errors.New("the id and the error disagree"), err)
				}
				return []error{err}
			},
			effect: func(t testing.TB) []bool {
				n := storedIn(t, s.db, q.Name())
				require.LessOrEqual(t, n, 1, "it happened more than once")
				return []bool{n == 1}
			},
			again: named,
		}
	}}
}

func preparePushMany(t testing.TB, s *stage) *trial {
	t.Helper()
	q := s.queue(t)
	ids := []bson.ObjectID{bson.NewObjectID(), bson.NewObjectID(), bson.NewObjectID()}
	return &trial{
		call: func(ctx context.Context) []error {
			var all []any
			for i, id := range ids {
				all = append(all, mongoq.With(i, mongoq.ID(id)))
			}
			_, err := q.PushMany(ctx, all)
			return singly(err, len(ids))
		},
		effect: func(t testing.TB) (stored []bool) {
			for _, id := range ids {
				stored = append(stored, storedNow(t, s.db, id) != nil)
			}
			return stored
		},
		again: true,
	}
}

// settling is a verb of a reservation. happened looks at what is stored after it; nil: nothing is.
func settling(name, command string, cfg mongoq.QueueConfig, verb func(context.Context, *mongoq.Reservation) error, happened func(bson.Raw) bool) transition {
	return transition{name: name, command: command, retried: true, prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t, cfg)
		id := push(t, q, "x")
		r := tryReserve(t, q)
		before := storedBytes(t, s.db, id)
		return &trial{
			call:   func(ctx context.Context) []error { return []error{verb(ctx, r)} },
			effect: func(t testing.TB) []bool { return []bool{changed(t, before, storedNow(t, s.db, id), happened)} },
			again:  true,
		}
	}}
}

// changed tells an envelope that a verb has changed, once, from one as it was.
func changed(t testing.TB, before, now bson.Raw, happened func(bson.Raw) bool) bool {
	t.Helper()
	if string(before) == string(now) {
		return false
	}
	require.True(t, happened(now), "it is neither as before nor as the verb leaves it: %v", now)
	return true
}

func popping(name, command string, cfg mongoq.QueueConfig) transition {
	return transition{name: name, command: command, retried: true, pop: true, prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t, cfg)
		id := push(t, q, "x")
		return &trial{
			call: func(ctx context.Context) []error {
				e, err := q.TryPop(ctx)
				if (err == nil || errors.Is(err, mongoq.ErrOutcomeUnknown)) == (e == nil) {
					err = errors.Join(errors.New("the envelope and the error disagree"), err)
				}
				return []error{err}
			},
			effect: func(t testing.TB) []bool { return []bool{isDone(cfg.Retention)(storedNow(t, s.db, id))} },
		}
	}}
}

func committingMany(name, command string, cfg mongoq.QueueConfig) transition {
	return transition{name: name, command: command, batch: true, prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t, cfg)
		rs := reserveAll(t, q, 3)
		var before []bson.Raw
		for _, r := range rs {
			before = append(before, storedBytes(t, s.db, r.ID))
		}
		done := map[*mongoq.Reservation]bool{} // they are not committed a second time
		return &trial{
			call: func(ctx context.Context) []error {
				var left []*mongoq.Reservation
				for _, r := range rs {
					if !done[r] {
						left = append(left, r)
					}
				}
				errs := singly(q.CommitMany(ctx, left), len(left))
				all := make([]error, len(rs))
				for i, r := range rs {
					if k := slices.Index(left, r); k >= 0 {
						all[i], done[r] = errs[k], errs[k] == nil && mongo.SessionFromContext(ctx) == nil
					}
				}
				return all
			},
			effect: func(t testing.TB) (done []bool) {
				for i, r := range rs {
					done = append(done, changed(t, before[i], storedNow(t, s.db, r.ID), isDone(cfg.Retention)))
				}
				return done
			},
			again: true,
		}
	}}
}

// claiming waits for n envelopes that are there.
func claiming(n int) func(t testing.TB, s *stage) *trial {
	return func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t)
		var ids []bson.ObjectID
		for i := range n {
			ids = append(ids, push(t, q, i))
		}
		held := map[bson.ObjectID]*mongoq.Reservation{}
		take := func(ctx context.Context) ([]*mongoq.Reservation, error) {
			if n > 1 {
				return q.ReserveMany(ctx, n-len(held))
			}
			r, err := q.Reserve(ctx)
			return []*mongoq.Reservation{r}, err
		}
		return &trial{
			call: func(ctx context.Context) []error {
				for len(held) < n {
					got, err := take(ctx)
					if err != nil {
						return singly(err, n)
					}
					for _, r := range got {
						if r.Retries != 0 || held[r.ID] != nil {
							return singly(fmt.Errorf("%s: %d retries, held: %v", r.ID.Hex(), r.Retries, held[r.ID] != nil), n)
						}
						held[r.ID] = r
					}
				}
				return make([]error, n)
			},
			effect: func(t testing.TB) (mine []bool) {
				for _, id := range ids {
					mine = append(mine, held[id] != nil)
					if held[id] != nil {
						require.NoError(t, held[id].Extend(t.Context(), time.Hour), "it is really held")
					}
				}
				return mine
			},
			again: true,
		}
	}
}

// fault is a way of losing an answer.
type fault struct {
	name string
	data bson.D // of failCommand
	code int    // that the error has
	ran  bool   // the write is done all the same

	refused   bool // for good
	elsewhere bool // this server refuses; another may not
	label     bool // the driver may send it again
}

func failing(code int) fault {
	return fault{name: fmt.Sprint(code), code: code, data: bson.D{
		{Key: "errorCode", Value: code}, {Key: "errorLabels", Value: bson.A{}},
	}}
}

// unacknowledged is a write that is done, and not acknowledged by a majority.
func unacknowledged(code int) fault {
	return fault{name: fmt.Sprintf("write concern %d", code), code: code, ran: true, data: bson.D{
		{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: code}, {Key: "errmsg", Value: "made up"}}},
		{Key: "errorLabels", Value: bson.A{}},
	}}
}

func (f fault) labelled() fault {
	f.name, f.label = f.name+" with the label", true
	f.data = append(f.data[:1:1], bson.E{Key: "errorLabels", Value: bson.A{"RetryableWriteError"}})
	return f
}

func (f fault) asRefusal() fault   { f.refused = true; return f }
func (f fault) asElsewhere() fault { f.elsewhere = true; return f }

var closedConnection = fault{
	name: "connection closed", code: codeOfNetwork, label: true, data: bson.D{{Key: "closeConnection", Value: true}},
}

var faults = []fault{
	failing(codeShuttingDown), failing(codeNotPrimary).asElsewhere(),
	failing(codeShuttingDown).labelled(), failing(codeNotPrimary).asElsewhere().labelled(),
	failing(codeAtShutdown), failing(codeUnauthorized).asRefusal(),
	failing(codeAtShutdown).labelled(), failing(codeIllegal).asRefusal(),
	failing(codeSteppedDown), unacknowledged(codeShuttingDown),
	failing(codeSteppedDown).labelled(), unacknowledged(codeShuttingDown).labelled(),
	closedConnection, unacknowledged(codeWCFailed),
}

// isCause tells whether an error holds what the fault said, or that the driver has no connection because of it.
func (f fault) isCause(err error) bool {
	var pool interface{ Retryable() bool }
	if errors.As(err, &pool) && pool.Retryable() {
		return true
	}
	if f.code == codeOfNetwork {
		return mongo.IsNetworkError(err)
	}
	var se mongo.ServerError
	return errors.As(err, &se) && se.HasErrorCode(f.code)
}

// on is the fail point that has commands of that name, about envelopes, meet the fault.
func (f fault) on(db *mongo.Database, commands ...string) bson.D {
	return append(bson.D{{Key: "failCommands", Value: commands}, {Key: "namespace", Value: db.Name() + ".mongoq"}}, f.data...)
}

// once is the outcome of a transition whose first command meets the fault.
func (f fault) once(tr transition, s *stage) verdict {
	again := s.kind == mongotest.ReplicaSet && (tr.numbered || s.retries && tr.retried && f.label)
	switch {
	case f.refused && !tr.batch:
		return isRefused
	case tr.push && !again && !f.refused && !f.elsewhere && !f.ran:
		return isUnknown
	}
	return succeeds
}

type verdict int

const (
	succeeds verdict = iota
	isRefused
	isUnknown
)

// verdictOf judges an outcome, and requires that it agrees with what is stored. What is harmless may be refused though
// it happened.
func verdictOf(t testing.TB, f fault, err error, stored, harmless bool, msg string) verdict {
	t.Helper()
	require.NotErrorIs(t, err, mongoq.ErrLeaseLost, msg)
	switch {
	case err == nil:
		require.True(t, stored, "%s: success of what did not happen", msg)
		return succeeds
	case errors.Is(err, mongoq.ErrOutcomeUnknown):
		require.True(t, f.isCause(err), "%s: without the cause: %v", msg, err)
		return isUnknown
	}
	require.True(t, f.isCause(err), "%s: without the cause: %v", msg, err)
	if !harmless {
		require.False(t, stored, "%s: %v of what happened", msg, err)
	}
	return isRefused
}

// underway is a trial under way.
type underway struct {
	*trial
	tr   transition
	s    *stage
	f    fault
	call *pending[[]error]
	msg  string
}

func start(t testing.TB, s *stage, tr transition, trial *trial, f fault) *underway {
	t.Helper()
	return &underway{trial: trial, tr: tr, s: s, f: f, msg: fmt.Sprintf("%s: %s, retryWrites %v", tr.name, f.name, s.retries),
		call: begin(t, func(ctx context.Context) ([]error, error) { return trial.call(ctx), nil })}
}

// outcomes waits for the call to return.
func (r *underway) outcomes(t testing.TB) []error {
	t.Helper()
	select {
	case <-r.call.done:
	case <-time.After(2 * soon):
		require.FailNow(t, "the call did not return", r.msg)
	}
	return r.call.got
}

// judge gives what the call came to, of several envelopes the worst.
func (r *underway) judge(t testing.TB) verdict {
	t.Helper()
	errs := r.outcomes(t)
	stored := r.effect(t)
	require.Len(t, stored, len(errs))
	var all verdict
	for i, err := range errs {
		all = max(all, verdictOf(t, r.f, err, stored[i], r.tr.harmless, r.msg))
	}
	return all
}

// requireTruth makes the call again, when nothing is wrong any more: it succeeds, and has happened once.
func (r *underway) requireTruth(t testing.TB) {
	t.Helper()
	if !r.again {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
	defer cancel()
	var errs []error
	for range 5 {
		errs = r.trial.call(ctx)
		for _, err := range errs {
			require.NotErrorIs(t, err, mongoq.ErrLeaseLost, r.msg)
		}
		if !errors.Is(errors.Join(errs...), mongoq.ErrOutcomeUnknown) {
			break
		}
	}
	require.NoError(t, errors.Join(errs...), "%s: the second call", r.msg)
	require.NotContains(t, r.effect(t), false, r.msg)
}

// Every transition meets every fault once, with its first command.
func TestAFaultOnTheFirstAttempt(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		// Of each transition its own: a client takes a server that failed for gone for a while.
		stages := []*stage{faultyStage(t, kind, true)}
		for i := 1; i < 2*len(transitions); i++ {
			stages = append(stages, stages[0].beside(t, i < len(transitions)))
		}
		judge := func(u *underway) {
			got := u.judge(t)
			require.Equal(t, u.f.once(u.tr, u.s), got, "%s: %v", u.msg, u.call.got)
			if got != succeeds {
				u.requireTruth(t)
			}
		}
		looking := map[*stage]*underway{} // pushes that look for what they did, while others meet the next fault
		for _, f := range faults {
			var row []*underway
			for i, s := range stages {
				tr := transitions[i%len(transitions)]
				if u := looking[s]; u != nil {
					judge(u)
					delete(looking, s)
				}
				if tr.claim { // the store looks for claims of the last fault still
					s = s.beside(t, s.retries)
				}
				trial := tr.prepare(t, s)
				drain(s.met)
				heal := mongotest.Fail(t, s.db, mongotest.Times(1), f.on(s.db, tr.command))
				row = append(row, start(t, s, tr, trial, f))
				awaitFailed(t, s.met, tr.command)
				require.Equal(t, 1, heal())
			}
			for _, u := range row {
				if f.once(u.tr, u.s) == isUnknown {
					looking[u.s] = u
				} else {
					judge(u)
				}
			}
		}
		for _, u := range looking {
			judge(u)
		}
	})
}

// A message that the network loses, once or over and over, is a request that never came or the answer to a write that
// was done.
func TestALostMessage(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		kind := kindOf(t, db)
		openStore(t, db) // it makes the indexes
		var all []*underway
		for _, tr := range transitions {
			for _, retries := range []bool{true, false} {
				for _, reply := range []bool{true, false} {
					for _, lasts := range []bool{true, false} {
						lossy := newLossy()
						own := anotherClient(t, db, faultClient(retries, newMet()), options.Client().SetDialer(lossy))
						s := &stage{kind: kind, retries: retries, db: own, store: openStore(t, own)}
						trial := tr.prepare(t, s)
						lose, what := lossy.LoseRequest, "request"
						if reply {
							lose, what = lossy.LoseReply, "reply"
						}
						n := 1
						if lasts {
							n = s.sends(tr) + 1
						}
						lose(tr.command, n)
						f := fault{name: fmt.Sprintf("%s lost %d times", what, n), code: codeOfNetwork, label: true, ran: reply}
						all = append(all, start(t, s, tr, trial, f))
					}
				}
			}
		}
		for _, u := range all {
			got := u.judge(t)
			if u.f.name == "reply lost 1 times" || u.f.name == "request lost 1 times" {
				require.Equal(t, u.f.once(u.tr, u.s), got, "%s: %v", u.msg, u.call.got)
			}
			if got != succeeds {
				u.requireTruth(t)
			}
		}
	})
}

// sends is how often the command of a transition is sent before its caller is told that the outcome is unknown.
func (s *stage) sends(tr transition) int {
	if tr.numbered && s.kind == mongotest.ReplicaSet {
		return 4
	}
	n := 4
	if tr.push {
		n = 1
	}
	if s.kind == mongotest.ReplicaSet && s.retries && tr.retried {
		n *= 2
	}
	return n
}

// afterLostAnswer makes a call whose first answer is lost, of a write that was done, and whose second attempt meets the fault.
func (f fault) afterLostAnswer(t testing.TB, s *stage, lossy *mongotest.Lossy, tr transition, trial *trial) *underway {
	t.Helper()
	drain(s.met)
	lossy.LoseReply(tr.command, 1)
	heal := mongotest.Fail(t, s.db, mongotest.Skip(1), f.onStore(s.db, tr))
	f.name = "answer lost, then " + f.name
	u := start(t, s, tr, trial, f)
	awaitFailed(t, s.met, tr.command)
	awaitFailed(t, s.met, tr.command)
	heal()
	return u
}

// The first answer is lost, of a write that was done, and the second attempt is refused. Where the driver makes that
// attempt by itself, only the refusal can be seen: it does not mean that nothing happened.
func TestARefusalAfterALostAnswer(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		type try struct {
			*stage
			lossy *mongotest.Lossy
			tr    transition
			fault
		}
		var tries []try
		first := faultyStage(t, kind, true)
		for _, retries := range []bool{true, false} {
			for _, tr := range transitions {
				for _, f := range []fault{failing(codeNotPrimary).asElsewhere(), failing(codeUnauthorized).asRefusal()} {
					lossy := newLossy()
					s := first.beside(t, retries, options.Client().SetDialer(lossy))
					if s.sends(tr) > 1 { // else there is no second attempt
						tries = append(tries, try{s, lossy, tr, f})
					}
				}
			}
		}
		var all []*underway
		for _, try := range tries {
			trial := try.tr.prepare(t, try.stage)
			all = append(all, try.afterLostAnswer(t, try.stage, try.lossy, try.tr, trial))
		}
		for _, u := range all {
			u.judge(t)
		}
	})
}

// A connection that ends takes those down that wait for one: nothing was sent for them, so that they try again.
func TestCallsThatWaitForAConnectionThatEnds(t *testing.T) {
	t.Parallel()
	try := transition{name: "try", command: "findAndModify", prepare: func(t testing.TB, s *stage) *trial {
		q := s.queue(t)
		id := push(t, q, "x")
		return &trial{
			call:   func(ctx context.Context) []error { _, err := q.TryReserve(ctx); return []error{err} },
			effect: func(t testing.TB) []bool { return []bool{has(storedNow(t, s.db, id), "lease")} },
		}
	}}
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		var waiting, out atomic.Int64
		s := faultyStage(t, kind, false, options.Client().SetMaxPoolSize(1).SetPoolMonitor(&event.PoolMonitor{Event: func(e *event.PoolEvent) {
			switch e.Type {
			case event.ConnectionCheckOutStarted:
				waiting.Add(1)
			case event.ConnectionCheckedOut:
				waiting.Add(-1)
				out.Add(1)
			case event.ConnectionCheckOutFailed:
				waiting.Add(-1)
			case event.ConnectionCheckedIn:
				out.Add(-1)
			}
		}}))
		f := fault{name: "waiting for a connection", code: codeOfNetwork}
		for _, tr := range []transition{named("push"), named("commit"), named("rollback"), named("extend"), try} {
			trial := tr.prepare(t, s)
			plug := named("push")
			if tr.push {
				plug = named("commit")
			}
			plugged := plug.prepare(t, s)
			require.Eventually(t, func() bool { return waiting.Load() == 0 && out.Load() == 0 }, soon, time.Millisecond)
			heal := mongotest.Fail(t, s.db, mongotest.Times(1), append(f.on(s.db, plug.command),
				bson.E{Key: "blockConnection", Value: true}, bson.E{Key: "blockTimeMS", Value: 200}, bson.E{Key: "closeConnection", Value: true}))
			first := start(t, s, plug, plugged, f)
			require.Eventually(t, func() bool { return out.Load() > 0 || first.ended() }, soon, time.Millisecond)
			u := start(t, s, tr, trial, f)
			require.Eventually(t, func() bool { return waiting.Load() > 0 || u.ended() }, soon, time.Millisecond)
			require.Equal(t, succeeds, u.judge(t), "%s: %v", u.msg, u.call.got)
			first.judge(t)
			require.Positive(t, heal())
		}
	})
}

func (r *underway) ended() bool {
	select {
	case <-r.call.done:
		return true
	default:
		return false
	}
}

// A server undoes a write while its cache is full of others': what was refused so goes again.
func TestAServerWhoseCacheIsFull(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Faulty(t, kind)
		q := newQueue(t, openStore(t, db), "q")
		for _, code := range []int{365, 388} {
			while := func(command string, do func() error) {
				heal := mongotest.Fail(t, db, mongotest.Times(2), bson.D{
					{Key: "failCommands", Value: bson.A{command}}, {Key: "errorCode", Value: code},
					{Key: "namespace", Value: db.Name() + ".mongoq"},
				})
				require.NoError(t, do(), "%s, %d", command, code)
				require.Equal(t, 2, heal())
			}
			while("insert", func() error { _, err := q.Push(t.Context(), 1); return err })
			while("insert", func() error { _, err := q.PushMany(t.Context(), []any{2, 3}); return err })
			rs, err := q.ReserveMany(t.Context(), 3)
			require.NoError(t, err)
			require.Len(t, rs, 3)
			while("update", func() error { return rs[0].Release(t.Context()) })
			while("delete", func() error { return rs[1].Commit(t.Context()) })
			while("update", func() error { return rs[2].MoveToQ(t.Context(), "elsewhere") })
			require.NoError(t, reserve(t, q).Commit(t.Context()))
		}
	})
}
