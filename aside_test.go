package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// expire puts an envelope's deadline into the past, without what the TTL index goes by: as if its monitor were late.
func expire(t testing.TB, db *mongo.Database, id bson.ObjectID) {
	t.Helper()
	res, err := db.Collection("mongoq").UpdateByID(t.Context(), id, bson.A{
		bson.D{{Key: "$set", Value: bson.D{{Key: "deadline", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", 1}}}}}}},
		bson.D{{Key: "$unset", Value: "expireAt"}},
	})
	require.NoError(t, err)
	require.EqualValues(t, 1, res.MatchedCount)
}

func TestWhatIsPastItsDeadlineIsNeverDelivered(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		discarding := newQueue(t, store, "discarding")
		burying := newQueue(t, store, "burying", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter})

		for _, q := range []*mongoq.Queue{discarding, burying} {
			for _, many := range []bool{false, true} { // one claim for one, one for several
				var late []bson.ObjectID
				for i := range 3 {
					id := push(t, q, "late", mongoq.TTL(time.Hour))
					if q == burying {
						require.NotContains(t, rawDoc(t, db, id), "expireAt")
					} else {
						require.Equal(t, rawDoc(t, db, id)["deadline"], rawDoc(t, db, id)["expireAt"])
					}
					expire(t, db, id)
					late = append(late, id)
					push(t, q, fmt.Sprint("in time ", i), mongoq.TTL(time.Hour))
				}
				var got []string
				if many {
					for len(got) < 3 {
						rs, err := q.ReserveMany(t.Context(), 10)
						require.NoError(t, err)
						got = append(got, payloads[string](t, rs)...)
					}
				} else {
					for range 3 {
						r := tryReserve(t, q)
						got = append(got, payloadOf[string](t, &r.Envelope))
					}
				}
				require.Equal(t, []string{"in time 0", "in time 1", "in time 2"}, got)
				_, err := q.TryReserve(t.Context())
				require.ErrorIs(t, err, mongoq.ErrEmpty)
				for _, id := range late {
					e, err := store.Get(t.Context(), id)
					if q == discarding {
						require.ErrorIs(t, err, mongoq.ErrNotFound)
						continue
					}
					require.NoError(t, err)
					require.Equal(t, "burying.dead", e.Q)
					require.Equal(t, mongoq.DeadExpired, e.Dead.Kind)
					require.Equal(t, "burying", e.Dead.From)
					require.Zero(t, e.ExpireAt)
					require.Zero(t, e.Retries)
					require.Empty(t, e.Failures)
				}
			}
		}
		require.Len(t, deadLetters(t, burying), 6)
		require.Empty(t, deadLetters(t, discarding))

		// As a dead letter it is delivered, whatever deadline it had.
		dead := newQueue(t, store, "burying.dead")
		require.Equal(t, "late", payloadOf[string](t, &tryReserve(t, dead).Envelope))
		n, err := burying.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 5, n)
		require.Equal(t, "late", payloadOf[string](t, &tryReserve(t, burying).Envelope))
	})
}

func TestWhatFallsDuePastItsDeadlineIsBuriedByItsWaiter(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter, PollInterval: time.Minute})
		id := push(t, q, "x", mongoq.TTL(100*time.Millisecond), mongoq.Delay(200*time.Millisecond))
		beginReserve(t, q)
		r := reserve(t, newQueue(t, store, "q.dead"))
		require.Equal(t, id, r.ID)
		require.Equal(t, mongoq.DeadExpired, r.Dead.Kind)
		require.Equal(t, "0000", sizes(t, q))
	})
}

// The TTL monitor of the tests' servers passes each second, and deletes the earliest first: when a canary is gone that
// was to go at the same time or later, all have been looked at.
func awaitTTL(t testing.TB, store *mongoq.Store) {
	t.Helper()
	id := push(t, newQueue(t, store, "canaries"), "canary", mongoq.TTL(time.Millisecond))
	require.Eventually(t, func() bool {
		_, err := store.Get(t.Context(), id)
		return errors.Is(err, mongoq.ErrNotFound)
	}, 30*time.Second, 20*time.Millisecond)
}

func TestTheServerRemovesOnlyWhatWaitsPastItsDeadline(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const ttl = 500 * time.Millisecond
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		burying := newQueue(t, store, "burying", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter})
		take := func(q *mongoq.Queue, what string) *mongoq.Reservation {
			t.Helper()
			for range 10 {
				push(t, q, what, mongoq.TTL(ttl))
				r, err := q.TryReserve(t.Context(), mongoq.LeaseFor(time.Hour))
				if errors.Is(err, mongoq.ErrEmpty) {
					continue // its life was over, on a slow machine
				}
				require.NoError(t, err)
				require.Equal(t, what, payloadOf[string](t, &r.Envelope))
				return r
			}
			require.FailNow(t, "too slow")
			return nil
		}
		var held, extended, dead *mongoq.Reservation
		held = take(q, "held")
		require.Equal(t, held.When, held.ExpireAt, "not before the lease ends")
		extended = take(q, "extended")
		require.NoError(t, extended.Extend(t.Context(), 2*time.Hour))
		dead = take(q, "dead")
		require.NoError(t, dead.DeadLetter(t.Context(), errFailed))
		buriedLater := push(t, burying, "waits", mongoq.TTL(time.Millisecond))
		waiting := push(t, q, "waiting", mongoq.TTL(time.Millisecond), mongoq.Delay(time.Hour))
		released := take(q, "released")
		require.NoError(t, released.Release(t.Context(), mongoq.Delay(time.Hour)))
		rolledBack := take(q, "rolled back")
		require.NoError(t, rolledBack.Rollback(t.Context(), errFailed, mongoq.After(time.Hour)))
		moved := take(q, "moved")
		require.NoError(t, moved.MoveToQ(t.Context(), "q", mongoq.Delay(time.Hour)))
		freed := take(q, "freed")
		require.NoError(t, freed.MoveToQ(t.Context(), "q", mongoq.Delay(time.Hour), mongoq.TTL(0)))
		given := take(q, "given")
		require.NoError(t, given.MoveToQ(t.Context(), "burying", mongoq.Delay(time.Hour)))

		require.Eventually(t, func() bool {
			_, err := store.Get(t.Context(), moved.ID) // the last to be given a life that ends
			return errors.Is(err, mongoq.ErrNotFound)
		}, 30*time.Second, 20*time.Millisecond)
		awaitTTL(t, store)
		for _, id := range []bson.ObjectID{waiting, released.ID, rolledBack.ID, moved.ID} {
			requireGone(t, store, id)
		}
		for _, id := range []bson.ObjectID{held.ID, extended.ID, dead.ID, buriedLater, freed.ID, given.ID} {
			_, err := store.Get(t.Context(), id)
			require.NoError(t, err)
		}
		e, err := store.Get(t.Context(), extended.ID)
		require.NoError(t, err)
		require.Equal(t, e.When, e.ExpireAt)
		require.NoError(t, held.Commit(t.Context()))
		require.NoError(t, extended.Commit(t.Context()))
		r := tryReserve(t, newQueue(t, store, "q.dead"))
		require.Equal(t, dead.ID, r.ID)
		require.NoError(t, r.Rollback(t.Context(), errFailed))
		awaitTTL(t, store)
		require.Len(t, deadLetters(t, q), 1)
	})
}

func TestExpiredEnvelopesAtTheHeadDoNotSlowWhatIsBehind(t *testing.T) {
	t.Parallel()
	tests := []struct {
		policy mongoq.ExpirePolicy
		n      int
	}{{mongoq.Discard, 100_000}, {mongoq.ToDeadLetter, 5_000}}
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, s := spied(t, db)
		store := openStore(t, own)
		for _, test := range tests {
			name := fmt.Sprint("q", test.policy)
			q := newQueue(t, store, name, mongoq.QueueConfig{OnExpire: test.policy})
			begun := time.Now().Add(-time.Hour)
			insertRaw(t, db, rawDocs(t, test.n, func(i int) bson.D {
				return bson.D{
					{Key: "q", Value: name}, {Key: "prio", Value: 2}, {Key: "when", Value: begun.Add(time.Duration(i) * time.Millisecond)},
					{Key: "payload", Value: i}, {Key: "deadline", Value: begun.Add(time.Minute)},
				}
			}))
			for i := range 3 {
				push(t, q, fmt.Sprint("live ", i))
			}

			require.Equal(t, "live 0", payloadOf[string](t, &tryReserve(t, q).Envelope))
			// The claims that follow find nothing in their way.
			for i := 1; i < 3; i++ {
				s.forget()
				require.Equal(t, fmt.Sprint("live ", i), payloadOf[string](t, &tryReserve(t, q).Envelope))
				require.LessOrEqual(t, len(s.names()), 3, "%v", s.names())
				require.LessOrEqual(t, explain(t, db, s.last(t, "findAndModify")).keys, int64(5))
			}
			stats, err := q.Stats(t.Context(), mongoq.Exact())
			require.NoError(t, err)
			require.EqualValues(t, 3, stats.Total)
			want := 0
			if test.policy == mongoq.ToDeadLetter {
				want = test.n
			}
			require.EqualValues(t, want, stats.Dead)
		}
	})
}

// handwritten is a document that somebody else has put into the collection, due long ago.
func handwritten(queue, payload string, at int, fields ...bson.E) bson.D {
	doc := bson.D{
		{Key: "q", Value: queue}, {Key: "when", Value: time.UnixMilli(int64(at))}, {Key: "prio", Value: 2}, {Key: "payload", Value: payload},
	}
	for _, f := range fields {
		set := false
		for i := range doc {
			if doc[i].Key == f.Key {
				doc[i].Value, set = f.Value, true
			}
		}
		if !set {
			doc = append(doc, f)
		}
	}
	return doc
}

func without(doc bson.D, field string) bson.D {
	var rest bson.D
	for _, f := range doc {
		if f.Key != field {
			rest = append(rest, f)
		}
	}
	return rest
}

// oddFields are values that no envelope has.
var oddFields = []bson.E{
	{Key: "when", Value: "tomorrow"},
	{Key: "when", Value: bson.A{time.UnixMilli(1), time.UnixMilli(2)}},
	{Key: "when", Value: 1.5},
	{Key: "when", Value: int64(17)},
	{Key: "when", Value: bson.D{{Key: "at", Value: "noon"}}},
	{Key: "prio", Value: "high"},
	{Key: "prio", Value: bson.A{1, 2}},
	{Key: "retries", Value: "none"},
	{Key: "retries", Value: bson.A{}},
	{Key: "deliveries", Value: "$deliveries"},
	{Key: "deliveries", Value: bson.D{}},
	{Key: "moves", Value: true},
	{Key: "headers", Value: bson.A{"a", "b"}},
	{Key: "headers", Value: "k: v"},
	{Key: "headers", Value: bson.D{{Key: "good", Value: "v"}, {Key: "bad", Value: 1}}},
	{Key: "_id", Value: "a string"},
	{Key: "_id", Value: int32(7)},
	{Key: "_id", Value: bson.D{{Key: "a", Value: 1}, {Key: "b", Value: "$x"}}},
	{Key: "_id", Value: bson.Binary{Subtype: 4, Data: make([]byte, 16)}},
	{Key: "errs", Value: "many"},
	{Key: "errs", Value: bson.A{"one"}},
	{Key: "hops", Value: 3},
	{Key: "hops", Value: bson.A{bson.A{}}},
	{Key: "dead", Value: "yes"},
	{Key: "deadline", Value: "soon"},
	{Key: "pushed", Value: 12},
	{Key: "last", Value: "commit"},
	{Key: "digest", Value: "none"},
}

func TestDocumentsThatAreNoEnvelopesAreSetAside(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, several := range []bool{false, true} { // one claim for one, one for several
			name := fmt.Sprint("several: ", several)
			q := newQueue(t, store, name)
			odd := map[string]bson.E{}
			var docs []any
			var want []string
			for i, f := range oddFields {
				what := fmt.Sprintf("%d: %s", i, f.Key)
				odd[what] = f
				if f.Key == "_id" && several {
					f.Value = bson.A{f.Value}
					odd[what] = bson.E{Key: "_id", Value: bson.D{{Key: "again", Value: f.Value}}}
				}
				want = append(want, fmt.Sprintf("good %d", i))
				docs = append(docs, handwritten(name, what, 2*i, odd[what]), handwritten(name, want[i], 2*i+1))
			}
			insertRaw(t, db, docs)

			var got []string
			for {
				if several {
					stats, err := q.Stats(t.Context())
					require.NoError(t, err)
					if stats.Ready == 0 {
						break
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					rs, err := q.ReserveMany(ctx, 10)
					cancel()
					if !errors.Is(err, context.DeadlineExceeded) { // nothing but odd ones was left
						require.NoError(t, err)
					}
					got = append(got, payloads[string](t, rs)...)
					continue
				}
				r, err := q.TryReserve(t.Context())
				if errors.Is(err, mongoq.ErrEmpty) {
					break
				}
				require.NoError(t, err)
				got = append(got, payloadOf[string](t, &r.Envelope))
			}
			require.Equal(t, want, got)

			dead := deadLetters(t, q)
			require.Len(t, dead, len(oddFields))
			for _, e := range dead {
				what := payloadOf[string](t, e)
				require.Contains(t, odd, what)
				requireSetAside(t, e, name, odd[what])
				delete(odd, what)
			}

			// They can be taken up again.
			n, err := q.DeadLetters().Redrive(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, len(oddFields), n)
			for range oddFields {
				r := tryReserve(t, q)
				require.Nil(t, r.Dead)
				require.Zero(t, r.Retries)
				require.NoError(t, r.Commit(t.Context()))
			}
			require.Empty(t, deadLetters(t, q))
		}
	})
}

// requireSetAside checks a dead letter that was made of a document with one odd field.
func requireSetAside(t testing.TB, e *mongoq.Envelope, from string, odd bson.E) {
	t.Helper()
	require.Equal(t, from+".dead", e.Q)
	require.Equal(t, mongoq.DeadUndecodable, e.Dead.Kind)
	require.Equal(t, from, e.Dead.From)
	require.Contains(t, e.Dead.Msg, odd.Key)
	require.NotZero(t, e.ID)
	kind, value, err := bson.MarshalValue(odd.Value)
	require.NoError(t, err)
	was := e.Dead.Was.Lookup(odd.Key)
	require.Equal(t, kind, was.Type, odd.Key)
	require.Equal(t, value, was.Value, odd.Key)
}

// What an envelope always has, and a document has not.
func TestDocumentsThatLackWhatAnEnvelopeHasAreSetAside(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		tests := map[string]struct {
			field string
			doc   func(queue string) bson.D
		}{
			"no when":      {"when", func(q string) bson.D { return without(handwritten(q, "odd", 1), "when") }},
			"when is null": {"when", func(q string) bson.D { return handwritten(q, "odd", 1, bson.E{Key: "when", Value: nil}) }},
			"_id is null":  {"_id", func(q string) bson.D { return handwritten(q, "odd", 1, bson.E{Key: "_id", Value: nil}) }},
		}
		for name, test := range tests {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				q := newQueue(t, store, name)
				insertRaw(t, db, []any{test.doc(name), handwritten(name, "good", 2)})
				require.Equal(t, "good", payloadOf[string](t, &tryReserve(t, q).Envelope))
				_, err := q.TryReserve(t.Context())
				require.ErrorIs(t, err, mongoq.ErrEmpty)
				dead := deadLetters(t, q)
				require.Len(t, dead, 1)
				require.Equal(t, mongoq.DeadUndecodable, dead[0].Dead.Kind)
				require.Contains(t, dead[0].Dead.Msg, test.field)

				n, err := q.DeadLetters().Redrive(t.Context())
				require.NoError(t, err)
				require.EqualValues(t, 1, n)
				r := tryReserve(t, q)
				require.NoError(t, r.Commit(t.Context()))
				require.Equal(t, "1001", sizes(t, q))
			})
		}
	})
}

// A handwritten envelope needs no more than a queue, a time, a priority and a payload.
func TestAHandwrittenEnvelopeIsDelivered(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for name, fields := range map[string][]bson.E{
			"bare": nil,
			"of null": {
				{Key: "headers", Value: nil}, {Key: "retries", Value: nil}, {Key: "deliveries", Value: nil},
				{Key: "errs", Value: nil}, {Key: "hops", Value: nil}, {Key: "deadline", Value: nil},
				{Key: "moves", Value: nil}, {Key: "processed", Value: nil}, {Key: "prio", Value: nil},
			},
			"of other numbers": {
				{Key: "retries", Value: 0.0}, {Key: "prio", Value: int64(2)}, {Key: "deliveries", Value: int64(0)},
			},
		} {
			q := newQueue(t, store, name, mongoq.QueueConfig{Retry: retries(1)})
			insertRaw(t, db, []any{handwritten(name, "x", 1, fields...)})
			r := tryReserve(t, q)
			require.Equal(t, "x", payloadOf[string](t, &r.Envelope), name)
			require.Equal(t, []int{0, 1, 0}, []int{r.Retries, r.Deliveries, r.Moves}, name)
			require.NoError(t, r.Rollback(t.Context(), errFailed))
			r = tryReserve(t, q)
			require.Equal(t, []int{1, 2, 0}, []int{r.Retries, r.Deliveries, r.Moves}, name)
			require.Len(t, r.Failures, 1, name)
			require.NoError(t, r.MoveToQ(t.Context(), name, mongoq.Delay(time.Hour)))
			e, err := q.Get(t.Context(), r.ID)
			require.NoError(t, err)
			require.Equal(t, 1, e.Moves, name)
			require.Len(t, e.Hops, 1, name)
		}
	})
}

func TestAReservationShowsWhenItsEnvelopeMayBeRemoved(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, p := range []mongoq.ExpirePolicy{mongoq.Discard, mongoq.ToDeadLetter} {
			for _, n := range []int{1, 3} { // one claim for one, one for several
				q := newQueue(t, store, fmt.Sprint(p, n), mongoq.QueueConfig{OnExpire: p, TTL: time.Hour, Lease: 2 * time.Hour})
				for i := range n {
					push(t, q, i)
				}
				rs, err := q.ReserveMany(t.Context(), n)
				require.NoError(t, err)
				require.Len(t, rs, n)
				for _, r := range rs {
					e, err := q.Get(t.Context(), r.ID)
					require.NoError(t, err)
					require.Equal(t, e.Deadline, r.Deadline)
					if p == mongoq.ToDeadLetter {
						require.Zero(t, e.ExpireAt)
						require.Zero(t, r.ExpireAt)
						continue
					}
					require.Equal(t, e.When, e.ExpireAt)
					require.Equal(t, r.When, r.ExpireAt)
				}
			}
		}
	})
}

// insertTooLarge writes an envelope into a queue that is too large to be claimed, and two behind it, and gives its id and
// its payload.
func insertTooLarge(t testing.TB, db *mongo.Database, q string) (bson.ObjectID, string) {
	t.Helper()
	id := bson.NewObjectID()
	raw, err := bson.Marshal(handwritten(q, "", 1, bson.E{Key: "_id", Value: id}))
	require.NoError(t, err)
	huge := strings.Repeat("x", 16<<20-len(raw)-20)
	insertRaw(t, db, []any{
		handwritten(q, huge, 1, bson.E{Key: "_id", Value: id}), handwritten(q, "a", 2), handwritten(q, "b", 3),
	})
	return id, huge
}

// A document that fills the 16 MiB that MongoDB allows cannot even be claimed.
func TestWhatIsTooLargeToBeClaimedIsSetAside(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, n := range []int{1, 10} { // one claim for one, one for several
			name := fmt.Sprint("q", n)
			q := newQueue(t, store, name)
			id, huge := insertTooLarge(t, db, name)
			var got []string
			for len(got) < 2 {
				ctx, cancel := context.WithTimeout(t.Context(), soon)
				rs, err := q.ReserveMany(ctx, n)
				cancel()
				require.NoError(t, err)
				got = append(got, payloads[string](t, rs)...)
			}
			require.ElementsMatch(t, []string{"a", "b"}, got)

			// On a machine so slow that its claim was given up, it is passed over for some seconds.
			var dead []*mongoq.Envelope
			require.Eventually(t, func() bool {
				_, err := q.TryReserve(t.Context())
				dead = deadLetters(t, q)
				return errors.Is(err, mongoq.ErrEmpty) && len(dead) == 1
			}, 30*time.Second, 50*time.Millisecond)
			require.Equal(t, id, dead[0].ID)
			require.Equal(t, mongoq.DeadUndecodable, dead[0].Dead.Kind)
			require.Contains(t, dead[0].Dead.Msg, "too large")
			require.Contains(t, dead[0].Dead.Msg, "mongoq.aside")
			var aside struct{ Payload string }
			require.NoError(t, db.Collection("mongoq.aside").FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&aside))
			require.Len(t, aside.Payload, len(huge))
			require.True(t, strings.EqualFold(huge, aside.Payload), "the payload is kept")
			redriven, err := q.DeadLetters().Redrive(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, redriven)
			require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		}
	})
}

// What is too large to be claimed, and cannot be set aside now, holds up nobody: it is passed over, and set aside later.
func TestWhatCannotBeSetAsideIsPassedOver(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Faulty(t, kind)
		q := newQueue(t, openStore(t, db), "q")
		insertTooLarge(t, db, "q")
		heal := mongotest.Fail(t, db, mongotest.Always, bson.D{
			{Key: "failCommands", Value: bson.A{"insert", "update"}}, {Key: "namespace", Value: db.Name() + ".mongoq.aside"}, {Key: "errorCode", Value: 365},
		})
		ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
		defer cancel()
		for _, want := range []string{"a", "b"} {
			r, err := q.Reserve(ctx)
			require.NoError(t, err)
			require.Equal(t, want, payloadOf[string](t, &r.Envelope))
			require.NoError(t, r.Commit(ctx))
		}
		require.Positive(t, heal())
		require.Eventually(t, func() bool {
			_, err := q.TryReserve(t.Context())
			return errors.Is(err, mongoq.ErrEmpty) && len(deadLetters(t, q)) == 1
		}, late, 50*time.Millisecond)
	})
}
