package mongotest

import (
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

func TestEach(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string]Kind{}
	t.Run("group", func(t *testing.T) {
		Each(t, func(t *testing.T, db *mongo.Database) {
			require.NoError(t, insert(t.Context(), db.Client(), bson.D{}))
			var h hello
			require.NoError(t, db.RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&h))
			kind := ReplicaSet
			if h.Set == "" {
				kind = Standalone
			}
			require.True(t, strings.HasSuffix(t.Name(), "/"+kind.String()))
			require.Same(t, Shared(t, kind), db.Client())
			mu.Lock()
			defer mu.Unlock()
			seen[db.Name()] = kind
		})
	})
	require.Len(t, seen, 2)
	for name, kind := range seen {
		names, err := Shared(t, kind).ListDatabaseNames(t.Context(), bson.D{{Key: "name", Value: name}})
		require.NoError(t, err)
		require.Empty(t, names, "it was dropped")
	}
}

func TestDatabaseOptions(t *testing.T) {
	t.Parallel()
	var client *mongo.Client
	t.Run("inner", func(t *testing.T) {
		db := Database(t, Standalone, options.Client().SetAppName("mine"))
		client = db.Client()
		require.NotSame(t, Shared(t, Standalone), client)
		require.NotEqual(t, db.Name(), Database(t, Standalone).Name())
		var h struct {
			Current []struct {
				AppName string `bson:"appName"`
			} `bson:"inprog"`
		}
		cmd := bson.D{{Key: "currentOp", Value: true}, {Key: "command.currentOp", Value: true}, {Key: "appName", Value: "mine"}}
		require.NoError(t, client.Database("admin").RunCommand(t.Context(), cmd).Decode(&h))
		require.Len(t, h.Current, 1)
	})
	require.ErrorIs(t, client.Ping(t.Context(), nil), mongo.ErrClientDisconnected)
}

func TestDatabaseName(t *testing.T) {
	t.Parallel()
	valid := regexp.MustCompile(`^t_[a-z0-9_]*_[0-9a-f]{8}$`)
	for test, want := range map[string]string{
		"TestPush":                           "t_push_",
		"TestPush/With.Dots $and/Ünicode#01": "t_push_withdots_and_nicode01_",
		"BenchmarkX-8":                       "t_benchmarkx8_",
		"Test" + strings.Repeat("x", 200):    "t_" + strings.Repeat("x", 40) + "_",
	} {
		name := databaseName(test)
		require.True(t, strings.HasPrefix(name, want), name)
		require.Regexp(t, valid, name)
		require.LessOrEqual(t, len(name), 63)
	}
	one, other := databaseName("TestX"), databaseName("TestX")
	require.NotEqual(t, one, other)
}
