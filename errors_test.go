package mongoq_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestErrorsAreToldApart(t *testing.T) {
	t.Parallel()
	all := []error{
		mongoq.ErrEmpty, mongoq.ErrQueuePaused, mongoq.ErrClosed, mongoq.ErrInTransaction, mongoq.ErrLeaseLost, mongoq.ErrNotFound,
		mongoq.ErrReserved, mongoq.ErrOutcomeUnknown, mongoq.ErrInvalidOption, mongoq.ErrPayloadTooLarge, mongoq.ErrDuplicate,
		mongoq.ErrUnsupportedServer,
	}
	texts := map[string]bool{}
	for i, err := range all {
		require.Regexp(t, "^mongoq: ", err.Error())
		texts[err.Error()] = true
		for k, other := range all {
			require.Equal(t, i == k, errors.Is(err, other))
		}
	}
	require.Len(t, texts, len(all))
}

func TestBatchErrorShowsEachFailure(t *testing.T) {
	t.Parallel()
	cause := errors.New("the cause")
	one := &mongoq.BatchError{Total: 5, Failed: []mongoq.ItemError{{Index: 3, Err: fmt.Errorf("%w: %w", mongoq.ErrOutcomeUnknown, cause)}}}
	require.ErrorIs(t, one, mongoq.ErrOutcomeUnknown)
	require.ErrorIs(t, one, cause)
	require.NotErrorIs(t, one, mongoq.ErrDuplicate)
	require.Equal(t, "mongoq: 1 of 5 failed; [3] mongoq: outcome unknown: the cause", one.Error())
	var typed *typedError
	two := &mongoq.BatchError{Total: 1000}
	for i := range 1000 {
		two.Failed = append(two.Failed, mongoq.ItemError{Index: i, Err: &typedError{i}})
	}
	require.ErrorAs(t, fmt.Errorf("wrapped: %w", two), &typed)
	require.Equal(t, 0, typed.n)
	require.Equal(t, "mongoq: 1000 of 1000 failed; [0] number 0; [1] number 1; [2] number 2; ...", two.Error(), "a long one is cut")
}

type typedError struct{ n int }

func (e *typedError) Error() string { return fmt.Sprint("number ", e.n) }

// A refusal of the server comes to the caller as what the driver made of it.
func TestServersErrorsStayReachable(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		require.NoError(t, db.RunCommand(t.Context(), bson.D{
			{Key: "collMod", Value: "mongoq"}, {Key: "validator", Value: bson.D{{Key: "payload", Value: "good"}}},
		}).Err())
		push(t, q, "good")
		_, err := q.Push(t.Context(), "bad")
		var refused mongo.ServerError
		require.ErrorAs(t, err, &refused)
		require.True(t, refused.HasErrorCode(121))
		require.NotErrorIs(t, err, mongoq.ErrOutcomeUnknown)

		ids, err := q.PushMany(t.Context(), []any{"good", "bad", "good"})
		var be *mongoq.BatchError
		require.ErrorAs(t, err, &be)
		require.Len(t, be.Failed, 1)
		require.Equal(t, 1, be.Failed[0].Index)
		require.ErrorAs(t, be.Failed[0].Err, &refused)
		require.True(t, refused.HasErrorCode(121))
		require.True(t, ids[1].IsZero())
		require.Equal(t, "3300", sizes(t, q))

		r := tryReserve(t, q)
		err = r.Rollback(t.Context(), errors.New("x"), mongoq.Payload("bad"))
		require.ErrorAs(t, err, &refused)
		require.True(t, refused.HasErrorCode(121))
		require.NoError(t, r.Rollback(t.Context(), errors.New("x"), mongoq.After(0)), "it was not settled by that")
	})
}
