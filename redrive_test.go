package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// deadDoc is an envelope as it died in a queue.
func deadDoc(q string, kind mongoq.DeadKind, at time.Time, payload any, more ...bson.E) bson.D {
	return append(bson.D{
		{Key: "_id", Value: bson.NewObjectID()}, {Key: "q", Value: q + ".dead"}, {Key: "when", Value: at}, {Key: "prio", Value: 2},
		{Key: "deliveries", Value: 3}, {Key: "retries", Value: 2}, {Key: "pushed", Value: at.Add(-time.Minute)}, {Key: "payload", Value: payload},
		{Key: "dead", Value: bson.D{{Key: "from", Value: q}, {Key: "at", Value: at}, {Key: "kind", Value: string(kind)}, {Key: "msg", Value: "x"}}},
	}, more...)
}

// someDead gives a queue n dead letters, of two kinds by turns, one each ten milliseconds, an hour ago.
func someDead(t *testing.T, db *mongo.Database, q string, n int) (at func(i int) time.Time, ids []bson.ObjectID) {
	t.Helper()
	start := time.Now().Truncate(time.Second).Add(-time.Hour)
	at = func(i int) time.Time { return start.Add(time.Duration(i) * 10 * time.Millisecond) }
	kinds := []mongoq.DeadKind{mongoq.DeadLost, mongoq.DeadRetries}
	docs := rawDocs(t, n, func(i int) bson.D {
		return deadDoc(q, kinds[i%2], at(i), i, bson.E{Key: "headers", Value: bson.D{{Key: "n", Value: fmt.Sprint(i % 3)}}})
	})
	for _, d := range docs {
		ids = append(ids, d.(bson.Raw).Lookup("_id").ObjectID())
	}
	insertRaw(t, db, docs)
	return at, ids
}

// Each dead letter that stays is on one page, while others die, and are redriven.
func TestPagesOfDeadLettersNeitherSkipNorRepeat(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 500
		q := newQueue(t, openStore(t, db), "q")
		start := time.Now().Truncate(time.Second).Add(-time.Hour)
		kinds := []mongoq.DeadKind{mongoq.DeadExplicit, mongoq.DeadLost, mongoq.DeadRetries}
		docs := rawDocs(t, n, func(i int) bson.D { // many of one instant
			return deadDoc("q", kinds[i%3], start.Add(time.Duration(i/90)*-time.Second), i)
		})
		insertRaw(t, db, append(docs,
			bson.D{{Key: "q", Value: "q.dead"}, {Key: "when", Value: start}, {Key: "dead", Value: bson.D{{Key: "from", Value: "q"}}}}))
		seen := map[bson.ObjectID]int{}
		var order []string
		for next, i := "", 0; i == 0 || next != ""; i++ {
			p, err := q.DeadLetters().Page(t.Context(), mongoq.Limit(7), mongoq.Cursor(next))
			require.NoError(t, err)
			for _, e := range p.Envelopes {
				if seen[e.ID]++; payloadOf[int](t, e) >= 0 {
					order = append(order, fmt.Sprint(e.Dead.Kind, " ", math.MaxInt64-e.Dead.At.UnixMilli()))
				}
			}
			next = p.Next
			// One more dies, and one that was on a page goes.
			push(t, q, -1)
			require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
			if len(p.Envelopes) > 0 && i%10 == 0 {
				_, err := q.DeadLetters().Redrive(t.Context(), mongoq.IDs(p.Envelopes[0].ID))
				require.NoError(t, err)
				_, err = q.Purge(t.Context())
				require.NoError(t, err)
			}
		}
		for _, d := range docs {
			require.Equal(t, 1, seen[d.(bson.Raw).Lookup("_id").ObjectID()])
		}
		require.True(t, slices.IsSorted(order), "by kind, then the latest first")
		all := deadLetters(t, q)
		require.Empty(t, all[0].Dead.Kind, "what was written by hand is in the list")
		_, err := q.DeadLetters().Page(t.Context(), mongoq.Cursor("x"))
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		p, err := q.DeadLetters().Page(t.Context(), mongoq.Limit(1))
		require.NoError(t, err)
		_, err = q.History().Page(t.Context(), mongoq.Cursor(p.Next))
		require.ErrorIs(t, err, mongoq.ErrInvalidOption, "it is another list's")
		next := 0
		for e, err := range q.DeadLetters().List(t.Context(), mongoq.Cursor(p.Next), mongoq.Limit(1)) {
			require.NoError(t, err)
			require.NotEqual(t, p.Envelopes[0].ID, e.ID)
			next++
		}
		require.Equal(t, 1, next)
	})
}

func TestDeadLettersAreAskedForAPart(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		at, ids := someDead(t, db, "q", 12)
		for name, c := range map[string]struct {
			opts []mongoq.SelectOption
			want []int
		}{
			"all":     {nil, []int{10, 8, 6, 4, 2, 0, 11, 9, 7, 5, 3, 1}},
			"a span":  {[]mongoq.SelectOption{mongoq.Since(at(3)), mongoq.Until(at(7))}, []int{6, 4, 5, 3}},
			"ids":     {[]mongoq.SelectOption{mongoq.IDs(ids[3], ids[8], bson.NewObjectID())}, []int{8, 3}},
			"no ids":  {[]mongoq.SelectOption{mongoq.IDs()}, nil},
			"headers": {[]mongoq.SelectOption{mongoq.Header("n", "1")}, []int{10, 4, 7, 1}},
			"ids and a header in a span": {[]mongoq.SelectOption{
				mongoq.IDs(ids...), mongoq.Header("n", "1"), mongoq.Since(at(5)),
			}, []int{10, 7}},
		} {
			var opts []mongoq.DeadLetterOption
			for _, o := range c.opts {
				opts = append(opts, o)
			}
			var listed, paged []int
			for e, err := range q.DeadLetters().List(t.Context(), opts...) {
				require.NoError(t, err)
				listed = append(listed, payloadOf[int](t, e))
			}
			require.Equal(t, c.want, listed, name)
			for next, i := "", 0; i == 0 || next != ""; i++ {
				p, err := q.DeadLetters().Page(t.Context(), append(slices.Clone(opts), mongoq.Limit(2), mongoq.Cursor(next))...)
				require.NoError(t, err)
				for _, e := range p.Envelopes {
					paged = append(paged, payloadOf[int](t, e))
				}
				next = p.Next
			}
			require.Equal(t, c.want, paged, name)
			counts, err := q.DeadLetters().Count(t.Context(), opts...)
			require.NoError(t, err)
			want := map[mongoq.DeadKind]int64{}
			for _, i := range c.want {
				want[[]mongoq.DeadKind{mongoq.DeadLost, mongoq.DeadRetries}[i%2]]++
			}
			require.Equal(t, want, counts, name)
		}
		counts, err := q.DeadLetters().Count(t.Context(), mongoq.Kinds(mongoq.DeadLost), mongoq.Kinds(mongoq.DeadHops), mongoq.Limit(4))
		require.NoError(t, err)
		require.Equal(t, map[mongoq.DeadKind]int64{mongoq.DeadLost: 4}, counts)

		// The same of a purge, and of a redrive.
		n, err := q.DeadLetters().Purge(t.Context(), mongoq.Since(at(10)))
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		n, err = q.DeadLetters().Purge(t.Context(), mongoq.IDs(ids[0], ids[11]), mongoq.Kinds(mongoq.DeadLost))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		n, err = q.DeadLetters().Purge(t.Context(), mongoq.Header("n", "2"), mongoq.Limit(2))
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.Kinds(mongoq.DeadRetries), mongoq.Until(at(6)))
		require.NoError(t, err)
		require.Equal(t, n, live(t, q))
		for _, e := range deadLetters(t, q) {
			require.False(t, e.Dead.Kind == mongoq.DeadRetries && e.Dead.At.Before(at(6)))
		}
	})
}

func TestRedriveMendsOnTheWay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q, other := newQueue(t, store, "q"), newQueue(t, store, "other")
		_, ids := someDead(t, db, "q", 6)
		redrive := func(i int, opts ...mongoq.RedriveOption) *mongoq.Envelope {
			t.Helper()
			n, err := q.DeadLetters().Redrive(t.Context(), append(opts, mongoq.IDs(ids[i]))...)
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
			e, err := store.Get(t.Context(), ids[i])
			require.NoError(t, err)
			require.Nil(t, e.Dead)
			return e
		}
		e := redrive(0, mongoq.To(other), mongoq.Payload(bson.D{{Key: "$a", Value: "$b"}}), mongoq.AddHeaders(map[string]string{"$x.y": "$z"}))
		require.Equal(t, "other", e.Q)
		require.Equal(t, "q.dead", e.Hops[0].From)
		same(t, "payload", bson.D{{Key: "$a", Value: "$b"}}, e.Payload)
		require.Equal(t, map[string]string{"n": "0", "$x.y": "$z"}, e.Headers)
		e = redrive(1, mongoq.Headers(map[string]string{"a": "1"}), mongoq.AddHeaders(map[string]string{"b": "2"}))
		require.Equal(t, "q", e.Q)
		require.Equal(t, map[string]string{"a": "1", "b": "2"}, e.Headers)
		e = redrive(2, mongoq.Headers(nil))
		require.Empty(t, e.Headers)
		require.Equal(t, 2, payloadOf[int](t, e))
		e = redrive(3, mongoq.AddHeaders(map[string]string{"a": "1"}), mongoq.AddHeaders(map[string]string{"b": "2"}), mongoq.Rewrite(func(e *mongoq.Envelope) (any, error) {
			return payloadOf[int](t, e) * 100, nil
		}))
		require.Equal(t, 300, payloadOf[int](t, e))
		require.Equal(t, map[string]string{"n": "0", "a": "1", "b": "2"}, e.Headers)

		// What cannot be mended stays dead, with those behind it.
		why := errors.New("no way")
		before := rawDoc(t, db, ids[4])
		n, err := q.DeadLetters().Redrive(t.Context(), mongoq.Rewrite(func(*mongoq.Envelope) (any, error) { return nil, why }))
		require.ErrorIs(t, err, why)
		require.Zero(t, n)
		require.Equal(t, before, rawDoc(t, db, ids[4]))

		// One that is in the target as a dead letter waits there already.
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.To(newQueue(t, store, "q.dead")))
		require.NoError(t, err)
		require.Zero(t, n)

		elsewhere := newQueue(t, openStore(t, db, mongoq.Config{Collection: "elsewhere"}), "q")
		for name, opts := range map[string][]mongoq.RedriveOption{
			"rate":                 {mongoq.Rate(0)},
			"negative rate":        {mongoq.Rate(-1)},
			"no rate":              {mongoq.Rate(math.NaN())},
			"a rate without end":   {mongoq.Rate(math.Inf(1))},
			"no kinds":             {mongoq.Kinds()},
			"no queue":             {mongoq.To(nil)},
			"another store":        {mongoq.To(elsewhere)},
			"no function":          {mongoq.Rewrite(nil)},
			"no progress":          {mongoq.OnProgress(nil)},
			"rewrite and payload":  {mongoq.Rewrite(func(*mongoq.Envelope) (any, error) { return nil, nil }), mongoq.Payload(1)},
			"a function's payload": {mongoq.Rewrite(func(*mongoq.Envelope) (any, error) { return make(chan int), nil })},
			"payload":              {mongoq.Payload(make(chan int))},
			"headers":              {mongoq.AddHeaders(map[string]string{"": "x"})},
			"limit":                {mongoq.Limit(0)},
			"since":                {mongoq.Since(time.Time{})},
		} {
			_, err := q.DeadLetters().Redrive(t.Context(), opts...)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
		}
		_, err = q.DeadLetters().Redrive(t.Context(), mongoq.Payload(make([]byte, mongoq.MaxEnvelopeSize+1)))
		require.ErrorIs(t, err, mongoq.ErrPayloadTooLarge)
		require.Len(t, deadLetters(t, q), 2)
	})
}

// A payload that its holder replaces while a redrive rewrites it is not undone.
func TestARewriteOfWhatChangedSinceIsNotDone(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q, dlq := newQueue(t, store, "q"), newQueue(t, store, "q.dead", mongoq.QueueConfig{Retry: policy(0)})
		_, ids := someDead(t, db, "q", 1)
		calls := 0
		n, err := q.DeadLetters().Redrive(t.Context(), mongoq.Rewrite(func(e *mongoq.Envelope) (any, error) {
			if calls++; calls == 1 {
				require.NoError(t, tryReserve(t, dlq).Rollback(t.Context(), errFailed, mongoq.Payload(7)))
			}
			return payloadOf[int](t, e) + 1, nil
		}))
		require.NoError(t, err)
		require.Zero(t, n)
		e, err := store.Get(t.Context(), ids[0])
		require.NoError(t, err)
		require.Equal(t, 7, payloadOf[int](t, e))
		require.NotNil(t, e.Dead)
		n, err = q.DeadLetters().Redrive(t.Context(), mongoq.Rewrite(func(e *mongoq.Envelope) (any, error) { return payloadOf[int](t, e) + 1, nil }))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		require.Equal(t, 8, payloadOf[int](t, &tryReserve(t, q).Envelope))
	})
}

func TestARedriveKeepsItsRateAndTellsHowFarItCame(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		someDead(t, db, "q", 100)
		var told []int64
		began := time.Now()
		n, err := q.DeadLetters().Redrive(t.Context(), mongoq.Rate(200), mongoq.Limit(70), mongoq.OnProgress(func(p mongoq.Progress) { told = append(told, p.Done) }))
		require.NoError(t, err)
		require.EqualValues(t, 70, n)
		require.Equal(t, []int64{20, 40, 60, 70}, told)
		require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond, "60 before the last ten")

		ctx, cancel := context.WithCancel(t.Context())
		n, err = q.DeadLetters().Redrive(ctx, mongoq.Rate(0.001), mongoq.OnProgress(func(mongoq.Progress) { cancel() }))
		require.ErrorIs(t, err, context.Canceled)
		require.EqualValues(t, 1, n)
		require.Len(t, deadLetters(t, q), 29)
		told = nil
		n, err = q.DeadLetters().Purge(t.Context(), mongoq.OnProgress(func(p mongoq.Progress) { told = append(told, p.Done) }))
		require.NoError(t, err)
		require.EqualValues(t, 29, n)
		require.Equal(t, []int64{29}, told)
	})
}

func childRedrives(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	_, q := childQueue(t, spec)
	say(childSays{What: "runs"})
	_, err := q.DeadLetters().Redrive(ctx, mongoq.Rate(4000), mongoq.OnProgress(func(p mongoq.Progress) {
		say(childSays{What: "redrove", N: float64(p.Done)})
		if p.Done > 9000 {
			<-ctx.Done() // it is killed before it has all of them
		}
	}))
	say(childSays{What: "ended", Text: fmt.Sprint(err)})
}

// 10,000 are redriven by a process that is killed half-way, then by two at once, while another purges a part: each that
// was not purged is back once.
func TestARedriveThatIsKilledHalfWay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 10_000
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		_, ids := someDead(t, db, "q", n)
		c := spawn(t, db, childSpec{Role: "redrives", Lease: time.Minute})
		c.hears(t, "redrove", 12) // of 30
		c.dies(t, db)
		require.Empty(t, c.heard("ended"))
		half := live(t, q)
		require.Greater(t, half, int64(3000))
		require.Less(t, half, int64(n))

		var redriven, purged [2]int64
		var all sync.WaitGroup
		for i := range redriven {
			all.Go(func() {
				var err error
				if redriven[i], err = q.DeadLetters().Redrive(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Go(func() {
			var err error
			if purged[0], err = q.DeadLetters().Purge(t.Context(), mongoq.IDs(ids[n-100:]...)); err != nil {
				t.Error(err)
			}
		})
		all.Wait()
		last, err := q.DeadLetters().Redrive(t.Context()) // two at once may both end early where they meet
		require.NoError(t, err)
		t.Logf("%d before the kill, %v after, %d at last, %d purged", half, redriven, last, purged[0])
		require.Equal(t, int64(n), half+redriven[0]+redriven[1]+last+purged[0])
		require.Empty(t, deadLetters(t, q))
		require.Equal(t, n-purged[0], live(t, q))

		cur, err := db.Collection("mongoq").Find(t.Context(), bson.D{})
		require.NoError(t, err)
		back := map[bson.ObjectID]bool{}
		for cur.Next(t.Context()) {
			require.Equal(t, "q", cur.Current.Lookup("q").StringValue())
			require.EqualValues(t, 1, cur.Current.Lookup("moves").AsInt64(), "each is moved once")
			require.Equal(t, 1, lengthOf(cur.Current, "hops"))
			back[cur.Current.Lookup("_id").ObjectID()] = true
		}
		require.NoError(t, cur.Err())
		for _, id := range ids[:n-100] {
			require.True(t, back[id])
		}
	})
}

// A redrive, an answer of which is lost, says so, and is repeated.
func TestARedriveWhoseAnswerIsLost(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 1500
		s, lossy := lossyStage(t, db, false)
		q := newQueue(t, s.store, "q")
		someDead(t, db, "q", n)
		lossy.LoseReply("update", 1)
		done, err := q.DeadLetters().Redrive(t.Context())
		require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown)
		require.Zero(t, done)
		require.EqualValues(t, 1000, live(t, q), "it happened")
		done, err = q.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, n-1000, done)
		require.EqualValues(t, n, live(t, q))
	})
}

// By default a dead letter is kept for ever; where it is not, one that is taken from the dead-letter queue is.
func TestDeadLettersAreKeptAsLongAsTheQueueSays(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, keep := range []time.Duration{0, time.Hour} {
			for kind, die := range map[mongoq.DeadKind]func(q *mongoq.Queue) bson.ObjectID{
				mongoq.DeadExplicit: func(q *mongoq.Queue) bson.ObjectID {
					id := push(t, q, "x", mongoq.TTL(time.Hour))
					require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
					return id
				},
				mongoq.DeadRetries: func(q *mongoq.Queue) bson.ObjectID {
					id := push(t, q, "x")
					require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed))
					return id
				},
				mongoq.DeadExpired: func(q *mongoq.Queue) bson.ObjectID {
					id := push(t, q, "x", mongoq.TTL(time.Millisecond))
					require.Eventually(t, func() bool {
						_, err := q.TryReserve(t.Context())
						require.ErrorIs(t, err, mongoq.ErrEmpty)
						return len(deadLetters(t, q)) == 1
					}, soon, time.Millisecond)
					return id
				},
				mongoq.DeadUndecodable: func(q *mongoq.Queue) bson.ObjectID {
					id := push(t, q, "x")
					_, err := db.Collection("mongoq").UpdateByID(t.Context(), id, bson.D{{Key: "$set", Value: bson.D{{Key: "headers", Value: 1}}}})
					require.NoError(t, err)
					_, err = q.TryReserve(t.Context())
					require.ErrorIs(t, err, mongoq.ErrEmpty)
					return id
				},
			} {
				name := fmt.Sprint(kind, keep)
				q := newQueue(t, store, name, mongoq.QueueConfig{DeadRetention: keep, OnExpire: mongoq.ToDeadLetter, Retry: policy()})
				id := die(q)
				dead := deadLetters(t, q)
				require.Len(t, dead, 1, name)
				require.Equal(t, kind, dead[0].Dead.Kind)
				if keep == 0 {
					require.NotContains(t, rawDoc(t, db, id), "expireAt", name)
					continue
				}
				require.Equal(t, keep, dead[0].ExpireAt.Sub(dead[0].Dead.At), name)
				for _, on := range []mongoq.ExpirePolicy{mongoq.Discard, mongoq.ToDeadLetter} {
					r := tryReserve(t, newQueue(t, store, name+".dead", mongoq.QueueConfig{OnExpire: on}))
					require.NotContains(t, rawDoc(t, db, id), "expireAt", name)
					require.NoError(t, r.Release(t.Context()))
					require.NotContains(t, rawDoc(t, db, id), "expireAt", name)
				}
				n, err := q.DeadLetters().Redrive(t.Context())
				require.NoError(t, err)
				require.EqualValues(t, 1, n)
				require.NotContains(t, rawDoc(t, db, id), "expireAt", name)
			}
		}
		_, err := store.Queue("q", mongoq.QueueConfig{DeadRetention: -1})
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)

		// It is the server that forgets them.
		q := newQueue(t, store, "short", mongoq.QueueConfig{DeadRetention: time.Millisecond})
		push(t, q, "x")
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errFailed))
		require.Eventually(t, func() bool { return len(deadLetters(t, q)) == 0 }, late, 20*time.Millisecond)
	})
}
