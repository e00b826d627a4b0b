package mongotest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// through is a database over a lossy network, and the same one over a good network.
func through(t *testing.T, kind Kind, l *Lossy, opts ...*options.ClientOptions) (lossy, good *mongo.Collection) {
	t.Helper()
	db := Database(t, kind, append(opts, options.Client().SetDialer(l))...)
	return db.Collection("c"), Shared(t, kind).Database(db.Name()).Collection("c")
}

func count(t *testing.T, c *mongo.Collection) int {
	t.Helper()
	n, err := c.CountDocuments(t.Context(), bson.D{})
	require.NoError(t, err)
	return int(n)
}

func TestLose(t *testing.T) {
	t.Parallel()
	noRetry := options.Client().SetRetryWrites(false)
	type planner func(l *Lossy, n int)
	reply := func(l *Lossy, n int) { l.LoseReply("insert", n) }
	request := func(l *Lossy, n int) { l.LoseRequest("insert", n) }
	for name, c := range map[string]struct {
		kind  Kind
		opts  []*options.ClientOptions
		plan  planner
		times int
		fails bool
		docs  int
	}{
		"reply, standalone":                       {Standalone, nil, reply, 1, true, 1},
		"request, standalone":                     {Standalone, nil, request, 1, true, 0},
		"reply, no retry":                         {ReplicaSet, []*options.ClientOptions{noRetry}, reply, 1, true, 1},
		"request, no retry":                       {ReplicaSet, []*options.ClientOptions{noRetry}, request, 1, true, 0},
		"reply, the driver retries":               {ReplicaSet, nil, reply, 1, false, 1},
		"request, the driver retries":             {ReplicaSet, nil, request, 1, false, 1},
		"reply, and that of the driver's retry":   {ReplicaSet, nil, reply, 2, true, 1},
		"request, and that of the driver's retry": {ReplicaSet, nil, request, 2, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := NewLossy()
			lossy, good := through(t, c.kind, l, c.opts...)
			require.NoError(t, lossy.Database().Client().Ping(t.Context(), nil))
			c.plan(l, c.times)
			require.Equal(t, c.times, l.Left("insert"))
			require.Zero(t, count(t, lossy), "another command passes")

			_, err := lossy.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}})
			require.Zero(t, l.Left("insert"))
			if c.fails {
				require.True(t, mongo.IsNetworkError(err), "%v", err)
				require.False(t, mongo.IsTimeout(err))
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, c.docs, count(t, good))
			_, err = lossy.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 2}})
			require.NoError(t, err, "the network is good again")
		})
	}
}

func TestLoseReplyOfCommit(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	lossy, good := through(t, ReplicaSet, l)
	require.NoError(t, good.Database().CreateCollection(t.Context(), "c"))
	session, err := lossy.Database().Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(context.Background())
	l.LoseReply("commitTransaction", 1)
	_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) {
		return lossy.InsertOne(ctx, bson.D{})
	})
	require.NoError(t, err)
	require.Zero(t, l.Left("commitTransaction"))
	require.Equal(t, 1, count(t, good))
}

func TestFaultsComeInOrder(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	lossy, good := through(t, Standalone, l)
	l.LoseRequest("insert", 1)
	l.LoseReply("insert", 1)
	for range 2 {
		_, err := lossy.InsertOne(t.Context(), bson.D{})
		require.True(t, mongo.IsNetworkError(err))
	}
	require.Equal(t, 1, count(t, good))
}

func TestHoldReply(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	lossy, good := through(t, Standalone, l)
	held := l.HoldReply("insert")
	defer held.Release()
	done := make(chan error, 1)
	go func() {
		_, err := lossy.InsertOne(t.Context(), bson.D{})
		done <- err
	}()
	<-held.Reached()
	require.Equal(t, 1, count(t, good), "the server has run it")
	require.Empty(t, done)
	held.Release()
	held.Release()
	require.NoError(t, <-done)

	held = l.HoldReply("insert")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := lossy.InsertOne(ctx, bson.D{})
		done <- err
	}()
	<-held.Reached()
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	held.Release()
	require.Equal(t, 2, count(t, good))
}

// The attempt of a client that has given up runs all the same, later.
func TestHoldRequest(t *testing.T) {
	t.Parallel()
	for _, kind := range []Kind{ReplicaSet, Standalone} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			l := NewLossy()
			lossy, good := through(t, kind, l)
			held := l.HoldRequest("update")
			defer held.Release()
			_, err := good.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}})
			require.NoError(t, err)

			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-held.Reached()
				cancel()
			}()
			_, err = lossy.UpdateOne(ctx, bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "late", Value: true}}}})
			require.ErrorIs(t, err, context.Canceled)
			disconnect(lossy.Database().Client())
			late := func() bool {
				err := good.FindOne(t.Context(), bson.D{{Key: "late", Value: true}}).Err()
				require.True(t, err == nil || errors.Is(err, mongo.ErrNoDocuments), "%v", err)
				return err == nil
			}
			require.False(t, late())
			held.Release()
			require.True(t, late())
		})
	}
}

func TestReleaseBeforeItIsReached(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	lossy, good := through(t, Standalone, l)
	l.HoldRequest("insert").Release()
	l.HoldReply("insert").Release()
	for range 2 {
		_, err := lossy.InsertOne(t.Context(), bson.D{})
		require.NoError(t, err)
	}
	require.Equal(t, 2, count(t, good))
}

func TestLossyUnderLoad(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	lossy, good := through(t, Standalone, l)
	const workers, each, lost = 16, 20, 10
	l.LoseReply("insert", lost)
	l.LoseRequest("insert", lost)
	var wg sync.WaitGroup
	var mu sync.Mutex
	failed := 0
	for range workers {
		wg.Go(func() {
			for range each {
				if _, err := lossy.InsertOne(context.Background(), bson.D{}); err != nil {
					mu.Lock()
					failed++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, l.Left("insert"))
	// A connection that breaks may take others of the pool with it before they were used.
	require.GreaterOrEqual(t, failed, 2*lost)
	require.GreaterOrEqual(t, count(t, good), workers*each-failed+lost)
	require.LessOrEqual(t, count(t, good), workers*each-lost)
}

func TestLossyEndsWithItsClient(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	client, err := mongo.Connect(options.Client().ApplyURI(URI(t, ReplicaSet)).SetDialer(l))
	require.NoError(t, err)
	l.LoseReply("ping", 1)
	require.True(t, mongo.IsNetworkError(client.Ping(t.Context(), nil)))
	require.NoError(t, client.Disconnect(t.Context()))
	ended := make(chan struct{})
	go func() {
		l.links.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		require.Fail(t, "goroutines are left")
	}
}

func TestLossyMisuse(t *testing.T) {
	t.Parallel()
	l := NewLossy()
	require.PanicsWithValue(t, `mongotest: the command "hello" can't be lost`, func() { l.LoseReply("hello", 1) })
	require.Panics(t, func() { l.LoseRequest("", 1) })
	require.Panics(t, func() { l.LoseRequest("insert", 0) })
	_, err := l.DialContext(t.Context(), "tcp", "no address")
	require.Error(t, err)
}
