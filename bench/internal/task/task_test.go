package task

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

func TestBatchesCoverAllOnce(t *testing.T) {
	t.Parallel()
	require.Empty(t, batches(0, 10))
	require.Equal(t, [][2]int{{0, 10}, {10, 20}, {20, 25}}, batches(25, 10))
	require.Equal(t, [][2]int{{0, 10}}, batches(10, 10))
}

func TestSharesAddUp(t *testing.T) {
	t.Parallel()
	sum := 0
	for _, s := range shares(1003, make([]*mongoq.Queue, 200)) {
		require.Contains(t, []int{5, 6}, s.jobs)
		sum += s.jobs
	}
	require.Equal(t, 1003, sum)
}

func TestPayloadsAreOfOneSizeAndMayTellATime(t *testing.T) {
	t.Parallel()
	require.Len(t, payload(0), payloadSize)
	require.Len(t, payload(123_456), payloadSize)
	require.NotEqual(t, payload(0), payload(1))
	now := time.Now()
	s := stamped(now)
	require.Len(t, s, payloadSize)
	got, err := readStamp(s)
	require.NoError(t, err)
	require.True(t, got.Equal(now))
	_, err = readStamp("no time")
	require.Error(t, err)
}

func TestALoadDoesEachJobOnce(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[int]int{}
	timings := &child.Timings{}
	done, err := load{workers: 7, jobs: 100, timings: timings}.run(t.Context(), func(_ context.Context, n int) error {
		mu.Lock()
		defer mu.Unlock()
		seen[n]++
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 100, done)
	require.Len(t, seen, 100)
	require.Equal(t, 100, timings.Len())
}

func TestALoadEndsWithItsFirstError(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	done, err := load{workers: 4, jobs: 1 << 40}.run(t.Context(), func(_ context.Context, n int) error {
		if n >= 10 {
			return broken
		}
		return nil
	})
	require.ErrorIs(t, err, broken)
	require.LessOrEqual(t, done, 10)
}

func TestALoadPastItsLimitBeginsNothing(t *testing.T) {
	t.Parallel()
	done, err := load{workers: 4, jobs: 10, limit: time.Second, start: time.Now().Add(-time.Hour)}.run(t.Context(),
		func(context.Context, int) error { return errors.New("begun") })
	require.NoError(t, err)
	require.Zero(t, done)
}

func TestACounterTellsWhenItsGoalIsReached(t *testing.T) {
	t.Parallel()
	c := newCounter(2)
	c.add()
	require.Equal(t, 1, c.count())
	select {
	case <-c.reached:
		t.Fatal("reached too early")
	default:
	}
	c.add()
	<-c.reached
	at := c.last.Load()
	c.add()
	require.Equal(t, 2, c.count(), "what comes after the goal does not count")
	require.Equal(t, at, c.last.Load())
}

func TestAFinishedCopyHasItsOwnIDAndTime(t *testing.T) {
	t.Parallel()
	id, at := bson.NewObjectID(), time.UnixMilli(1_700_000_000_000)
	one := bson.D{
		{Key: "_id", Value: id}, {Key: "q", Value: "jobs"}, {Key: "processed", Value: bson.NewDateTimeFromTime(at)},
		{Key: "payload", Value: "x"},
	}
	two, err := finishedCopy(one, 5)
	require.NoError(t, err)
	require.NotEqual(t, id, two[0].Value)
	require.Equal(t, one[1], two[1])
	require.Equal(t, bson.NewDateTimeFromTime(at.Add(-5*time.Millisecond)), two[2].Value)
	require.Len(t, two[3].Value, payloadSize)
	require.Equal(t, id, one[0].Value, "the original stays as it is")

	_, err = finishedCopy(bson.D{{Key: "processed", Value: nil}}, 1)
	require.Error(t, err)
}

func TestUnknownTasksAreRefused(t *testing.T) {
	t.Parallel()
	_, err := Find(child.Spec{System: "mongoq", Task: "drain"})
	require.NoError(t, err)
	_, err = Find(child.Spec{System: "mongoq", Task: "dance"})
	require.ErrorContains(t, err, "dance")
	_, err = Find(child.Spec{System: "nobody", Task: "drain"})
	require.Error(t, err)
}
