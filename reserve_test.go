package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func payloads[T any](t testing.TB, rs []*mongoq.Reservation) []T {
	t.Helper()
	var all []T
	for _, r := range rs {
		all = append(all, payloadOf[T](t, &r.Envelope))
	}
	return all
}

func TestAReservationHoldsTheEnvelope(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Lease: time.Minute})
		_, err := q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
		id := push(t, q, "x", mongoq.Headers(map[string]string{"k": "v"}), mongoq.Priority(1))
		r := tryReserve(t, q)
		require.Equal(t, id, r.ID)
		require.Equal(t, "q", r.Q)
		require.Equal(t, time.Minute, r.When.Sub(r.Reserved))
		require.Equal(t, 1, r.Priority)
		require.Equal(t, map[string]string{"k": "v"}, r.Headers)
		require.Equal(t, []int{0, 1, 0}, []int{r.Retries, r.Deliveries, r.Moves})
		require.Nil(t, r.Dead)
		require.Equal(t, "1001", sizes(t, q))
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)

		require.NoError(t, r.Commit(t.Context()))
		requireGone(t, store, id)
		require.Equal(t, "0000", sizes(t, q))
	})
}

func TestACommitIntoTheHistoryKeepsTheEnvelope(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		timed := newQueue(t, store, "timed", mongoq.QueueConfig{Retention: time.Hour})
		kept := newQueue(t, store, "kept", mongoq.QueueConfig{Retention: mongoq.KeepForever})
		for _, q := range []*mongoq.Queue{timed, kept} {
			id := push(t, q, "x", mongoq.TTL(10*time.Minute))
			r := tryReserve(t, q)
			require.NoError(t, r.Commit(t.Context(), mongoq.Result(bson.D{{Key: "sum", Value: "$x"}})))
			e, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			require.False(t, e.Processed.Before(r.Reserved))
			if q == timed {
				require.Equal(t, e.Processed.Add(time.Hour), e.ExpireAt)
			} else {
				require.Zero(t, e.ExpireAt)
			}
			var result struct{ Sum string }
			require.NoError(t, e.Result.Unmarshal(&result))
			require.Equal(t, "$x", result.Sum)
			require.Equal(t, "x", payloadOf[string](t, e))
			require.Equal(t, r.Reserved, e.Reserved)
			require.NotNil(t, rawDoc(t, db, id)["lease"], "evidence of who committed")
			require.Equal(t, "0000", sizes(t, q))
			_, err = q.TryReserve(t.Context())
			require.ErrorIs(t, err, mongoq.ErrEmpty)
		}
	})
}

func TestPopEndsTheEnvelope(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		gone := newQueue(t, store, "gone")
		kept := newQueue(t, store, "kept", mongoq.QueueConfig{Retention: time.Hour})
		pops := map[string]func(*mongoq.Queue) (*mongoq.Envelope, error){
			"Pop":    func(q *mongoq.Queue) (*mongoq.Envelope, error) { return q.Pop(t.Context()) },
			"TryPop": func(q *mongoq.Queue) (*mongoq.Envelope, error) { return q.TryPop(t.Context()) },
		}
		for name, pop := range pops {
			for _, q := range []*mongoq.Queue{gone, kept} {
				id := push(t, q, name)
				e, err := pop(q)
				require.NoError(t, err)
				require.Equal(t, id, e.ID)
				require.Equal(t, name, payloadOf[string](t, e))
				require.Equal(t, "0000", sizes(t, q))
				stored, err := store.Get(t.Context(), id)
				if q == gone {
					require.ErrorIs(t, err, mongoq.ErrNotFound)
					continue
				}
				require.NoError(t, err)
				require.False(t, stored.Processed.IsZero())
				require.Equal(t, stored.Processed.Add(time.Hour), stored.ExpireAt)
			}
		}
		_, err := gone.TryPop(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}

func TestReserveManyTakesWhatIsThereInOrder(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
		for i, prio := range []int{3, 1, 2, 4, 2} {
			push(t, q, fmt.Sprint(prio, i), mongoq.Priority(prio))
		}
		push(t, q, "later", mongoq.Delay(time.Hour), mongoq.Priority(1))

		rs, err := q.ReserveMany(t.Context(), 3)
		require.NoError(t, err)
		require.Equal(t, []string{"1 1", "2 2", "2 4"}, payloads[string](t, rs))
		rest, err := q.ReserveMany(t.Context(), 100, mongoq.LeaseFor(5*time.Minute))
		require.NoError(t, err)
		require.Equal(t, []string{"3 0", "4 3"}, payloads[string](t, rest))
		for _, r := range rest {
			require.Equal(t, 5*time.Minute, r.When.Sub(r.Reserved))
			require.Equal(t, 1, r.Deliveries)
		}
		for _, r := range append(rs, rest...) { // each on its own
			require.NoError(t, r.Commit(t.Context()))
		}
		require.Equal(t, "1010", sizes(t, q))

		// It waits for a first, and no longer.
		w := begin(t, func(ctx context.Context) ([]*mongoq.Reservation, error) { return q.ReserveMany(ctx, 100) })
		awaitSleep(t, store, "q", 1)
		push(t, q, "woken")
		require.Equal(t, []string{"woken"}, payloads[string](t, w.result(t)))

		_, err = q.ReserveMany(t.Context(), 0)
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
	})
}

func TestReserveManyTakesMoreThanAStatementDoes(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 1200
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Lease: time.Minute})
		all := make([]any, n)
		want := make([]int, n)
		for i := range all {
			all[i], want[i] = i, i
		}
		_, err := q.PushMany(t.Context(), all)
		require.NoError(t, err)
		rs, err := q.ReserveMany(t.Context(), n)
		require.NoError(t, err)
		require.Len(t, rs, n)
		require.ElementsMatch(t, want, payloads[int](t, rs))
		require.NoError(t, q.CommitMany(t.Context(), rs))
		requireEmpty(t, db)
	})
}

func TestReserveIsRefusedInASession(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q")
		push(t, q, "x")
		session, err := db.Client().StartSession()
		require.NoError(t, err)
		defer session.EndSession(context.Background())
		ctx := mongo.NewSessionContext(t.Context(), session)
		_, err = q.Reserve(ctx)
		require.ErrorIs(t, err, mongoq.ErrInTransaction)
		_, err = q.TryReserve(ctx)
		require.ErrorIs(t, err, mongoq.ErrInTransaction)
		_, err = q.ReserveMany(ctx, 2)
		require.ErrorIs(t, err, mongoq.ErrInTransaction)
		_, err = q.Pop(ctx)
		require.ErrorIs(t, err, mongoq.ErrInTransaction)
		_, err = q.TryPop(ctx)
		require.ErrorIs(t, err, mongoq.ErrInTransaction)
		require.Equal(t, "1100", sizes(t, q))
	})
}

func TestReserveOfAClosedStoreIsRefused(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{PollInterval: time.Minute})
		w := beginReserve(t, q)
		awaitSleep(t, store, "q", 1)
		require.NoError(t, store.Close(t.Context()))
		_, err := w.ended(t)
		require.ErrorIs(t, err, mongoq.ErrClosed)
		_, err = q.Reserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrClosed)
		_, err = q.TryPop(t.Context())
		require.ErrorIs(t, err, mongoq.ErrClosed)
	})
}

func TestRollbackCountsAndWaitsAndTellsWhy(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: policy(0, time.Hour)})
		id := push(t, q, "x", mongoq.Headers(map[string]string{"a": "1", "b": "2"}))
		require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errFailed,
			mongoq.Payload("$y"), mongoq.AddHeaders(map[string]string{"b": "$3"})))
		r := tryReserve(t, q)
		require.Equal(t, id, r.ID)
		require.Equal(t, []int{1, 2, 0}, []int{r.Retries, r.Deliveries, r.Moves})
		require.Equal(t, "$y", payloadOf[string](t, &r.Envelope))
		require.Equal(t, map[string]string{"a": "1", "b": "$3"}, r.Headers)
		require.Len(t, r.Failures, 1)
		require.Equal(t, mongoq.Failure{At: r.Failures[0].At, Retries: 1, Msg: errFailed.Error()}, r.Failures[0])

		require.NoError(t, r.Rollback(t.Context(), errFailed))
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 2, e.Retries)
		require.Equal(t, time.Hour, e.When.Sub(e.Failures[1].At), "as the policy says of the second")
		require.Zero(t, e.Reserved)
		require.Equal(t, "1010", sizes(t, q))
	})
}

func TestReleaseCountsNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		push(t, q, "x")
		require.NoError(t, tryReserve(t, q).Release(t.Context()))
		r := tryReserve(t, q)
		require.Equal(t, []int{0, 2}, []int{r.Retries, r.Deliveries})
		require.Empty(t, r.Failures)
		require.NoError(t, r.Release(t.Context(), mongoq.Delay(time.Hour)))
		require.Equal(t, "1010", sizes(t, q))
	})
}

func TestMovesStartOverAndLeaveATrail(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		queue := func(name string) *mongoq.Queue {
			return newQueue(t, store, name, mongoq.QueueConfig{Retry: retries(5)})
		}
		a, b, c, d := queue("a"), queue("b"), queue("c"), queue("d")
		id := push(t, a, bson.D{{Key: "n", Value: 1}}, mongoq.Headers(map[string]string{"a": "1", "b": "2"}), mongoq.Priority(3))
		require.NoError(t, tryReserve(t, a).Rollback(t.Context(), errFailed))

		steps := []struct {
			from, to *mongoq.Queue
			opts     []mongoq.MoveOption
			payload  any
			headers  map[string]string
		}{
			{a, b, nil, bson.D{{Key: "n", Value: int32(1)}}, map[string]string{"a": "1", "b": "2"}},
			{b, c, []mongoq.MoveOption{mongoq.Payload("$two")}, "$two", map[string]string{"a": "1", "b": "2"}},
			{c, d, []mongoq.MoveOption{mongoq.AddHeaders(map[string]string{"b": "$x", "c": "4"})}, "$two", map[string]string{"a": "1", "b": "$x", "c": "4"}},
		}
		deliveries := 1
		for i, s := range steps {
			r := tryReserve(t, s.from)
			if i > 0 {
				require.Zero(t, r.Retries)
				require.NoError(t, r.Rollback(t.Context(), errFailed))
				r = tryReserve(t, s.from)
				deliveries++
			}
			deliveries++
			require.Equal(t, []int{1, deliveries, i}, []int{r.Retries, r.Deliveries, r.Moves})
			require.NoError(t, r.MoveToQ(t.Context(), s.to.Name(), s.opts...))

			e, err := s.to.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, []int{0, deliveries, i + 1, 3}, []int{e.Retries, e.Deliveries, e.Moves, e.Priority})
			var payload any
			require.NoError(t, e.Decode(&payload))
			require.Equal(t, s.payload, payload)
			require.Equal(t, s.headers, e.Headers)
			require.Len(t, e.Hops, i+1)
			require.Equal(t, s.from.Name(), e.Hops[i].From)
			require.False(t, e.Hops[i].At.Before(r.Reserved))
			require.Equal(t, "0000", sizes(t, s.from))
			require.Equal(t, "1100", sizes(t, s.to))
		}
		r := tryReserve(t, d)
		require.NoError(t, r.MoveToQ(t.Context(), "a", mongoq.Headers(nil), mongoq.Priority(1), mongoq.Delay(time.Hour)))
		e, err := a.Get(t.Context(), id)
		require.NoError(t, err)
		require.Empty(t, e.Headers)
		require.Equal(t, 1, e.Priority)
		require.Equal(t, "1010", sizes(t, a))
	})
}

// Killed between any two steps of a move there is one copy: there is one step.
func TestAMoveIsOneWrite(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		own, s := spied(t, db)
		q := newQueue(t, openStore(t, own), "q")
		id := push(t, q, "x")
		r := tryReserve(t, q)
		s.forget()
		require.NoError(t, r.MoveToQ(t.Context(), "elsewhere", mongoq.Payload("y"), mongoq.AddHeaders(map[string]string{"k": "v"})))
		require.Equal(t, []string{"update"}, s.writes())
		sent := s.last(t, "update")
		require.Equal(t, "majority", sent.Lookup("writeConcern", "w").StringValue())
		statements, err := sent.Lookup("updates").Array().Values()
		require.NoError(t, err)
		require.Len(t, statements, 1)
		require.Equal(t, "elsewhere", rawDoc(t, db, id)["q"])

		// So is a dead letter.
		push(t, q, "y")
		r = tryReserve(t, q)
		s.forget()
		require.NoError(t, r.DeadLetter(t.Context(), errFailed))
		require.Equal(t, []string{"update"}, s.writes())
	})
}

func TestTrailsAreKeptShort(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: retries(100)})
		id := push(t, q, "x")
		for i := range 12 {
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), fmt.Errorf("failure %d", i)))
		}
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 12, e.Retries)
		require.Len(t, e.Failures, 10)
		for i, f := range e.Failures {
			require.Equal(t, fmt.Sprintf("failure %d", i+2), f.Msg)
			require.Equal(t, i+3, f.Retries)
		}

		at := "q"
		for i := range 34 {
			to := fmt.Sprint("q", i)
			require.NoError(t, tryReserve(t, newQueue(t, store, at)).MoveToQ(t.Context(), to))
			at = to
		}
		e, err = store.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, "q33", e.Q)
		require.Equal(t, []int{0, 46, 34}, []int{e.Retries, e.Deliveries, e.Moves})
		require.Len(t, e.Hops, 32)
		for i, h := range e.Hops {
			require.Equal(t, fmt.Sprint("q", i+1), h.From)
		}
		require.Len(t, e.Failures, 10, "a move keeps them")
	})
}

func TestMessagesAreCutBetweenCharacters(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: retries(10)})
		long := errors.New("x" + strings.Repeat("é", 1000)) // its 1024th byte is within a character
		id := push(t, q, "x")
		for i, cause := range []error{errors.New("$short"), long, errors.New("no \xff UTF-8"), nil} {
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), cause))
			e, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			msg := e.Failures[i].Msg
			require.True(t, utf8.ValidString(msg))
			switch {
			case errors.Is(cause, long):
				require.Equal(t, long.Error()[:1023], msg)
			case cause == nil:
				require.Empty(t, msg)
			case i == 0:
				require.Equal(t, "$short", msg)
			}
		}
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), long))
		e, err := store.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, long.Error()[:1023], e.Dead.Msg)
	})
}
