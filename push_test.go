package mongoq_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestPushStoresAnEnvelope(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		plain := push(t, q, "x")
		doc := rawDoc(t, db, plain)
		require.ElementsMatch(t, []string{"_id", "q", "when", "prio", "pushed", "payload"}, keys(doc))
		require.Equal(t, bson.M{
			"_id": plain, "q": "q", "when": doc["pushed"], "prio": int32(2), "pushed": doc["pushed"], "payload": "x",
		}, doc)

		full := push(t, q, "x", mongoq.Headers(map[string]string{"k": "v"}), mongoq.Priority(1), mongoq.TTL(time.Hour), mongoq.ID(bson.NewObjectID()))
		doc = rawDoc(t, db, full)
		require.ElementsMatch(t, []string{"_id", "q", "when", "prio", "pushed", "payload", "headers", "deadline", "expireAt", "digest"}, keys(doc))
		require.Equal(t, doc["deadline"], doc["expireAt"])
		e, err := q.Get(t.Context(), full)
		require.NoError(t, err)
		require.InDelta(t, time.Hour, e.Deadline.Sub(e.Pushed), float64(time.Second))
	})
}

func keys(m bson.M) []string {
	var all []string
	for k := range m {
		all = append(all, k)
	}
	return all
}

func TestPushWithIDCanBeRepeated(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		other := newQueue(t, store, "other", mongoq.QueueConfig{Retention: time.Hour})
		id := bson.NewObjectID()
		type payload struct {
			A string
			B []byte
		}
		what := payload{A: "$x", B: []byte{1, 2}}
		own := func() []mongoq.PushOption {
			return []mongoq.PushOption{mongoq.ID(id), mongoq.Headers(map[string]string{"a.b": "1", "c": "2"}), mongoq.Priority(3)}
		}
		repeat := func(opts ...mongoq.PushOption) {
			t.Helper()
			before := rawDoc(t, db, id)
			got, err := q.Push(t.Context(), what, append(own(), opts...)...)
			require.NoError(t, err)
			require.Equal(t, id, got)
			ids, err := q.PushMany(t.Context(), []any{mongoq.With(what, own()...)})
			require.NoError(t, err)
			require.Equal(t, []bson.ObjectID{id}, ids)
			require.Equal(t, before, rawDoc(t, db, id), "it changes nothing")
			duplicate(t, q, other, id, what)
			require.Equal(t, before, rawDoc(t, db, id), "nor does another envelope")
		}

		require.Equal(t, id, push(t, q, what, own()...))
		repeat()
		repeat(mongoq.Delay(time.Hour), mongoq.TTL(time.Hour)) // when it may be taken does not make it another
		r := tryReserve(t, q)
		repeat()
		require.NoError(t, r.Rollback(t.Context(), errors.New("x"), mongoq.After(0), mongoq.Payload("patched"), mongoq.Headers(nil)))
		repeat()
		require.NoError(t, tryReserve(t, q).MoveToQ(t.Context(), "other", mongoq.Payload("moved"), mongoq.Priority(1)))
		repeat()
		require.NoError(t, tryReserve(t, other).DeadLetter(t.Context(), errors.New("x")))
		repeat()
		_, err := other.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		repeat()
		require.NoError(t, tryReserve(t, other).Commit(t.Context()))
		repeat()
	})
}

// duplicate sees that other envelopes under the id are refused: another payload, type of it, header, priority, queue.
func duplicate(t *testing.T, q, other *mongoq.Queue, id bson.ObjectID, payload any) {
	t.Helper()
	same := map[string]string{"a.b": "1", "c": "2"}
	for _, c := range []struct {
		q        *mongoq.Queue
		payload  any
		headers  map[string]string
		priority int
	}{
		{q, "another", same, 3},
		{q, nil, same, 3},
		{q, payload, nil, 3},
		{q, payload, map[string]string{"a.b": "1", "c": "3"}, 3},
		{q, payload, map[string]string{"a.b": "1", "c": "2", "d": ""}, 3},
		{q, payload, same, 2},
		{other, payload, same, 3},
	} {
		opts := []mongoq.PushOption{mongoq.ID(id), mongoq.Headers(c.headers), mongoq.Priority(c.priority)}
		got, err := c.q.Push(t.Context(), c.payload, opts...)
		require.ErrorIs(t, err, mongoq.ErrDuplicate)
		require.ErrorContains(t, err, id.Hex())
		require.True(t, got.IsZero())
		ids, err := c.q.PushMany(t.Context(), []any{mongoq.With(c.payload, opts...)})
		require.ErrorIs(t, err, mongoq.ErrDuplicate)
		require.Equal(t, []bson.ObjectID{bson.NilObjectID}, ids)
	}
}

func TestPushWithIDOfAnEnvelopeWithoutOneIsADuplicate(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		id := push(t, q, "x")
		_, err := q.Push(t.Context(), "x", mongoq.ID(id))
		require.ErrorIs(t, err, mongoq.ErrDuplicate)
	})
}

func TestPushWithIDIsForgottenWithItsCommit(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		id := bson.NewObjectID()
		push(t, q, "x", mongoq.ID(id))
		require.NoError(t, tryReserve(t, q).Commit(t.Context()))
		push(t, q, "another", mongoq.ID(id))
		require.Equal(t, "another", payloadOf[string](t, &tryReserve(t, q).Envelope))
	})
}

func TestPushManyKeepsTheOrder(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		payloads := make([]any, 2_500)
		for i := range payloads {
			payloads[i] = i
		}
		ids, err := q.PushMany(t.Context(), payloads)
		require.NoError(t, err)
		require.Len(t, ids, len(payloads))
		for n := 0; n < len(payloads); {
			rs, err := q.ReserveMany(t.Context(), 400)
			require.NoError(t, err)
			for _, r := range rs {
				require.Equal(t, n, payloadOf[int](t, &r.Envelope))
				require.Equal(t, ids[n], r.ID)
				n++
			}
		}
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}

func TestPushManyTellsOfEachThatFailed(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		taken, twice, again := push(t, q, "there"), bson.NewObjectID(), bson.NewObjectID()
		push(t, q, "same", mongoq.ID(again))
		require.Len(t, peeked(t, q, 10), 2)
		payloads := []any{
			"0 good",
			make(chan int),
			func() {},
			"3 good",
			strings.Repeat("x", mongoq.MaxEnvelopeSize),
			mongoq.With("5 duplicate", mongoq.ID(taken)),
			mongoq.With("6 good", mongoq.Priority(1)),
			mongoq.With("7 good", mongoq.ID(twice)),
			mongoq.With("8 another under the same id", mongoq.ID(twice)),
			mongoq.With("7 good", mongoq.ID(twice)), // the same again
			mongoq.With("same", mongoq.ID(again)),
			mongoq.With("11 bad option", mongoq.Priority(5)),
			map[string]any{"deep": []any{1, map[string]any{"down": make(chan int)}}},
			struct{ F func() }{},
			map[string]any{"a\x00b": 1},
			"15 good",
		}
		want := map[int]error{
			1: mongoq.ErrInvalidOption, 2: mongoq.ErrInvalidOption, 4: mongoq.ErrPayloadTooLarge, 5: mongoq.ErrDuplicate,
			8: mongoq.ErrDuplicate, 11: mongoq.ErrInvalidOption, 12: mongoq.ErrInvalidOption, 13: mongoq.ErrInvalidOption,
			14: mongoq.ErrInvalidOption,
		}
		ids, err := q.PushMany(t.Context(), payloads)
		require.Len(t, ids, len(payloads))
		var be *mongoq.BatchError
		require.ErrorAs(t, err, &be)
		require.Equal(t, len(payloads), be.Total)
		last := -1
		for _, f := range be.Failed {
			require.Greater(t, f.Index, last)
			last = f.Index
			require.ErrorIs(t, f.Err, want[f.Index], "at %d", f.Index)
			require.True(t, ids[f.Index].IsZero(), "at %d", f.Index)
		}
		require.Len(t, be.Failed, len(want))
		require.Equal(t, twice, ids[7])
		require.Equal(t, twice, ids[9])
		require.Equal(t, again, ids[10])
		for _, sentinel := range want {
			require.ErrorIs(t, err, sentinel)
		}

		require.Equal(t, []string{"6 good", "there", "same", "0 good", "3 good", "7 good", "15 good"}, peeked(t, q, 20))
	})
}

func TestPushManyTakesOptionsForAllAndForOne(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Delay: time.Hour})
		all, own := map[string]string{"of": "all"}, map[string]string{"of": "its own"}
		ids, err := q.PushMany(t.Context(), []any{
			"a",
			mongoq.With("b", mongoq.Priority(1), mongoq.Headers(own)),
			mongoq.With("c", mongoq.Delay(2*time.Hour)),
			mongoq.With("d"),
		}, mongoq.Priority(4), mongoq.Headers(all), mongoq.Delay(0))
		require.NoError(t, err)
		for i, want := range []struct {
			prio    int
			headers map[string]string
			delay   time.Duration
		}{{4, all, 0}, {1, own, 0}, {4, all, 2 * time.Hour}, {4, all, 0}} {
			e, err := q.Get(t.Context(), ids[i])
			require.NoError(t, err)
			require.Equal(t, want.prio, e.Priority)
			require.Equal(t, want.headers, e.Headers)
			require.InDelta(t, want.delay, e.When.Sub(e.Pushed), float64(time.Second))
		}
	})
}

func TestPushManyNeedsPayloads(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		for _, none := range [][]any{nil, {}} {
			ids, err := q.PushMany(t.Context(), none)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption)
			require.Nil(t, ids)
		}
		_, err := q.PushMany(t.Context(), []any{"a", "b"}, mongoq.ID(bson.NewObjectID()))
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		require.Equal(t, "0000", sizes(t, q))
	})
}

func TestPushOfAnEndedContextStoresNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := q.Push(ctx, "x")
		require.ErrorIs(t, err, context.Canceled)
		_, err = q.PushMany(ctx, []any{"x", "y"})
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, "0000", sizes(t, q))
	})
}

func TestPushDelayOfTheCallBeatsTheQueues(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		plain := newQueue(t, store, "plain")
		slow := newQueue(t, store, "slow", mongoq.QueueConfig{Delay: time.Hour})
		soon := time.Now().Add(2 * time.Hour)
		for _, c := range []struct {
			name string
			q    *mongoq.Queue
			opts []mongoq.PushOption
			want time.Duration
		}{
			{"none", plain, nil, 0},
			{"the call's", plain, []mongoq.PushOption{mongoq.Delay(time.Minute)}, time.Minute},
			{"the queue's", slow, nil, time.Hour},
			{"the call's, not the queue's", slow, []mongoq.PushOption{mongoq.Delay(time.Minute)}, time.Minute},
			{"the call's zero", slow, []mongoq.PushOption{mongoq.Delay(0)}, 0},
			{"the call's time", slow, []mongoq.PushOption{mongoq.At(soon)}, 2 * time.Hour},
			{"the call's time in the past", slow, []mongoq.PushOption{mongoq.At(time.Unix(0, 0))}, 0},
			{"the last one given", slow, []mongoq.PushOption{mongoq.At(soon), mongoq.Delay(time.Minute)}, time.Minute},
		} {
			e, err := c.q.Get(t.Context(), push(t, c.q, c.name, c.opts...))
			require.NoError(t, err)
			if c.want == 0 {
				require.Equal(t, e.Pushed, e.When, c.name)
				require.Equal(t, c.name, payloadOf[string](t, &tryReserve(t, c.q).Envelope))
				continue
			}
			require.InDelta(t, c.want, e.When.Sub(e.Pushed), float64(10*time.Second), c.name)
			_, err = c.q.TryReserve(t.Context())
			require.ErrorIs(t, err, mongoq.ErrEmpty, c.name)
		}
	})
}

func TestPushAtATimeIsKeptExactly(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		for _, at := range []time.Time{
			time.Now().Add(time.Hour).Truncate(time.Millisecond),
			time.Now().In(time.FixedZone("far", 13*3600)).Add(90 * time.Minute).Truncate(time.Millisecond),
			time.Date(2099, 12, 31, 23, 59, 59, 999e6, time.UTC),
			time.Date(9999, 12, 31, 23, 59, 59, 999e6, time.UTC),
		} {
			e, err := q.Get(t.Context(), push(t, q, nil, mongoq.At(at)))
			require.NoError(t, err)
			require.True(t, at.Equal(e.When), "%v became %v", at, e.When)
		}
		s, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 4, s.Scheduled)
	})
}

// A part of a millisecond cannot be stored: it is rounded up, since nothing may be delivered early.
func TestPushAtIsNotRoundedDown(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		at := time.Now().Add(time.Hour).Truncate(time.Millisecond).Add(900 * time.Microsecond)
		e, err := q.Get(t.Context(), push(t, q, nil, mongoq.At(at)))
		require.NoError(t, err)
		require.False(t, e.When.Before(at), "asked for %v, due at %v", at, e.When)
		require.WithinDuration(t, at, e.When, time.Millisecond)
	})
}

func TestPushDelayWithoutEndIsNeverDue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{TTL: math.MaxInt64})
		push(t, q, "x", mongoq.Delay(math.MaxInt64))
		require.Equal(t, "1010", sizes(t, q))

		push(t, q, "y")
		r, err := q.TryReserve(t.Context(), mongoq.LeaseFor(math.MaxInt64))
		require.NoError(t, err)
		require.Equal(t, "2011", sizes(t, q))
		require.NoError(t, r.Rollback(t.Context(), errors.New("x"), mongoq.After(math.MaxInt64)))
		require.Equal(t, "2020", sizes(t, q))

		push(t, q, "z")
		r = tryReserve(t, q)
		require.NoError(t, r.Extend(t.Context(), math.MaxInt64))
		require.Equal(t, "3021", sizes(t, q))
		require.NoError(t, r.Release(t.Context(), mongoq.Delay(math.MaxInt64)))
		require.Equal(t, "3030", sizes(t, q))
	})
}

func TestPriorityGoesFirstThenTime(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		past := func(d time.Duration) mongoq.PushOption { return mongoq.Delay(d) }
		type one struct {
			name string
			prio int
			ago  time.Duration
		}
		var want []string
		for _, p := range []one{
			{"2 old", 2, 3 * time.Minute}, {"1 old", 1, time.Minute}, {"4 oldest", 4, time.Hour}, {"3", 3, time.Second},
			{"2 young", 2, time.Minute}, {"1 young", 1, time.Second}, {"1 oldest", 1, time.Hour}, {"4 young", 4, time.Minute},
		} {
			id := push(t, q, p.name, mongoq.Priority(p.prio))
			setDue(t, db, id, -p.ago)
		}
		push(t, q, "urgent, but later", mongoq.Priority(1), past(time.Hour))
		want = []string{"1 oldest", "1 old", "1 young", "2 old", "2 young", "3", "4 oldest", "4 young"}
		require.Equal(t, want, peeked(t, q, 10))
		for _, name := range want[:4] {
			require.Equal(t, name, payloadOf[string](t, &tryReserve(t, q).Envelope))
		}
		rs, err := q.ReserveMany(t.Context(), 10)
		require.NoError(t, err)
		for i, r := range rs {
			require.Equal(t, want[4+i], payloadOf[string](t, &r.Envelope))
		}
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty, "an undue urgent one is not taken")
	})
}

func TestPriorityDefaultsAndIsKept(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} }})
		push(t, q, "x")
		require.Equal(t, 2, tryReserve(t, q).Priority)
		push(t, q, "y", mongoq.Priority(4))
		r := tryReserve(t, q)
		require.NoError(t, r.Rollback(t.Context(), errors.New("x")))
		r = tryReserve(t, q)
		require.Equal(t, 4, r.Priority)
		require.NoError(t, r.MoveToQ(t.Context(), "to"))
		to := newQueue(t, store, "to")
		r = tryReserve(t, to)
		require.Equal(t, 4, r.Priority)
		require.NoError(t, r.MoveToQ(t.Context(), "to", mongoq.Priority(1)))
		require.Equal(t, 1, tryReserve(t, to).Priority)
	})
}

// A push for now is in the order of pushes, also of goroutines that push one after the other.
func TestPushesOfAProcessKeepTheirOrder(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		for i := range 50 {
			push(t, q, i)
		}
		for i := range 50 {
			require.Equal(t, i, payloadOf[int](t, &tryReserve(t, q).Envelope))
		}
	})
}

func TestTTLOfTheCallBeatsTheQueues(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, policy := range []mongoq.ExpirePolicy{mongoq.Discard, mongoq.ToDeadLetter} {
			q := newQueue(t, store, "q", mongoq.QueueConfig{TTL: time.Hour, OnExpire: policy})
			life := func(opts ...mongoq.PushOption) time.Duration {
				t.Helper()
				e, err := q.Get(t.Context(), push(t, q, nil, opts...))
				require.NoError(t, err)
				if policy == mongoq.Discard {
					require.Equal(t, e.Deadline, e.ExpireAt)
				} else {
					require.True(t, e.ExpireAt.IsZero(), "the server must not delete what is to be dead-lettered")
				}
				if e.Deadline.IsZero() {
					return 0
				}
				return e.Deadline.Sub(e.Pushed)
			}
			require.InDelta(t, time.Hour, life(), float64(time.Second))
			require.InDelta(t, time.Minute, life(mongoq.TTL(time.Minute)), float64(time.Second))
			require.Zero(t, life(mongoq.TTL(0)))
		}
	})
}

// busy puts much through a queue: its consumers may remember where its head was, but the order stays.
func busy(t *testing.T, q *mongoq.Queue) {
	t.Helper()
	many := make([]any, 600)
	_, err := q.PushMany(t.Context(), many)
	require.NoError(t, err)
	rs, err := q.ReserveMany(t.Context(), len(many))
	require.NoError(t, err)
	require.Len(t, rs, len(many))
	require.NoError(t, q.CommitMany(t.Context(), rs))
}

func TestBacklogOfALaterPriorityKeepsItsPlaceInABusyQueue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		setDue(t, db, push(t, q, "old 3", mongoq.Priority(3)), -10*time.Second)
		busy(t, q)
		push(t, q, "new 4", mongoq.Priority(4))
		push(t, q, "new 3", mongoq.Priority(3))
		want := []string{"old 3", "new 3", "new 4"}
		require.Equal(t, want, peeked(t, q, 5))
		for _, name := range want {
			require.Equal(t, name, payloadOf[string](t, &tryReserve(t, q).Envelope))
		}
	})
}

// What is given back or sent with a time that has passed is due at once, also in a queue that was just seen empty.
func TestTimeInThePastIsDueAtOnceInABusyQueue(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for name, send := range map[string]func(q *mongoq.Queue, past time.Time) error{
			"released": func(q *mongoq.Queue, past time.Time) error {
				push(t, q, "x")
				return tryReserve(t, q).Release(t.Context(), mongoq.At(past))
			},
			"moved": func(q *mongoq.Queue, past time.Time) error {
				from := newQueue(t, store, "from")
				push(t, from, "x")
				return tryReserve(t, from).MoveToQ(t.Context(), q.Name(), mongoq.At(past))
			},
			"pushed": func(q *mongoq.Queue, past time.Time) error {
				_, err := q.Push(t.Context(), "x", mongoq.At(past))
				return err
			},
		} {
			q := newQueue(t, store, name)
			busy(t, q)
			_, err := q.TryReserve(t.Context())
			require.ErrorIs(t, err, mongoq.ErrEmpty)
			require.NoError(t, send(q, time.Now().Add(-time.Minute)))
			r, err := q.TryReserve(t.Context())
			require.NoError(t, err, name)
			require.Equal(t, "x", payloadOf[string](t, &r.Envelope))
		}
	})
}

// What is wrong deep in a payload that is handed over as BSON is found before it goes to the server with others.
func TestABadPayloadIsRefusedHoweverDeep(t *testing.T) {
	t.Parallel()
	q := newQueue(t, openStore(t, mongotest.Database(t, mongotest.ReplicaSet)), "q")
	nested := func(levels int, inner bson.RawValue) any {
		for range levels {
			raw, err := bson.Marshal(bson.D{{Key: "a", Value: inner}})
			require.NoError(t, err)
			inner = bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: raw}
		}
		return inner
	}
	short := bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: []byte("\x07\x00\x00\x000a\x00")}
	null := bson.RawValue{Type: bson.TypeNull}
	_, err := q.PushMany(t.Context(), []any{"x", nested(3, short), nested(50, null), nested(250, null)})
	var be *mongoq.BatchError
	require.ErrorAs(t, err, &be)
	require.Len(t, be.Failed, 2)
	for i, text := range []string{
		"the payload must be valid BSON: a length or a type in it is wrong", "the payload must be valid BSON: it is nested more than 200 deep",
	} {
		require.Equal(t, 2*i+1, be.Failed[i].Index)
		require.ErrorIs(t, be.Failed[i].Err, mongoq.ErrInvalidOption)
		require.ErrorContains(t, be.Failed[i].Err, text)
	}
	require.Equal(t, "2200", sizes(t, q))
}
