package mongoq_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// spy notes whole commands of a client.
type spy struct {
	mu   sync.Mutex
	sent []bson.Raw
}

// spied is the same database through a client whose commands are noted.
func spied(t testing.TB, db *mongo.Database) (*mongo.Database, *spy) {
	t.Helper()
	s := &spy{}
	return anotherClient(t, db, options.Client().SetMonitor(&event.CommandMonitor{
		Started: func(_ context.Context, e *event.CommandStartedEvent) {
			if e.DatabaseName != db.Name() {
				return
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.sent = append(s.sent, slices.Clone(e.Command))
		},
	})), s
}

// forget starts anew.
func (s *spy) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = nil
}

// commands are those sent since forget.
func (s *spy) commands() []bson.Raw {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sent)
}

// names are the names of those, but for hello, which measures the server's clock.
func (s *spy) names() []string {
	names := []string{}
	for _, c := range s.commands() {
		if name := commandName(c); name != "hello" {
			names = append(names, name)
		}
	}
	return names
}

// writes are the names of those that write envelopes.
func (s *spy) writes() []string {
	names := []string{}
	for _, c := range s.commands() {
		name := commandName(c)
		about, _ := c.Lookup(name).StringValueOK()
		if about == "mongoq" && slices.Contains([]string{"insert", "update", "delete", "findAndModify", "bulkWrite"}, name) {
			names = append(names, name)
		}
	}
	return names
}

func commandName(c bson.Raw) string {
	elems, err := c.Elements()
	if err != nil || len(elems) == 0 {
		return ""
	}
	return elems[0].Key()
}

// last is the latest command with this name about the envelopes.
func (s *spy) last(t testing.TB, name string) bson.Raw {
	t.Helper()
	for _, c := range slices.Backward(s.commands()) {
		if about, _ := c.Lookup(name).StringValueOK(); about == "mongoq" {
			return c
		}
	}
	require.FailNow(t, "no such command was sent", "%s, but %v", name, s.names())
	return nil
}

// insertRaw stores documents as they are, past the validator and fast. While other tests fill the server's small cache it
// refuses large ones, which go again.
func insertRaw(t testing.TB, db *mongo.Database, docs []any) {
	t.Helper()
	coll := db.Collection("mongoq", options.Collection().SetWriteConcern(writeconcern.W1()))
	require.Eventually(t, func() bool {
		_, err := coll.InsertMany(t.Context(), docs, options.InsertMany().SetOrdered(false).SetBypassDocumentValidation(true))
		var be mongo.BulkWriteException
		if !errors.As(err, &be) {
			require.NoError(t, err)
			return true
		}
		var again []any
		for _, we := range be.WriteErrors {
			require.True(t, mongoq.CacheIsFull(we), "%v", err)
			again = append(again, docs[we.Index])
		}
		docs = again
		return false
	}, late, 100*time.Millisecond)
}

// rawDocs makes n documents, encoded once and for all.
func rawDocs(t testing.TB, n int, doc func(i int) bson.D) []any {
	t.Helper()
	docs := make([]any, n)
	for i := range docs {
		raw, err := bson.Marshal(doc(i))
		require.NoError(t, err)
		docs[i] = bson.Raw(raw)
	}
	return docs
}

// explained is what the server tells of a command as the library sent it.
type explained struct {
	keys, docs int64 // examined, in all stages
	indexes    []string
}

// explain has the server run a captured command with executionStats. A findAndModify or an update changes nothing.
func explain(t testing.TB, db *mongo.Database, sent bson.Raw) explained {
	t.Helper()
	elems, err := sent.Elements()
	require.NoError(t, err)
	var cmd bson.D
	for _, el := range elems {
		switch el.Key() {
		case "lsid", "$db", "$clusterTime", "txnNumber", "writeConcern", "readConcern", "$readPreference", "maxTimeMS":
		default:
			cmd = append(cmd, bson.E{Key: el.Key(), Value: el.Value()})
		}
	}
	reply, err := db.RunCommand(t.Context(), bson.D{
		{Key: "explain", Value: cmd}, {Key: "verbosity", Value: "executionStats"},
	}).Raw()
	require.NoError(t, err)
	var x explained
	x.add(reply)
	slices.Sort(x.indexes)
	x.indexes = slices.Compact(x.indexes)
	require.NotEmpty(t, x.indexes, "no index: %v", reply)
	return x
}

// add sums up what stands anywhere in an answer.
func (x *explained) add(doc bson.Raw) {
	elems, _ := doc.Elements()
	for _, el := range elems {
		switch v := el.Value(); {
		case el.Key() == "executionStages" && v.Type == bson.TypeEmbeddedDocument: // may tell the totals again
			inside := explained{}
			inside.add(v.Document())
			x.indexes = append(x.indexes, inside.indexes...)
		case el.Key() == "totalKeysExamined":
			n, _ := v.AsInt64OK()
			x.keys += n
		case el.Key() == "totalDocsExamined":
			n, _ := v.AsInt64OK()
			x.docs += n
		case el.Key() == "indexName":
			x.indexes = append(x.indexes, v.StringValue())
		case v.Type == bson.TypeEmbeddedDocument:
			x.add(v.Document())
		case v.Type == bson.TypeArray:
			x.add(bson.Raw(v.Array()))
		}
	}
}

// What a queue has done and what it is to do later cost a claim, and the questions about it, nothing.
func TestHistoryAndDelayedEnvelopesDoNotSlowClaims(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 100_000
		own, s := spied(t, db)
		store := openStore(t, own)
		q := newQueue(t, store, "work", mongoq.QueueConfig{Retention: mongoq.KeepForever})

		push(t, q, "first")
		require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		before := explain(t, db, s.last(t, "findAndModify"))
		require.LessOrEqual(t, before.keys, int64(5))
		require.Equal(t, []string{"mongoq_ready"}, before.indexes)

		var wg sync.WaitGroup
		start := time.Now()
		for _, document := range []func(i int) bson.D{
			func(i int) bson.D {
				return bson.D{
					{Key: "q", Value: "work"}, {Key: "prio", Value: 2}, {Key: "payload", Value: i},
					{Key: "when", Value: start.Add(-time.Hour)}, {Key: "processed", Value: start.Add(time.Duration(i/500) * -time.Second)},
				}
			},
			func(i int) bson.D {
				return bson.D{
					{Key: "q", Value: "work"}, {Key: "prio", Value: 2}, {Key: "payload", Value: i},
					{Key: "when", Value: start.Add(time.Hour + time.Duration(i)*time.Millisecond)},
				}
			},
		} {
			docs := rawDocs(t, n, document)
			wg.Go(func() { insertRaw(t, db, docs) })
		}
		wg.Wait()

		_, err := q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		claim := explain(t, db, s.last(t, "findAndModify"))
		require.LessOrEqual(t, claim.keys, int64(5), "of a claim of an empty queue")

		push(t, q, "now")
		claim = explain(t, db, s.last(t, "findAndModify")) // this one finds something
		require.LessOrEqual(t, claim.keys, int64(5), "of a claim")
		require.Equal(t, []string{"mongoq_ready"}, claim.indexes)
		require.Equal(t, "now", payloadOf[string](t, &tryReserve(t, q).Envelope))

		// When is the next one due? What a waiter asks before it sleeps.
		s.forget()
		w := begin(t, func(ctx context.Context) (*mongoq.Reservation, error) { return q.Reserve(ctx) })
		awaitSleep(t, store, "work", 1)
		next := explain(t, db, s.last(t, "find"))
		require.LessOrEqual(t, next.keys, int64(10), "of the question for the next due time")
		require.Equal(t, []string{"mongoq_ready"}, next.indexes)
		w.cancel()
		requireNobody(t, store, "work") // who would claim one of the next for nobody, and give it back

		// A claim of several: one that reads whole envelopes, and one that doesn't.
		for i := range 3 {
			push(t, q, i)
		}
		s.forget()
		rs, err := q.ReserveMany(t.Context(), 10)
		require.NoError(t, err)
		require.NotEmpty(t, rs)
		for _, name := range []string{"find", "update"} {
			x := explain(t, db, s.last(t, name))
			require.LessOrEqual(t, x.keys, int64(20), "of a claim of several: %s", name)
		}
		require.NoError(t, q.CommitMany(t.Context(), rs))

		// How many are ready? The first part of what Stats asks.
		push(t, q, "ready")
		s.forget()
		stats, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, stats.Ready)
		ready := explain(t, db, firstPart(t, s.last(t, "aggregate")))
		require.Equal(t, []string{"mongoq_ready"}, ready.indexes)
		require.LessOrEqual(t, ready.keys, int64(20), "of the count of what is ready")

		// Pages of the lists.
		s.forget()
		page := 0
		for e, err := range q.History().List(t.Context()) {
			require.NoError(t, err)
			require.False(t, e.Processed.IsZero())
			if page++; page == 50 {
				break
			}
		}
		listed := explain(t, db, limited(t, s.last(t, "find"), 50))
		require.Equal(t, []string{"mongoq_history"}, listed.indexes)
		require.LessOrEqual(t, listed.keys, int64(60), "of a page of the history")

		s.forget()
		for _, err := range q.DeadLetters().List(t.Context()) {
			require.NoError(t, err)
		}
		dead := explain(t, db, s.last(t, "find"))
		require.Equal(t, []string{"mongoq_died"}, dead.indexes)
		require.LessOrEqual(t, dead.keys, int64(5), "of the dead letters")
	})
}

// limited is a find with a limit.
func limited(t testing.TB, find bson.Raw, n int) bson.Raw {
	t.Helper()
	var cmd bson.D
	require.NoError(t, bson.Unmarshal(find, &cmd))
	cmd = slices.DeleteFunc(cmd, func(e bson.E) bool { return e.Key == "limit" || e.Key == "batchSize" })
	raw, err := bson.Marshal(append(cmd, bson.E{Key: "limit", Value: n}))
	require.NoError(t, err)
	return raw
}

// firstPart is an aggregate without the pipelines that are united with its own.
func firstPart(t testing.TB, aggregate bson.Raw) bson.Raw {
	t.Helper()
	var cmd bson.D
	require.NoError(t, bson.Unmarshal(aggregate, &cmd))
	for i, e := range cmd {
		if e.Key != "pipeline" {
			continue
		}
		cmd[i].Value = slices.DeleteFunc(e.Value.(bson.A), func(stage any) bool { return stage.(bson.D)[0].Key == "$unionWith" })
	}
	raw, err := bson.Marshal(cmd)
	require.NoError(t, err)
	return raw
}

// asked sums up what the server examines for every command of this name that was sent since forget, each by an index.
func asked(t testing.TB, db *mongo.Database, s *spy, name string) (x explained, n int) {
	t.Helper()
	for _, c := range s.commands() {
		if about, _ := c.Lookup(name).StringValueOK(); about != "mongoq" {
			continue
		}
		one := explain(t, db, c)
		x.keys += one.keys
		x.docs += one.docs
		x.indexes = append(x.indexes, one.indexes...)
		n++
	}
	slices.Sort(x.indexes)
	x.indexes = slices.Compact(x.indexes)
	return x, n
}

// A page costs what is on it, wherever it lies.
func TestPagesOfAHistoryCostWhatIsOnThem(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 30_000
		own, s := spied(t, db)
		store := openStore(t, own)
		start := time.Now().Truncate(time.Second)
		q := newQueue(t, store, "big")
		docs := rawDocs(t, n, func(i int) bson.D { // 300 in an instant
			return finishedDoc("big", start.Add(time.Duration(i/300)*-time.Second), i)
		})
		insertRaw(t, db, docs)
		insertRaw(t, db, rawDocs(t, 300, func(i int) bson.D { // beside it, in three queues
			return finishedDoc([]string{"also", "big2", "more"}[i%3], start.Add(time.Duration(i)*-time.Second), i)
		}))
		one := mongoq.IDs(docs[12345].(bson.Raw).Lookup("_id").ObjectID())
		const no = time.Duration(-1)
		for name, c := range map[string]struct {
			h     *mongoq.History
			pages int           // to turn before
			since time.Duration // ago
			until time.Duration
			opts  []mongoq.HistoryOption
			want  int
			keys  int64
		}{
			"the first":                  {q.History(), 0, no, no, nil, 50, 60},
			"the fourth":                 {q.History(), 3, no, no, nil, 50, 60},
			"over the end of an instant": {q.History(), 1, no, no, []mongoq.HistoryOption{mongoq.Limit(40)}, 40, 50},
			"far back":                   {q.History(), 0, no, 90 * time.Second, nil, 50, 60},
			"far back, the third":        {q.History(), 2, no, 90 * time.Second, nil, 50, 60},
			"a span":                     {q.History(), 1, 60 * time.Second, 40 * time.Second, nil, 50, 60},
			"an empty span":              {q.History(), 0, 1200 * time.Second, 1000 * time.Second, nil, 0, 5},
			"an id":                      {q.History(), 0, no, no, []mongoq.HistoryOption{one}, 1, 5},
			"an id of all queues":        {store.History(), 0, no, no, []mongoq.HistoryOption{one}, 1, 5},
			"all queues":                 {store.History(), 0, no, no, nil, 50, 60},
			"all queues, the fifth":      {store.History(), 4, no, no, nil, 50, 70},
			"all queues, far back":       {store.History(), 0, no, 90 * time.Second, nil, 50, 60},
		} {
			opts := slices.Clone(c.opts)
			if c.since != no {
				opts = append(opts, mongoq.Since(start.Add(-c.since)))
			}
			if c.until != no {
				opts = append(opts, mongoq.Until(start.Add(-c.until)))
			}
			next := ""
			for range c.pages {
				p, err := c.h.Page(t.Context(), append(slices.Clone(opts), mongoq.Cursor(next))...)
				require.NoError(t, err)
				next = p.Next
			}
			s.forget()
			p, err := c.h.Page(t.Context(), append(slices.Clone(opts), mongoq.Cursor(next))...)
			require.NoError(t, err)
			require.Len(t, p.Envelopes, c.want, name)
			x, finds := asked(t, db, s, "find")
			t.Logf("%s: %d keys, %d documents, %d statements, %v", name, x.keys, x.docs, finds, x.indexes)
			require.LessOrEqual(t, x.keys, c.keys, name)
			require.LessOrEqual(t, x.docs, c.keys, name)
			if c.want != 1 {
				require.Equal(t, []string{"mongoq_history"}, x.indexes, name)
			} else {
				require.Equal(t, []string{"_id_"}, x.indexes, name)
			}
		}

		s.forget()
		count, err := q.History().Count(t.Context(), mongoq.Since(start.Add(-10*time.Second)), mongoq.Limit(1000))
		require.NoError(t, err)
		require.EqualValues(t, 1000, count)
		x, _ := asked(t, db, s, "aggregate")
		require.LessOrEqual(t, x.keys, int64(1005), "of a count")
		require.Equal(t, []string{"mongoq_history"}, x.indexes)
		s.forget()
		count, err = store.History().Count(t.Context(), mongoq.Since(start.Add(-10*time.Second)))
		require.NoError(t, err)
		require.EqualValues(t, 3300+11, count)
		x, _ = asked(t, db, s, "aggregate")
		require.LessOrEqual(t, x.keys, int64(3311+20), "of a count of all queues")
		require.Equal(t, []string{"mongoq_history"}, x.indexes)
	})
}

// So does a page of dead letters; a redrive and a purge read what they take.
func TestPagesOfDeadLettersCostWhatIsOnThem(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 9000
		own, s := spied(t, db)
		q := newQueue(t, openStore(t, own), "q")
		start := time.Now().Truncate(time.Second).Add(-time.Hour)
		kinds := []mongoq.DeadKind{mongoq.DeadExplicit, mongoq.DeadLost, mongoq.DeadRetries}
		insertRaw(t, db, rawDocs(t, n, func(i int) bson.D { // 300 in an instant, 100 of them of each kind
			return deadDoc("q", kinds[i%3], start.Add(time.Duration(i/300)*-time.Second), i)
		}))
		for name, c := range map[string]struct {
			pages int
			opts  []mongoq.DeadLetterOption
			want  int
		}{
			"the first":            {0, nil, 50},
			"the fourth":           {3, nil, 50},
			"over a kind's end":    {61, []mongoq.DeadLetterOption{mongoq.Limit(49)}, 49},
			"of a kind":            {2, []mongoq.DeadLetterOption{mongoq.Kinds(mongoq.DeadRetries)}, 50},
			"of two kinds, a span": {1, []mongoq.DeadLetterOption{mongoq.Kinds(mongoq.DeadRetries, mongoq.DeadLost), mongoq.Since(start.Add(-20 * time.Second)), mongoq.Until(start.Add(-10 * time.Second))}, 50},
			"of no kind there is":  {0, []mongoq.DeadLetterOption{mongoq.Kinds(mongoq.DeadHops)}, 0},
		} {
			next := ""
			for range c.pages {
				p, err := q.DeadLetters().Page(t.Context(), append(slices.Clone(c.opts), mongoq.Cursor(next))...)
				require.NoError(t, err)
				next = p.Next
			}
			s.forget()
			p, err := q.DeadLetters().Page(t.Context(), append(slices.Clone(c.opts), mongoq.Cursor(next))...)
			require.NoError(t, err)
			require.Len(t, p.Envelopes, c.want, name)
			x, finds := asked(t, db, s, "find")
			t.Logf("%s: %d keys, %d documents, %d statements", name, x.keys, x.docs, finds)
			require.LessOrEqual(t, x.keys, int64(60), name)
			require.Equal(t, []string{"mongoq_died"}, x.indexes, name)
		}

		s.forget()
		counts, err := q.DeadLetters().Count(t.Context(), mongoq.Kinds(mongoq.DeadLost))
		require.NoError(t, err)
		require.Equal(t, map[mongoq.DeadKind]int64{mongoq.DeadLost: n / 3}, counts)
		x, _ := asked(t, db, s, "aggregate")
		require.LessOrEqual(t, x.keys, int64(n/3+5), "of a count")
		require.Equal(t, []string{"mongoq_died"}, x.indexes)

		s.forget()
		_, err = q.DeadLetters().Purge(t.Context(), mongoq.Kinds(mongoq.DeadLost), mongoq.Limit(100))
		require.NoError(t, err)
		purged := explain(t, db, s.last(t, "find"))
		require.LessOrEqual(t, purged.keys, int64(105), "of a purge")
		require.Equal(t, []string{"mongoq_died"}, purged.indexes)
		s.forget()
		_, err = q.DeadLetters().Redrive(t.Context(), mongoq.Kinds(mongoq.DeadRetries), mongoq.Limit(100))
		require.NoError(t, err)
		redriven := explain(t, db, s.last(t, "find"))
		require.LessOrEqual(t, redriven.keys, int64(105), "of a redrive")
		require.Equal(t, []string{"mongoq_died"}, redriven.indexes)
	})
}
