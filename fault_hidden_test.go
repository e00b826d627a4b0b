package mongoq_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// What became of a write is not always what its last answer says: the driver sends it again by itself, and others change
// the envelope meanwhile.

// The driver goes on trying until the context ends, and then tells of the last refusal: the push before was done.
func TestAPushThatTheDriverRepeatsUntilItsContextEnds(t *testing.T) {
	t.Parallel()
	lossy := newLossy()
	s := faultyStage(t, mongotest.ReplicaSet, true, options.Client().SetDialer(lossy))
	q := s.queue(t)
	for _, push := range []func(context.Context) error{
		func(ctx context.Context) error { _, err := q.Push(ctx, "x"); return err },
		func(ctx context.Context) error { _, err := q.PushMany(ctx, []any{"x"}); return err },
	} {
		before := storedIn(t, s.db, q.Name())
		drain(s.met)
		lossy.LoseReply("insert", 1)
		heal := mongotest.Fail(t, s.db, mongotest.Skip(1), failing(codeNotPrimary).labelled().on(s.db, "insert"))
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		err := push(ctx)
		cancel()
		require.Positive(t, heal())
		require.Equal(t, before+1, storedIn(t, s.db, q.Name()))
		if err != nil {
			require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown)
		}
	}
}

// Of an operator's verb that is a single write, likewise.
func TestARefusalAfterALostAnswerOfAnOperatorsVerb(t *testing.T) {
	t.Parallel()
	first := faultyStage(t, mongotest.ReplicaSet, true)
	for _, tr := range operatorsVerbs {
		if !slices.Contains([]string{"remove", "pause", "resume", "redrive that rewrites"}, tr.name) {
			continue // of many envelopes: the driver sends it once
		}
		lossy := newLossy()
		s := first.beside(t, true, options.Client().SetDialer(lossy))
		trial := tr.prepare(t, s)
		tr.harmless = false
		u := failing(codeNotPrimary).asElsewhere().afterLostAnswer(t, s, lossy, tr, trial)
		require.Equal(t, isUnknown, u.judge(t), "%s: %v", tr.name, u.call.got)
		u.requireTruth(t)
	}
}

// Others than the next holder leave a trace of their own: a redrive has replaced that of the dead-lettering.
func TestADeadLetteringWhoseAnswerWasLostIsRedriven(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, false)
		q := s.queue(t)
		push(t, q, "x")
		r := tryReserve(t, q)
		held := lossy.HoldReply("update")
		call := begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, r.DeadLetter(ctx, errFailed) })
		awaitHeld(t, held)
		call.cancel()
		_, err := call.ended(t)
		require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown)
		held.Release()

		n, err := q.DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		next := tryReserve(t, q)
		err = r.DeadLetter(t.Context(), errFailed)
		require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown, "it did happen")
		require.NotErrorIs(t, err, mongoq.ErrLeaseLost)
		require.NoError(t, next.Commit(t.Context()))
	})
}

// One of a batch is committed, and pushed anew under its id before anybody looks what became of the batch.
func TestACommitOfABatchIsNotLostByAPushUnderItsID(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, false)
		q := s.queue(t)
		again := mongoq.ID(bson.NewObjectID())
		push(t, q, "y", again)
		push(t, q, "z")
		rs, err := q.ReserveMany(t.Context(), 2)
		require.NoError(t, err)
		require.Len(t, rs, 2)
		y := slices.IndexFunc(rs, func(r *mongoq.Reservation) bool { return r.Payload.StringValue() == "y" })
		steal(t, db, rs[1-y].ID)
		held := lossy.HoldReply("delete")
		call := begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, q.CommitMany(ctx, rs) })
		awaitHeld(t, held)
		push(t, newQueue(t, openStore(t, db), q.Name()), "y", again)
		held.Release()
		_, err = call.ended(t)
		errs := singly(err, 2)
		require.NoError(t, errs[y])
		require.ErrorIs(t, errs[1-y], mongoq.ErrLeaseLost)
	})
}

// requireLate checks that something was said to have come late to a queue, and to be due since then.
func requireLate(t testing.TB, store *mongoq.Store, queue string, since time.Time) {
	t.Helper()
	late := mongoq.TakeLate(store, queue)
	require.False(t, late.IsZero(), "it says nothing")
	require.WithinDuration(t, since, late, 100*time.Millisecond)
}

// What is given back is due since it was due, not since it was given back: who looks begins above what is long over.
func TestWhatIsGivenBackRingsForItsPlace(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	q := newQueue(t, store, "q")
	push(t, q, "x")
	r := tryReserve(t, q)
	require.Eventually(t, func() bool { return time.Since(r.Due) > 200*time.Millisecond }, soon, time.Millisecond)
	mongoq.GiveBack(t.Context(), store, r)
	requireLate(t, store, "q", r.Due)
}

// So it is where the rounds are slow, and what is given back waits for its own.
func TestWhatIsGivenBackLateRingsForItsPlace(t *testing.T) {
	t.Parallel()
	s, lossy := lossyStage(t, mongotest.Database(t, mongotest.ReplicaSet), false)
	q := s.queue(t)
	r := behindSlowRounds(t, s, lossy, q, func(ctx context.Context, r *mongoq.Reservation) error {
		mongoq.GiveBack(ctx, s.store, r)
		return nil
	})
	requireLate(t, s.store, q.Name(), r.Due)
}

// behindSlowRounds does something with a reservation, which stands in line for 300 ms since both flights are held.
func behindSlowRounds(t *testing.T, s *stage, lossy *mongotest.Lossy, q *mongoq.Queue, do func(context.Context, *mongoq.Reservation) error) *mongoq.Reservation {
	t.Helper()
	rs := reserveAll(t, q, 3)
	var held []*mongotest.Held
	for _, r := range rs[1:] { // both flights
		h := lossy.HoldReply("update")
		held = append(held, h)
		begin(t, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, r.Release(ctx, mongoq.Delay(time.Hour))
		})
		awaitHeld(t, h)
	}
	call := begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, do(ctx, rs[0]) })
	awaitLine(t, s.store, 1)
	require.NoError(t, lasting(t.Context(), 300*time.Millisecond))
	mongoq.TakeLate(s.store, q.Name()) // of the signals, which are listened to now
	for _, h := range held {
		h.Release()
	}
	_, err := call.ended(t)
	require.NoError(t, err)
	return rs[0]
}

// What is to start at a time is due then, however long it has stood in line.
func TestWhatStartsAtATimeRingsForIt(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(context.Context, *mongoq.Reservation, time.Time) error{
		"release": func(ctx context.Context, r *mongoq.Reservation, at time.Time) error {
			return r.Release(ctx, mongoq.At(at))
		},
		"move": func(ctx context.Context, r *mongoq.Reservation, at time.Time) error {
			return r.MoveToQ(ctx, r.Q, mongoq.At(at))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, in := range []time.Duration{100 * time.Millisecond, 30 * time.Minute} { // before it is sent, and after
				s, lossy := lossyStage(t, mongotest.Database(t, mongotest.ReplicaSet), false)
				q := s.queue(t)
				var at time.Time
				behindSlowRounds(t, s, lossy, q, func(ctx context.Context, r *mongoq.Reservation) error {
					at = time.Now().Add(in)
					return settle(ctx, r, at)
				})
				require.WithinDuration(t, at, mongoq.Forecast(s.store, q.Name()), 100*time.Millisecond)
				if in < time.Minute {
					requireLate(t, s.store, q.Name(), at)
				}
			}
		})
	}
}

// A lease that is made to end before long has ended by the time of the answer, where that comes late.
func TestAShortenedLeaseRingsForItsEnd(t *testing.T) {
	t.Parallel()
	s, lossy := lossyStage(t, mongotest.Database(t, mongotest.ReplicaSet), false)
	q := s.queue(t)
	push(t, q, "x")
	r := tryReserve(t, q)
	held := lossy.HoldReply("update")
	extended := time.Now()
	call := begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, r.Extend(ctx, time.Millisecond) })
	awaitHeld(t, held)
	_, err := call.ended(t) // it was sent again, after 50 ms
	held.Release()
	require.NoError(t, err)
	requireLate(t, s.store, q.Name(), extended)
}

// A look reads one priority after the other: what the first is due in counts from its own reading.
func TestASlowLookForeseesThePromptTime(t *testing.T) {
	t.Parallel()
	s, lossy := lossyStage(t, mongotest.Database(t, mongotest.ReplicaSet), false)
	q := newQueue(t, s.store, "q", mongoq.QueueConfig{Lease: time.Second, PollInterval: 100 * time.Millisecond}) // a look each 500 ms
	push(t, q, "x", mongoq.Priority(1), mongoq.Delay(time.Hour))
	due := time.Now().Add(time.Hour)
	beginReserve(t, q)
	awaitRest(t, s.store, "q")
	first := lossy.HoldReply("find")
	awaitHeld(t, first)
	others := lossy.HoldReply("find")
	first.Release()
	awaitHeld(t, others)
	require.NoError(t, lasting(t.Context(), 300*time.Millisecond))
	others.Release()
	require.Eventually(t, func() bool { return !mongoq.Forecast(s.store, "q").IsZero() }, soon, time.Millisecond)
	require.WithinDuration(t, due, mongoq.Forecast(s.store, "q"), 150*time.Millisecond)
}

// A count that somebody wrote by hand, though there is none yet, holds up nobody.
func TestACountOfNoDeliveriesIsClaimed(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		pushAll(t, q, ints(6))
		_, err := db.Collection("mongoq").UpdateMany(t.Context(), bson.D{{Key: "payload", Value: bson.D{{Key: "$lt", Value: 3}}}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "deliveries", Value: 0}}}})
		require.NoError(t, err)
		rs, err := q.ReserveMany(t.Context(), 6)
		require.NoError(t, err)
		require.Len(t, rs, 6)
	})
}

// A dead letter's deadline is a fact of the past: a consumer who moves it on does not have it expire at once.
func TestADeadLetterThatIsMovedOnDoesNotExpire(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter})
		id := push(t, q, "x", mongoq.TTL(time.Millisecond))
		require.Eventually(t, func() bool {
			_, err := q.TryReserve(t.Context())
			return errors.Is(err, mongoq.ErrEmpty) && sizes(t, q) == "0000"
		}, soon, time.Millisecond)
		r := tryReserve(t, newQueue(t, store, "q.dead"))
		require.Equal(t, mongoq.DeadExpired, r.Dead.Kind)
		require.NoError(t, r.MoveToQ(t.Context(), "elsewhere"))
		r = tryReserve(t, newQueue(t, store, "elsewhere"))
		require.Equal(t, id, r.ID)
		require.Zero(t, r.Deadline)
	})
}

// Who claims many knows the server's clock within bounds only. What is past its deadline is for the server to say.
func TestWhatMayHaveExpiredIsDeliveredIfItHasNot(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		_, err := q.PushMany(t.Context(), ints(4), mongoq.TTL(time.Minute))
		require.NoError(t, err)
		blurred := openStore(t, db)
		mongoq.Blur(blurred, time.Hour)
		rs, err := newQueue(t, blurred, "q").ReserveMany(t.Context(), 4)
		require.NoError(t, err)
		require.Len(t, rs, 4)
		for _, r := range rs {
			require.NoError(t, r.Commit(t.Context()))
		}
		requireEmpty(t, db)
	})
}
