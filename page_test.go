package mongoq_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// finishedDoc is an envelope as a history holds it.
func finishedDoc(q string, at time.Time, payload any, more ...bson.E) bson.D {
	return append(bson.D{
		{Key: "_id", Value: bson.NewObjectID()}, {Key: "q", Value: q}, {Key: "prio", Value: 2}, {Key: "pushed", Value: at.Add(-time.Minute)},
		{Key: "due", Value: at.Add(-30 * time.Second)}, {Key: "reserved", Value: at.Add(-20 * time.Second)}, {Key: "when", Value: at.Add(time.Minute)},
		{Key: "processed", Value: at}, {Key: "payload", Value: payload},
	}, more...)
}

// allPages turns every page of a history.
func allPages(t *testing.T, h *mongoq.History, opts ...mongoq.HistoryOption) (all []*mongoq.Envelope, pages int) {
	t.Helper()
	for next := ""; ; {
		p, err := h.Page(t.Context(), append(slices.Clone(opts), mongoq.Cursor(next))...)
		require.NoError(t, err)
		pages++
		all = append(all, p.Envelopes...)
		if next = p.Next; next == "" {
			return all, pages
		}
	}
}

func idSet(es []*mongoq.Envelope) map[bson.ObjectID]int {
	m := map[bson.ObjectID]int{}
	for _, e := range es {
		m[e.ID]++
	}
	return m
}

// Each envelope that was there at the first page is on one page, while many more are committed.
func TestPagesOfAHistoryNeitherSkipNorRepeat(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const before, during = 3000, 10_000
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		start := time.Now().Add(-time.Minute)
		docs := rawDocs(t, before, func(i int) bson.D { // up to 700 in one instant
			return finishedDoc("q", start.Add(time.Duration(i/700)*-time.Second), i)
		})
		insertRaw(t, db, docs)
		want := map[bson.ObjectID]int{}
		for _, d := range docs {
			want[d.(bson.Raw).Lookup("_id").ObjectID()] = 1
		}

		payloads := make([]any, during)
		for i := range payloads {
			payloads[i] = i
		}
		_, err := q.PushMany(t.Context(), payloads)
		require.NoError(t, err)
		var wg sync.WaitGroup
		var committed atomic.Int64
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 4 {
			wg.Go(func() {
				for {
					rs, err := q.ReserveMany(ctx, 100)
					if err != nil { // all are done
						return
					}
					if err := q.CommitMany(t.Context(), rs); err != nil {
						t.Error(err)
						cancel()
					}
					if committed.Add(int64(len(rs))) == during {
						cancel()
					}
				}
			})
		}
		turned := 0
		for range 2 {
			for _, h := range []*mongoq.History{q.History(), store.History()} {
				all, pages := allPages(t, h, mongoq.Limit(250))
				turned += pages
				seen := idSet(all)
				require.Len(t, all, len(seen), "some come twice")
				for id := range want {
					if seen[id] != 1 {
						require.FailNow(t, "one is missing", id.Hex())
					}
				}
				require.True(t, slices.IsSortedFunc(all, func(a, b *mongoq.Envelope) int { return b.Processed.Compare(a.Processed) }))
			}
		}
		require.GreaterOrEqual(t, turned, 4*before/250)
		wg.Wait()
		all, _ := allPages(t, q.History(), mongoq.Limit(1000))
		require.Len(t, idSet(all), before+during)
		n, err := q.History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, before+during, n)
	})
}

// The history of a store is one list, however many queues there are.
func TestAHistoryOfAllQueues(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const queues, each = 250, 3
		store := openStore(t, db)
		start := time.Now().Truncate(time.Second).Add(-time.Hour)
		insertRaw(t, db, rawDocs(t, queues*each, func(i int) bson.D {
			return finishedDoc(fmt.Sprintf("q%03d", i%queues), start.Add(time.Duration(i/5)*-time.Second), i)
		}))
		listed := func(list []*mongoq.Envelope) (all []int) {
			for _, e := range list {
				all = append(all, payloadOf[int](t, e))
			}
			return all
		}
		all, pages := allPages(t, store.History())
		require.Equal(t, queues*each/50, pages)
		require.Len(t, idSet(all), queues*each)
		for i, n := range listed(all) {
			require.Equal(t, i/5, n/5, "the latest first")
		}
		var list []*mongoq.Envelope
		for e, err := range store.History().List(t.Context(), mongoq.Limit(60)) {
			require.NoError(t, err)
			list = append(list, e)
		}
		require.Equal(t, listed(all[:60]), listed(list))
		n, err := store.History().Count(t.Context(), mongoq.Since(start.Add(-9*time.Second)), mongoq.Until(start))
		require.NoError(t, err)
		require.EqualValues(t, 45, n)
		n, err = newQueue(t, store, "q007").History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, each, n)

		id, err := store.History().Replay(t.Context(), all[0].ID)
		require.NoError(t, err)
		e, err := store.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, all[0].Q, e.Q)
		require.Equal(t, all[0].Payload, e.Payload)
	})
}

func TestAHistoryIsAskedForAPart(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		start := time.Now().Truncate(time.Second).Add(-time.Hour)
		ids := make([]bson.ObjectID, 20)
		docs := rawDocs(t, len(ids), func(i int) bson.D {
			d := finishedDoc("q", start.Add(time.Duration(i)*time.Second), i)
			ids[i] = d[0].Value.(bson.ObjectID)
			headers := bson.D{{Key: "a.$b", Value: fmt.Sprint("$", i%2)}, {Key: "$k", Value: fmt.Sprint(i % 3)}}
			switch i {
			case 5:
				return append(d, bson.E{Key: "headers", Value: "none"})
			case 7, 8:
				d = append(d, bson.E{Key: "result", Value: bson.D{{Key: "dropped", Value: "not wanted"}}})
			case 9:
				d = append(d, bson.E{Key: "result", Value: bson.A{bson.D{{Key: "dropped", Value: "x"}}}})
			}
			return append(d, bson.E{Key: "headers", Value: headers})
		})
		other := finishedDoc("other", start, "other")
		insertRaw(t, db, append(docs, other,
			bson.D{{Key: "_id", Value: "odd"}, {Key: "q", Value: "q"}, {Key: "when", Value: start}, {Key: "processed", Value: start}},
			bson.D{{Key: "q", Value: "q"}, {Key: "when", Value: start}, {Key: "processed", Value: "odd"}}))

		for name, c := range map[string]struct {
			opts []mongoq.HistoryOption
			want []int
		}{
			"all":                   {nil, []int{19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}},
			"since":                 {[]mongoq.HistoryOption{mongoq.Since(start.Add(17 * time.Second))}, []int{19, 18, 17}},
			"since, within a ms":    {[]mongoq.HistoryOption{mongoq.Since(start.Add(17*time.Second + 1))}, []int{19, 18}},
			"until":                 {[]mongoq.HistoryOption{mongoq.Until(start.Add(2 * time.Second))}, []int{1, 0}},
			"until, within a ms":    {[]mongoq.HistoryOption{mongoq.Until(start.Add(2*time.Second + 1))}, []int{2, 1, 0}},
			"a span":                {[]mongoq.HistoryOption{mongoq.Since(start.Add(4 * time.Second)), mongoq.Until(start.Add(6 * time.Second))}, []int{5, 4}},
			"ids":                   {[]mongoq.HistoryOption{mongoq.IDs(ids[3], ids[11], bson.NewObjectID(), other[0].Value.(bson.ObjectID))}, []int{11, 3}},
			"ids in a span":         {[]mongoq.HistoryOption{mongoq.IDs(ids[3]), mongoq.IDs(ids[11]), mongoq.Until(start.Add(5 * time.Second))}, []int{3}},
			"no ids":                {[]mongoq.HistoryOption{mongoq.IDs()}, nil},
			"a header":              {[]mongoq.HistoryOption{mongoq.Header("$k", "0")}, []int{18, 15, 12, 9, 6, 3, 0}},
			"headers":               {[]mongoq.HistoryOption{mongoq.Header("a.$b", "$1"), mongoq.Header("$k", "0")}, []int{15, 9, 3}},
			"no such header":        {[]mongoq.HistoryOption{mongoq.Header("a", "$1")}, nil},
			"dropped":               {[]mongoq.HistoryOption{mongoq.WithOutcome(mongoq.OutcomeDropped)}, []int{8, 7}},
			"done":                  {[]mongoq.HistoryOption{mongoq.WithOutcome(mongoq.OutcomeDone), mongoq.Since(start.Add(6 * time.Second)), mongoq.Until(start.Add(11 * time.Second))}, []int{10, 9, 6}},
			"dropped with a header": {[]mongoq.HistoryOption{mongoq.WithOutcome(mongoq.OutcomeDropped), mongoq.Header("$k", "1")}, []int{7}},
		} {
			// By pages of every size, as a list, and counted.
			for _, size := range []int{1, 2, 3, 1000} {
				all, _ := allPages(t, q.History(), append(slices.Clone(c.opts), mongoq.Limit(size))...)
				var got []int
				for _, e := range all {
					got = append(got, payloadOf[int](t, e))
				}
				require.Equal(t, c.want, got, "%s, pages of %d", name, size)
			}
			var got []int
			for e, err := range q.History().List(t.Context(), c.opts...) {
				require.NoError(t, err)
				got = append(got, payloadOf[int](t, e))
			}
			require.Equal(t, c.want, got, name)
			n, err := q.History().Count(t.Context(), c.opts...)
			require.NoError(t, err)
			require.EqualValues(t, len(c.want), n, name)
			n, err = q.History().Count(t.Context(), append(slices.Clone(c.opts), mongoq.Limit(2))...)
			require.NoError(t, err)
			require.EqualValues(t, min(2, len(c.want)), n, name)
		}

		// A page stays where it was though the envelope it ended with is forgotten.
		p, err := q.History().Page(t.Context(), mongoq.Limit(3))
		require.NoError(t, err)
		require.NotEmpty(t, p.Next)
		_, err = db.Collection("mongoq").DeleteOne(t.Context(), bson.D{{Key: "_id", Value: p.Envelopes[2].ID}})
		require.NoError(t, err)
		for e, err := range q.History().List(t.Context(), mongoq.Cursor(p.Next)) {
			require.NoError(t, err)
			require.Equal(t, 16, payloadOf[int](t, e))
			break
		}
		p, err = q.History().Page(t.Context(), mongoq.Limit(17), mongoq.Cursor(p.Next))
		require.NoError(t, err)
		require.Len(t, p.Envelopes, 17)
		require.Empty(t, p.Next, "it was the last, and full")
	})
}

func TestAHistoryRefusesWhatBreaksItsRules(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		start := time.Now()
		insertRaw(t, db, rawDocs(t, 3, func(i int) bson.D { return finishedDoc("q", start, i) }))
		p, err := q.History().Page(t.Context(), mongoq.Limit(1))
		require.NoError(t, err)
		changed := func(i int) string {
			b, err := base64.RawURLEncoding.DecodeString(p.Next)
			require.NoError(t, err)
			b[i] ^= 1
			return base64.RawURLEncoding.EncodeToString(b)
		}
		for name, o := range map[string]mongoq.HistoryOption{
			"since":           mongoq.Since(time.Time{}),
			"until":           mongoq.Until(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)),
			"limit":           mongoq.Limit(0),
			"negative limit":  mongoq.Limit(-1),
			"header":          mongoq.Header("", "x"),
			"header's NUL":    mongoq.Header("a\x00", "x"),
			"header's value":  mongoq.Header("a", "\xff"),
			"outcome":         mongoq.WithOutcome("other"),
			"cursor":          mongoq.Cursor("x"),
			"cursor's end":    mongoq.Cursor(p.Next[:len(p.Next)-1]),
			"cursor and more": mongoq.Cursor(p.Next + "A"),
			"cursor's list":   mongoq.Cursor(changed(0)),
			"cursor's time":   mongoq.Cursor(changed(8)),
			"cursor's sum":    mongoq.Cursor(changed(24)),
			"no base64":       mongoq.Cursor(strings.Repeat("*", len(p.Next))),
		} {
			_, err := q.History().Page(t.Context(), o)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
			_, err = q.History().Count(t.Context(), o)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
			n := 0
			for e, err := range q.History().List(t.Context(), o) {
				require.Nil(t, e)
				require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
				n++
			}
			require.Equal(t, 1, n)
		}
		_, err = q.History().Page(t.Context(), mongoq.Since(start), mongoq.Until(start))
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		_, err = q.History().Page(t.Context(), mongoq.Limit(1001))
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		_, err = q.History().Count(t.Context(), mongoq.Cursor(p.Next))
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		n, err := q.History().Count(t.Context(), mongoq.Limit(1001))
		require.NoError(t, err)
		require.EqualValues(t, 3, n)
		require.NoError(t, store.Close(t.Context()))
		_, err = store.History().Page(t.Context())
		require.ErrorIs(t, err, mongoq.ErrClosed)
		_, err = store.History().Count(t.Context())
		require.ErrorIs(t, err, mongoq.ErrClosed)
	})
}

func TestAFinishedEnvelopeTellsHowLongItTookAndHowItEnded(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retention: time.Hour, Retry: retries(3)})
		id := push(t, q, "x", mongoq.Headers(someHeaders))
		waiting, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Zero(t, waiting.Due)
		require.Zero(t, waiting.Waited()+waiting.Ran())
		require.Empty(t, waiting.Outcome())
		require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed))
		_, err = db.Collection("mongoq").UpdateByID(t.Context(), id, bson.D{{Key: "$set", Value: bson.D{{Key: "when", Value: waiting.Pushed.Add(-time.Minute)}}}})
		require.NoError(t, err)
		r := tryReserve(t, q)
		require.Equal(t, waiting.Pushed.Add(-time.Minute), r.Due)
		require.GreaterOrEqual(t, r.Waited(), time.Minute)
		require.Zero(t, r.Ran())
		require.Eventually(t, func() bool { return serverTime(t, db).After(r.Reserved.Add(20 * time.Millisecond)) }, soon, time.Millisecond)
		require.NoError(t, r.Commit(t.Context(), mongoq.Result("done")))
		p, err := q.History().Page(t.Context())
		require.NoError(t, err)
		require.Len(t, p.Envelopes, 1)
		e := p.Envelopes[0]
		require.Equal(t, r.Due, e.Due)
		require.Equal(t, e.Reserved.Sub(e.Due), e.Waited())
		require.Equal(t, e.Processed.Sub(e.Reserved), e.Ran())
		require.GreaterOrEqual(t, e.Ran(), 20*time.Millisecond)
		require.Equal(t, mongoq.OutcomeDone, e.Outcome())
		require.Len(t, e.Failures, 1)
		require.Equal(t, 2, e.Deliveries)
		require.Equal(t, someHeaders, e.Headers)
	})
}
