package mongoq

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// A transaction whose commit may not have come to the server is ended there: what it has locked is free at once, not when
// the server ends it by itself.
func TestATransactionThatMayBeOpenIsEnded(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	s, err := Open(t.Context(), db, Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close(context.Background())) })
	locked := bson.D{field("_id", 1)}
	_, err = s.queues.InsertOne(t.Context(), locked)
	require.NoError(t, err)
	touch := op("$set", bson.D{field("touched", true)})

	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(t.Context())
	ended := s.noteTransaction(t.Context(), session)
	require.NoError(t, session.StartTransaction())
	_, err = s.queues.UpdateOne(mongo.NewSessionContext(t.Context(), session), locked, touch)
	require.NoError(t, err)
	notes := func() int64 {
		n, err := s.noted.CountDocuments(t.Context(), bson.D{})
		require.NoError(t, err)
		return n
	}
	require.EqualValues(t, 1, notes())
	ended(context.DeadlineExceeded)
	require.Zero(t, notes())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	res, err := s.queues.UpdateOne(ctx, locked, touch)
	require.NoError(t, err)
	require.EqualValues(t, 1, res.ModifiedCount)
}
