package model_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"pgregory.net/rapid"

	"github.com/seed-de459a48/mongoq"
)

var histories = flag.Int("histories", 6, "how many concurrent runs TestHistories records and checks")

func TestMain(m *testing.M) {
	// As much as every change can wait for; the command line says otherwise.
	for name, value := range map[string]string{"rapid.checks": "25", "rapid.steps": "40", "rapid.shrinktime": "5s", "rapid.nofailfile": "true"} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

const (
	// consumers are processes, as far as the library can tell: stores of their own.
	consumers = 2
	// long is a lease, or a delay, that does not end while a test runs.
	long = time.Hour
	soon = 20 * time.Second
)

// world is a server that programs run on, one after the other, each in queues of its own.
type world struct {
	db     *mongo.Database
	stores []*mongoq.Store
	names  []string // of the queues: a and b with dead-letter queues, c retries for ever
	handle []map[string]*mongoq.Queue
}

var programs atomic.Int64

func openStores(t testing.TB, db *mongo.Database) []*mongoq.Store {
	t.Helper()
	var stores []*mongoq.Store
	for range consumers {
		s, err := mongoq.Open(t.Context(), db, mongoq.Config{})
		require.NoError(t, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), soon)
			defer cancel()
			require.NoError(t, s.Close(ctx))
		})
		stores = append(stores, s)
	}
	return stores
}

// atOnce is a policy that allows maxRetries, at once.
func atOnce() backoff.BackOff { return backoff.WithMaxRetries(&backoff.ZeroBackOff{}, maxRetries) }

// newWorld gives a program queues that no other has used, with a policy.
func newWorld(t require.TestingT, db *mongo.Database, stores []*mongoq.Store, retry func() backoff.BackOff) *world {
	n := programs.Add(1)
	w := &world{db: db, stores: stores}
	for _, name := range []string{"a", "b", "c", "a.dead", "b.dead"} {
		w.names = append(w.names, fmt.Sprintf("%d%s", n, name))
	}
	for _, s := range stores {
		handles := map[string]*mongoq.Queue{}
		for i, name := range w.names {
			cfg := mongoq.QueueConfig{Lease: long, PollInterval: 100 * time.Millisecond, Retry: retry}
			switch i {
			case 1:
				cfg.Retention, cfg.OnExpire = mongoq.KeepForever, mongoq.ToDeadLetter
			case 2, 3, 4: // a dead letter that is replayed lives where it was committed
				cfg.DeadLetter = mongoq.NoDeadLetter
			}
			q, err := s.Queue(name, cfg)
			require.NoError(t, err)
			handles[name] = q
		}
		w.handle = append(w.handle, handles)
	}
	return w
}

// use has every consumer take so much from the queues that it holds them for busy, and looks in them from a bound on.
func (w *world) use(ctx context.Context, t require.TestingT, much int) {
	for _, handles := range w.handle {
		for _, name := range w.names[:3] {
			q := handles[name]
			_, err := q.PushMany(ctx, make([]any, much))
			require.NoError(t, err)
			for left := much; left > 0; {
				rs, err := q.ReserveMany(ctx, left)
				require.NoError(t, err)
				require.NoError(t, q.CommitMany(ctx, rs))
				left -= len(rs)
			}
		}
	}
}

// empty makes the queues those of a new program, in which consumers look from a bound on.
func (w *world) empty(ctx context.Context, t require.TestingT) {
	for _, handles := range w.handle { // each knows of what it did itself at once
		for _, q := range handles {
			require.NoError(t, q.Resume(ctx))
		}
	}
	w.use(ctx, t, 25)
	_, err := w.coll().DeleteMany(ctx, bson.D{{Key: "q", Value: bson.D{{Key: "$in", Value: w.names}}}, {Key: "divider", Value: nil}})
	require.NoError(t, err)
}

func (w *world) deadLetterOf(q string) string {
	switch q {
	case w.names[0]:
		return w.names[3]
	case w.names[1]:
		return w.names[4]
	}
	return ""
}

// keeps is true of the queue that has a history.
func (w *world) keeps(q string) bool { return q == w.names[1] }

func (w *world) coll() *mongo.Collection { return w.db.Collection("mongoq") }

// document is an envelope as it is stored.
type document struct {
	ID         bson.ObjectID     `bson:"_id"`
	Q          string            `bson:"q"`
	When       time.Time         `bson:"when"`
	Prio       int               `bson:"prio"`
	Payload    bson.RawValue     `bson:"payload"`
	Headers    map[string]string `bson:"headers"`
	Retries    int               `bson:"retries"`
	Deliveries int               `bson:"deliveries"`
	Moves      int               `bson:"moves"`
	Errs       bson.A            `bson:"errs"`
	Hops       bson.A            `bson:"hops"`
	Reserved   time.Time         `bson:"reserved"`
	Lease      bson.ObjectID     `bson:"lease"`
	Processed  time.Time         `bson:"processed"`
	Deadline   time.Time         `bson:"deadline"`
	Result     bson.RawValue     `bson:"result"`
	Dead       *struct {
		From string `bson:"from"`
		Kind string `bson:"kind"`
	} `bson:"dead"`
	ReplayOf *struct {
		ID bson.ObjectID `bson:"id"`
		By string        `bson:"by"`
	} `bson:"replayOf"`
}

// stored reads everything that the program's queues hold.
func (w *world) stored(ctx context.Context, t require.TestingT) map[bson.ObjectID]document {
	cur, err := w.coll().Find(ctx, bson.D{{Key: "q", Value: bson.D{{Key: "$in", Value: w.names}}}, {Key: "divider", Value: nil}})
	require.NoError(t, err)
	var docs []document
	require.NoError(t, cur.All(ctx, &docs))
	all := make(map[bson.ObjectID]document, len(docs))
	for _, d := range docs {
		all[d.ID] = d
	}
	return all
}

// set changes a stored envelope behind the library's back, with expressions.
func (w *world) set(ctx context.Context, t require.TestingT, id bson.ObjectID, fields bson.D) {
	res, err := w.coll().UpdateByID(ctx, id, bson.A{bson.D{{Key: "$set", Value: fields}}})
	require.NoError(t, err)
	require.EqualValues(t, 1, res.MatchedCount)
}

// awaitDue returns when the server's clock has reached an envelope's `when`.
func (w *world) awaitDue(ctx context.Context, t require.TestingT, id bson.ObjectID) {
	filter := bson.D{
		{Key: "_id", Value: id},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$when", "$$NOW"}}}},
	}
	require.Eventually(t, func() bool {
		n, err := w.coll().CountDocuments(ctx, filter)
		return err == nil && n == 1
	}, soon, time.Millisecond)
}

// describe says what is stored, without what differs from run to run, to be compared with what the model says.
func (d document) describe() string {
	st, when := waiting, "due"
	switch {
	case !d.Processed.IsZero():
		st, when = done, ""
	case !d.Lease.IsZero():
		st = held
	}
	if st != done && time.Until(d.When) > long/2 {
		when = "later"
	}
	dead, kind := "", ""
	if d.Dead != nil {
		dead, kind = d.Dead.From, d.Dead.Kind
	}
	of, by := bson.NilObjectID, ""
	if d.ReplayOf != nil {
		of, by = d.ReplayOf.ID, d.ReplayOf.By
	}
	return description(d.Q, st, when, d.Prio, d.Payload, d.Headers, d.Retries, d.Deliveries, d.Moves, len(d.Errs), len(d.Hops),
		dead, kind, of, by, d.Result, !d.Deadline.IsZero())
}

func (e *envelope) describe() string {
	when := "due"
	switch {
	case e.state == done:
		when = ""
	case e.state == waiting && e.later, e.state == held && !e.lapsed:
		when = "later"
	}
	return description(e.q, e.state, when, e.prio, e.payload, e.headers, e.retries, e.deliveries, e.moves, e.failures, e.hops,
		e.dead, string(e.kind), e.replayOf, e.replayID, e.result, e.mortal)
}

func description(q string, st state, when string, prio int, payload bson.RawValue, headers map[string]string, retries, deliveries, moves, failures, hops int,
	dead, kind string, of bson.ObjectID, by string, result bson.RawValue, mortal bool,
) string {
	var hs []string
	for _, k := range slices.Sorted(maps.Keys(headers)) {
		hs = append(hs, fmt.Sprintf("%q=%q", k, headers[k]))
	}
	return fmt.Sprintf("in %s, %s %s, prio %d, payload %s, headers %v, retries %d, deliveries %d, moves %d, failures %d, hops %d, dead %q %q, replay of %s %q, result %s, mortal %v",
		q, st, when, prio, payload, hs, retries, deliveries, moves, failures, hops, dead, kind, of.Hex(), by, result, mortal)
}

// value is a BSON value as it is stored.
func value(v any) bson.RawValue {
	if v == nil {
		return bson.RawValue{Type: bson.TypeNull}
	}
	typ, data, err := bson.MarshalValue(v)
	if err != nil {
		panic(err)
	}
	return bson.RawValue{Type: typ, Value: data}
}

// recorder is a test that may fail without the one around it.
type recorder struct {
	rapid.TB
	failed bool
	said   []string
}

func (r *recorder) Helper()                   {}
func (r *recorder) Name() string              { return "doctored" }
func (r *recorder) Failed() bool              { return r.failed }
func (r *recorder) Logf(f string, a ...any)   { r.said = append(r.said, fmt.Sprintf(f, a...)) }
func (r *recorder) Log(a ...any)              { r.said = append(r.said, fmt.Sprint(a...)) }
func (r *recorder) Errorf(f string, a ...any) { r.Logf(f, a...); r.failed = true }
func (r *recorder) Error(a ...any)            { r.Log(a...); r.failed = true }
func (r *recorder) Fail()                     { r.failed = true }
func (r *recorder) FailNow()                  { r.failed = true; runtime.Goexit() }
func (r *recorder) Fatalf(f string, a ...any) { r.Errorf(f, a...); runtime.Goexit() }
func (r *recorder) Fatal(a ...any)            { r.Error(a...); runtime.Goexit() }
func (r *recorder) SkipNow()                  { runtime.Goexit() }
func (r *recorder) Skip(...any)               { runtime.Goexit() }
func (r *recorder) Skipf(string, ...any)      { runtime.Goexit() }
