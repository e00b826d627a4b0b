package mongotest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Database is a fresh database on the server of the given kind that the tests of this
// binary share. It is dropped when the test ends. With opts, which add to the server's
// URI, it comes through a client of its own; else through the shared one.
func Database(t testing.TB, kind Kind, opts ...*options.ClientOptions) *mongo.Database {
	t.Helper()
	s := shares[kind].get(t)
	return freshDatabase(t, s.client, s.uri, opts)
}

// Each runs f as two parallel subtests, "replicaset" and "standalone", each with a fresh
// database on the server of that kind that the tests of this binary share.
func Each(t *testing.T, f func(t *testing.T, db *mongo.Database)) {
	t.Helper()
	for _, kind := range []Kind{ReplicaSet, Standalone} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			f(t, Database(t, kind))
		})
	}
}

// freshDatabase makes a database that is dropped through keeper, whose commands nobody
// makes fail.
func freshDatabase(t testing.TB, keeper *mongo.Client, uri string, opts []*options.ClientOptions) *mongo.Database {
	t.Helper()
	name := databaseName(t.Name())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := keeper.Database(name).Drop(ctx); err != nil {
			t.Logf("dropping database %s: %v", name, err)
		}
	})
	client := keeper
	if len(opts) > 0 {
		client = connect(t, uri, opts)
	}
	return client.Database(name)
}

// connect makes a client that is disconnected when the test ends.
func connect(t testing.TB, uri string, opts []*options.ClientOptions) *mongo.Client {
	t.Helper()
	all := append([]*options.ClientOptions{options.Client().ApplyURI(uri)}, opts...)
	client, err := mongo.Connect(all...)
	if err != nil {
		t.Fatalf("client: %v", err)
	}
	t.Cleanup(func() { disconnect(client) })
	return client
}

// databaseName is unique, tells which test it is of, and keeps to what MongoDB allows:
// 63 bytes, few punctuation marks, and no two names that differ in case only.
func databaseName(test string) string {
	keep := func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r == '/' || r == '_' || r == ' ':
			return '_'
		}
		return -1
	}
	name := strings.Map(keep, strings.ToLower(strings.TrimPrefix(test, "Test")))
	return fmt.Sprintf("t_%s_%08x", name[:min(len(name), 40)], rand.Uint32())
}
