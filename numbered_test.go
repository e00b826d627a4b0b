package mongoq_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Each insert of many goes out with one number, higher than those before in its session; to a standalone server, with none.
func TestInsertsOfManyHaveNumbers(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var mu sync.Mutex
		last := map[string]int64{}
		commands := 0
		monitor := &event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
			mu.Lock()
			defer mu.Unlock()
			if e.CommandName != "insert" || e.Command.Lookup("insert").StringValue() != "mongoq" {
				return
			}
			commands++
			fields := map[string]int{}
			elements, err := e.Command.Elements()
			require.NoError(t, err)
			for _, el := range elements {
				fields[el.Key()]++
			}
			require.Equal(t, 1, fields["lsid"])
			if kindOf(t, db) == mongotest.Standalone {
				require.Zero(t, fields["txnNumber"])
				return
			}
			require.Equal(t, 1, fields["txnNumber"])
			session, number := e.Command.Lookup("lsid").String(), e.Command.Lookup("txnNumber").Int64()
			require.Greater(t, number, last[session])
			last[session] = number
		}}
		store := openStore(t, anotherClient(t, db, options.Client().SetMonitor(monitor)))
		q := newQueue(t, store, "q")
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for range 20 {
					_, err := q.PushMany(t.Context(), ints(3))
					require.NoError(t, err)
				}
			})
		}
		all.Wait()
		require.Equal(t, 240, storedIn(t, db, "q"))
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, 80, commands)
		require.LessOrEqual(t, len(last), 4, "a session is used again")
	})
}

// An insert of many is done, its answer lost, and its work done and deleted: a refusal of the next attempt says nothing of
// that, and nothing is inserted again.
func TestARefusedRepeatOfAnInsertThatIsWorkedOff(t *testing.T) {
	t.Parallel()
	lossy := newLossy()
	s := faultyStage(t, mongotest.ReplicaSet, true, options.Client().SetDialer(lossy))
	q := s.queue(t)
	elsewhere := newQueue(t, s.another(t).store, q.Name())
	lossy.LoseReply("insert", 1)
	second := lossy.HoldRequest("insert")
	call := begin(t, func(ctx context.Context) (struct{}, error) {
		_, err := q.PushMany(ctx, []any{1, mongoq.With(2, mongoq.ID(bson.NewObjectID()))})
		return struct{}{}, err
	})
	awaitHeld(t, second)
	rs, err := elsewhere.ReserveMany(t.Context(), 2)
	require.NoError(t, err)
	require.Len(t, rs, 2)
	for _, r := range rs {
		require.NoError(t, r.Commit(t.Context()))
	}
	heal := mongotest.Fail(t, s.db, mongotest.Times(1), failing(codeUnauthorized).on(s.db, "insert"))
	second.Release()
	_, err = call.ended(t)
	require.Equal(t, 1, heal())
	for _, err := range singly(err, 2) {
		require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown)
		var ce mongo.CommandError
		require.ErrorAs(t, err, &ce, "the refusal is told, too")
	}
	require.Zero(t, storedIn(t, s.db, q.Name()))
}

// The server forgets the sessions when a store is closed.
func TestClosingAStoreEndsItsSessions(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	ended := 0
	own := anotherClient(t, db, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "endSessions" && e.DatabaseName == db.Name() {
			ended++
		}
	}}))
	store, err := mongoq.Open(t.Context(), own, mongoq.Config{})
	require.NoError(t, err)
	_, err = newQueue(t, store, "q").PushMany(t.Context(), ints(3))
	require.NoError(t, err)
	require.NoError(t, store.Close(t.Context()))
	require.Equal(t, 1, ended)
}
