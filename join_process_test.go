package mongoq_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// joinsPipeline forks each envelope to three stages, one of which goes through a stage more, and joins them. What comes
// out at the end stays in the history.
func joinsPipeline(t testing.TB, db *mongo.Database, lease time.Duration) *mongoq.Pipeline {
	t.Helper()
	q := mongoq.QueueConfig{Lease: lease, Retry: retries(1000)}
	part := func(name, next string, sign int) *mongoq.Stage {
		return &mongoq.Stage{Name: name, Next: next, Queue: q,
			Handler: mongoq.Transform(func(_ context.Context, i int) (int, error) { return sign * i, nil })}
	}
	kept := q
	kept.Retention = mongoq.KeepForever
	return newPipeline(t, openStore(t, db),
		&mongoq.Stage{Name: "split", Handler: forward, Fork: []string{"a", "b", "c"}, Queue: q},
		part("a", "join", 1), part("b", "join", 1), part("c", "d", 1), part("d", "join", 1),
		&mongoq.Stage{Name: "join", Join: &mongoq.Join{Of: "split"}, Next: "end", Queue: q,
			Handler: mongoq.Merge(func(_ context.Context, whole int, parts *mongoq.Joined) ([]int, error) {
				all := []int{whole}
				for i := range parts.Parts {
					var n int
					if err := parts.Parts[i].Decode(&n); err != nil {
						return nil, err
					}
					all = append(all, n)
				}
				return all, nil
			})},
		&mongoq.Stage{Name: "end", Handler: mongoq.Sink(func(context.Context, []int) error { return nil }), Queue: kept},
	)
}

func childJoins(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Disconnect(context.Background())) })
	p := joinsPipeline(t, client.Database(spec.DB), spec.Lease)
	say(childSays{What: "runs"})
	require.NoError(t, p.Run(ctx))
}

// 1,000 envelopes are forked to three parts and joined by processes that are killed all the time: each comes out once,
// with all its parts, and nothing else is left.
func TestForkAndJoinThoughWorkersAreKilled(t *testing.T) {
	t.Parallel()
	const n, lease = 1000, 5 * time.Second
	db := mongotest.Database(t, mongotest.ReplicaSet)
	p := joinsPipeline(t, db, lease)
	spec := childSpec{Role: "joins", Lease: lease}
	_, err := p.PushMany(t.Context(), ints(n))
	require.NoError(t, err)
	processed := func() int64 {
		n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "processed", Value: bson.D{{Key: "$type", Value: "date"}}}})
		require.NoError(t, err)
		return n
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var kills atomic.Int64
	var killing sync.WaitGroup
	for range 2 {
		killing.Go(func() {
			for ctx.Err() == nil && kills.Load() < 12 {
				c := spawn(t, db, spec)
				c.hears(t, "runs", 1)
				_ = lasting(ctx, time.Duration(100+rand.IntN(900))*time.Millisecond)
				c.signal(syscall.SIGKILL)
				<-c.ended
				kills.Add(1)
			}
		})
	}
	killing.Wait()
	done := processed()
	last := spawn(t, db, spec)
	require.Eventually(t, func() bool { return docs(t, db) == n && processed() == n }, 12*late, 50*time.Millisecond)
	last.ends(t)
	t.Logf("%d processes were killed, with %d of %d done", kills.Load(), done, n)

	seen := map[int]bool{}
	for e, err := range stageQueue(t, p, "end").History().List(t.Context()) {
		require.NoError(t, err)
		all := payloadOf[[]int](t, e)
		i := all[0]
		require.False(t, seen[i], "%d came out twice", i)
		seen[i] = true
		require.Equal(t, fmt.Sprint([]int{i, i, i, i}), fmt.Sprint(all))
	}
	require.Len(t, seen, n)
}
