package mongotest

import (
	"context"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// clientOf is a client that a test may break.
func clientOf(t *testing.T, s *Server, opts ...*options.ClientOptions) *mongo.Client {
	t.Helper()
	return connect(t, s.URI(), opts)
}

func insert(ctx context.Context, c *mongo.Client, doc bson.D) error {
	_, err := c.Database("test").Collection("c").InsertOne(ctx, doc)
	return err
}

func TestStandalone(t *testing.T) {
	t.Parallel()
	s := Private(t, Options{})
	require.Len(t, s.Nodes(), 1)
	require.Equal(t, "mongodb://"+s.Node(0).Addr()+"/", s.URI())

	c := clientOf(t, s)
	require.NoError(t, insert(t.Context(), c, bson.D{{Key: "a", Value: 1}}))
	kind, err := kindOf(t.Context(), s.URI())
	require.NoError(t, err)
	require.Equal(t, Standalone, kind)

	s.Stop()
	s.Stop()
	require.NoDirExists(t, s.dir)
	require.False(t, s.Node(0).proc.alive())
}

func TestReplicaSetOfOne(t *testing.T) {
	t.Parallel()
	s := Private(t, Options{ReplicaSet: 1, TestCommands: true, CacheMB: 300, Args: []string{"--setParameter", "internalQueryMaxPushBytes=1234567"}})
	require.Contains(t, s.URI(), "?replicaSet=")
	require.NotContains(t, s.URI(), "directConnection")

	c := clientOf(t, s)
	session, err := c.StartSession()
	require.NoError(t, err)
	defer session.EndSession(t.Context())
	_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) {
		return nil, insert(ctx, c, bson.D{{Key: "a", Value: 1}})
	})
	require.NoError(t, err, "transactions work")

	var p struct {
		TTL  int  `bson:"ttlMonitorSleepSecs"`
		Test bool `bson:"enableTestCommands"`
		Push int  `bson:"internalQueryMaxPushBytes"`
	}
	require.NoError(t, s.Node(0).admin(t.Context(), bson.D{
		{Key: "getParameter", Value: 1}, {Key: "ttlMonitorSleepSecs", Value: 1},
		{Key: "enableTestCommands", Value: 1}, {Key: "internalQueryMaxPushBytes", Value: 1},
	}, &p))
	require.Equal(t, 1, p.TTL)
	require.True(t, p.Test)
	require.Equal(t, 1234567, p.Push)

	var status struct {
		WiredTiger struct {
			Cache bson.M `bson:"cache"`
		} `bson:"wiredTiger"`
	}
	require.NoError(t, s.Node(0).admin(t.Context(), bson.D{{Key: "serverStatus", Value: 1}}, &status))
	require.EqualValues(t, 300<<20, status.WiredTiger.Cache["maximum bytes configured"])
}

func TestKillAndRestart(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{0, 1} {
		s := Private(t, Options{ReplicaSet: nodes})
		n, c := s.Node(0), clientOf(t, s)
		durable := c.Database("test").Collection("c", options.Collection().SetWriteConcern(writeconcern.Journaled()))
		_, err := durable.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}})
		require.NoError(t, err)
		addr := n.Addr()

		n.Kill()
		n.Kill()
		require.ErrorIs(t, n.Pause(), os.ErrProcessDone)
		require.ErrorIs(t, n.Resume(), os.ErrProcessDone)
		require.ErrorContains(t, s.died(), "signal: killed")

		require.NoError(t, n.Restart(t.Context()))
		require.NoError(t, s.died())
		require.Equal(t, addr, n.Addr())
		count, err := durable.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: 1}})
		require.NoError(t, err)
		require.EqualValues(t, 1, count, "what was journaled is still there")

		require.NoError(t, n.Restart(t.Context()), "of a running node")
		require.NoError(t, insert(t.Context(), c, bson.D{}))
		s.Stop()
	}
}

func TestPause(t *testing.T) {
	t.Parallel()
	s := Private(t, Options{})
	c := clientOf(t, s)
	require.NoError(t, insert(t.Context(), c, bson.D{}))

	require.NoError(t, s.Node(0).Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, insert(ctx, c, bson.D{}), context.DeadlineExceeded)

	require.NoError(t, s.Node(0).Resume())
	require.NoError(t, insert(t.Context(), c, bson.D{}))

	require.NoError(t, s.Node(0).Pause())
	s.Stop() // a paused node can be killed as well
	require.NoDirExists(t, s.dir)
}

func TestFailover(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	s := Private(t, Options{ReplicaSet: 3})
	t.Logf("three nodes after %v", time.Since(begin))
	require.Len(t, strings.Split(s.URI(), ","), 3)

	c := clientOf(t, s, options.Client().SetWriteConcern(writeconcern.Majority()))
	require.NoError(t, insert(t.Context(), c, bson.D{}))
	begin = time.Now()
	s.Node(0).Kill()
	require.Eventually(t, func() bool { return insert(t.Context(), c, bson.D{}) == nil }, 20*time.Second, 10*time.Millisecond)
	t.Logf("a new primary after %v", time.Since(begin))

	begin = time.Now()
	require.NoError(t, s.Node(0).Restart(t.Context()))
	t.Logf("the old one back after %v", time.Since(begin))
	s.Node(1).Kill()
	require.Eventually(t, func() bool { return insert(t.Context(), c, bson.D{}) == nil }, 20*time.Second, 10*time.Millisecond)
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{ReplicaSet: -1}, {ReplicaSet: 8}, {CacheMB: 255}, {CacheMB: -1}} {
		_, err := Start(t.Context(), o)
		require.ErrorContains(t, err, "must be")
	}
}

func TestLog(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var b strings.Builder
	s := Private(t, Options{Log: writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return b.Write(p)
	})})
	require.Contains(t, s.Node(0).Log(), "Waiting for connections")
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(b.String(), "Waiting for connections")
	}, 10*time.Second, 5*time.Millisecond)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// takenPort is a port that somebody listens on.
func takenPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp4", loopback+":0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	n, err := strconv.Atoi(port)
	require.NoError(t, err)
	return n
}

func TestPortTaken(t *testing.T) {
	t.Parallel()
	turns.take(t, privateServer)
	taken := takenPort(t)
	calls := 0
	l := launcher{finder: newFinder(nil), port: func() (int, error) {
		if calls++; calls == 1 {
			return taken, nil
		}
		return freePort()
	}}
	s, err := l.start(t.Context(), Options{})
	require.NoError(t, err)
	defer s.Stop()
	require.NotEqual(t, taken, s.Node(0).port)
	require.Equal(t, 2, calls)

	calls = 0
	l.port = func() (int, error) { calls++; return taken, nil }
	_, err = l.start(t.Context(), Options{})
	require.ErrorIs(t, err, errPortTaken)
	require.ErrorContains(t, err, "Address already in use")
	require.Equal(t, 5, calls)
}
