package mongotest

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

func TestSharedUsesTheGivenServerForItsKindOnly(t *testing.T) {
	t.Parallel()
	given := URI(t, Standalone)

	same := &share{kind: Standalone}
	require.NoError(t, same.begin(t.Context(), given))
	defer same.shutdown()
	require.Nil(t, same.server)
	require.Equal(t, given, same.uri)
	require.NoError(t, same.client.Ping(t.Context(), nil))

	turns.take(t, privateServer)
	other := &share{kind: ReplicaSet}
	require.NoError(t, other.begin(t.Context(), given))
	defer other.shutdown()
	require.NotNil(t, other.server, "the given server is of another kind")

	own := &share{kind: Standalone, own: true}
	require.NoError(t, own.begin(t.Context(), given))
	require.NotNil(t, own.server, "commands of the given server must not fail")
	own.shutdown()
	require.Nil(t, own.server)
	require.Nil(t, own.client)
}

func TestGivenServerCannotBeUsed(t *testing.T) {
	t.Parallel()
	s := &share{kind: Standalone}
	require.ErrorContains(t, s.begin(t.Context(), "http://x"), "MONGODB_URI")

	gone := Private(t, Options{})
	uri := gone.URI() + "?serverSelectionTimeoutMS=50"
	gone.Stop()
	require.ErrorContains(t, s.begin(t.Context(), uri), "MONGODB_URI names a server that cannot be used")
	_, _, err := connectTo(t.Context(), uri, nil)
	require.ErrorContains(t, err, "MONGODB_URI names a server that cannot be used")
}

// failing records what a helper would do to a test.
type failing struct {
	testing.TB
	text string
}

func (f *failing) Fatal(args ...any) { f.Fatalf("%v", args...) }

func (f *failing) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// failure is what f fails its test with, or "".
func failure(t *testing.T, f func(testing.TB)) string {
	t.Helper()
	tb := &failing{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(tb)
	}()
	<-done
	return tb.text
}

func TestSharedServerDied(t *testing.T) {
	t.Parallel()
	turns.take(t, privateServer)
	s := &share{kind: Standalone, own: true}
	defer s.shutdown()
	require.Empty(t, failure(t, func(tb testing.TB) { s.get(tb) }))
	s.server.Node(0).Kill()
	require.Contains(t, failure(t, func(tb testing.TB) { s.get(tb) }), "the shared standalone server died")
}

func TestNoSharedServer(t *testing.T) {
	t.Parallel()
	s := &share{kind: ReplicaSet, begun: true, err: errNoPip}
	require.Equal(t, "no replicaset server: pip is missing", failure(t, func(tb testing.TB) { s.get(tb) }))
}

func TestConnect(t *testing.T) {
	t.Parallel()
	turns.take(t, privateServer)
	var told []string
	client, stop, err := connectTo(t.Context(), "", []func(string){nil, func(s string) { told = append(told, s) }})
	require.NoError(t, err)
	require.Contains(t, told, "starting mongod")
	var h hello
	require.NoError(t, client.Database("x").RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&h))
	require.True(t, h.Primary)
	require.NotEmpty(t, h.Set)
	stop()
	require.ErrorIs(t, client.Ping(t.Context(), nil), mongo.ErrClientDisconnected)

	given := URI(t, ReplicaSet)
	client, stop, err = connectTo(t.Context(), given, nil)
	require.NoError(t, err)
	require.NoError(t, client.Ping(t.Context(), nil))
	stop()
	other, err := mongo.Connect(options.Client().ApplyURI(given))
	require.NoError(t, err)
	defer disconnect(other)
	require.NoError(t, other.Ping(t.Context(), nil), "it was not ours to stop")
}
