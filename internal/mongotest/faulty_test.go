package mongotest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

func update(t *testing.T, db *mongo.Database) error {
	t.Helper()
	_, err := db.Collection("c").UpdateOne(t.Context(), bson.D{{Key: "a", Value: 1}}, bson.D{{Key: "$set", Value: bson.D{{Key: "b", Value: 1}}}})
	return err
}

var updatesConflict = bson.D{
	{Key: "failCommands", Value: bson.A{"update"}},
	{Key: "errorCode", Value: 112},
}

func TestFail(t *testing.T) {
	t.Parallel()
	for _, kind := range []Kind{ReplicaSet, Standalone} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			db := Faulty(t, kind)
			require.NoError(t, update(t, db))

			heal := Fail(t, db, Times(2), updatesConflict)
			var failed mongo.CommandError
			require.ErrorAs(t, update(t, db), &failed)
			require.EqualValues(t, 112, failed.Code)
			require.NoError(t, insert(t.Context(), db.Client(), bson.D{}), "another command")
			require.Error(t, update(t, db))
			require.NoError(t, update(t, db))
			require.Equal(t, 2, heal())
			require.Equal(t, 2, heal())

			heal = Fail(t, db, Skip(1), updatesConflict)
			require.NoError(t, update(t, db))
			require.Error(t, update(t, db))
			require.Equal(t, 1, heal())
			require.NoError(t, update(t, db))

			Fail(t, db, Always, updatesConflict)
			require.Error(t, update(t, db))
			other := Faulty(t, kind)
			require.NotSame(t, db.Client(), other.Client())
			require.NoError(t, update(t, other), "another client")
			require.Contains(t, failure(t, func(tb testing.TB) { Fail(tb, other, Always, updatesConflict) }), "only one fail point")
			heal = Fail(t, db, Always, bson.D{{Key: "failCommands", Value: bson.A{"delete"}}, {Key: "closeConnection", Value: true}})
			require.NoError(t, update(t, db), "the earlier fail point was replaced")
			heal()
			Fail(t, other, Always, updatesConflict)
			require.Error(t, update(t, other))
		})
	}
	t.Run("not faulty", func(t *testing.T) {
		t.Parallel()
		db := Database(t, Standalone)
		require.Contains(t, failure(t, func(tb testing.TB) { Fail(tb, db, Always, updatesConflict) }), "not one that Faulty gave")
	})
}

// What a test forgets to heal does not reach the next.
func TestFailEndsWithTheTest(t *testing.T) {
	t.Parallel()
	var db *mongo.Database
	t.Run("first", func(t *testing.T) {
		db = Faulty(t, Standalone)
		Fail(t, db, Always, bson.D{{Key: "failCommands", Value: bson.A{"ping", "dropDatabase"}}, {Key: "errorCode", Value: 1}})
		require.Error(t, db.Client().Ping(t.Context(), nil))
	})
	names, err := faultyShares[Standalone].client.ListDatabaseNames(t.Context(), bson.D{{Key: "name", Value: db.Name()}})
	require.NoError(t, err)
	require.Empty(t, names)
	faultyMu.Lock()
	defer faultyMu.Unlock()
	require.NotContains(t, faultyClients, db.Client())
}

// The error that the server answers when it shuts down makes the driver look for another
// primary. That must not take the ten seconds between the driver's heartbeats.
func TestFaultyRecoversFromShutdownError(t *testing.T) {
	t.Parallel()
	db := Faulty(t, ReplicaSet)
	require.NoError(t, update(t, db))
	begin := time.Now()
	heal := Fail(t, db, Times(1), bson.D{{Key: "failCommands", Value: bson.A{"update"}}, {Key: "errorCode", Value: 91}})
	require.NoError(t, update(t, db), "the driver retries it")
	require.Equal(t, 1, heal())
	require.Less(t, time.Since(begin), 5*time.Second)
}
