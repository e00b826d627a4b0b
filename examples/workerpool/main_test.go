package main

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestServe(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var out bytes.Buffer
		require.NoError(t, serve(t.Context(), db, config{runFor: 1500 * time.Millisecond, rate: 200, concurrency: 8}, &out))
		require.Contains(t, out.String(), "stopping:")
		require.Regexp(t, `stopped: [1-9]\d* pushed, [1-9]\d* done, .* 0 are held`, out.String())
	})
}

// What one run leaves, the next one does.
func TestServeAgain(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store, err := mongoq.Open(t.Context(), db, mongoq.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close(context.Background())) })
	q, err := store.Queue("pictures", mongoq.QueueConfig{})
	require.NoError(t, err)
	for n := range 30 {
		_, err := q.Push(t.Context(), Picture{Name: "left", Size: n})
		require.NoError(t, err)
	}
	var out bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, db, config{rate: 1, concurrency: 4}, &out) }()
	require.Eventually(t, func() bool {
		s, err := q.Stats(t.Context())
		return err == nil && s.Total < 20
	}, 20*time.Second, 10*time.Millisecond)
	cancel() // Ctrl-C
	require.NoError(t, <-ended)
	require.Contains(t, out.String(), " 0 are held")
}
