package mongoq_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// The way of an envelope: stage after stage, each entered when the one before was left.
func TestPipelineTrace(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "a", Handler: forward, Next: "b"},
			&mongoq.Stage{Name: "b", Handler: forward, Next: "c"},
			&mongoq.Stage{Name: "c", Handler: forward, Queue: mongoq.QueueConfig{Retention: mongoq.KeepForever}})
		id, err := p.Push(t.Context(), "x")
		require.NoError(t, err)
		tr, err := p.Trace(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, mongoq.TraceWaiting, tr.State)
		require.Len(t, tr.Steps, 1)
		runPipeline(t, p)
		require.Eventually(t, func() bool {
			tr, err = p.Trace(t.Context(), id)
			return err == nil && tr.State == mongoq.TraceDone
		}, late, 5*time.Millisecond)
		require.Len(t, tr.Steps, 3)
		e, err := store.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, e.Pushed, tr.Steps[0].In)
		require.Equal(t, e.Processed, tr.Steps[2].Out)
		for i, name := range []string{"a", "b", "c"} {
			require.Equal(t, name, tr.Steps[i].Stage)
			require.False(t, tr.Steps[i].In.After(tr.Steps[i].Out))
			if i > 0 {
				require.Equal(t, tr.Steps[i-1].Out, tr.Steps[i].In)
			}
		}
		require.Equal(t, 4, strings.Count(tr.String(), "\n"))
		_, err = p.Trace(t.Context(), bson.NewObjectID())
		require.ErrorIs(t, err, mongoq.ErrNotFound)
	})
}

// The parts of a fork are followed while they are under way, and known after they were joined.
func TestPipelineTraceFollowsParts(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	gate := make(chan struct{})
	stages := joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
		if name == "b" {
			<-gate
		}
		return mongoq.Forward(mongoq.Payload(name)), nil
	})
	stages[5].Queue.Retention = mongoq.KeepForever
	p := newPipeline(t, store, stages...)
	id, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, p)
	var tr *mongoq.Trace
	state := func(branch string) mongoq.TraceState {
		for _, part := range tr.Parts {
			if part.Steps[0].Stage == branch {
				return part.State
			}
		}
		return ""
	}
	look := func() bool {
		tr, err = p.Trace(t.Context(), id)
		return err == nil
	}
	open := func() { close(gate) }
	if !eventually(func() bool { return look() && state("a") == mongoq.TraceArrived && state("b") == mongoq.TraceWorking }) {
		open()
		require.Fail(t, "parts", "%v %v", tr, err)
	}
	require.Equal(t, mongoq.TraceGathering, tr.State)
	require.Equal(t, "join", tr.Steps[1].Stage)
	open()
	require.Eventually(t, func() bool { return look() && tr.State == mongoq.TraceDone }, late, 5*time.Millisecond)
	require.Equal(t, []string{"split", "join", "end"}, []string{tr.Steps[0].Stage, tr.Steps[1].Stage, tr.Steps[2].Stage})
	require.Len(t, tr.Parts, 3)
	for i, branch := range []string{"a", "b", "c"} {
		part := tr.Parts[i]
		require.Equal(t, mongoq.TraceArrived, part.State)
		require.Len(t, part.Steps, 1)
		require.Equal(t, branch, part.Steps[0].Stage)
		require.False(t, part.Steps[0].In.After(tr.Steps[1].Out))
		require.False(t, part.Steps[0].Out.Before(part.Steps[0].In))
	}
}

// A fork without a join is known by its parts.
func TestPipelineTraceOfAFork(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	p := newPipeline(t, openStore(t, db),
		&mongoq.Stage{Name: "a", Handler: forward, Next: "b"},
		&mongoq.Stage{Name: "b", Handler: forward, Fork: []string{"c", "d"}},
		&mongoq.Stage{Name: "c", Handler: forward}, &mongoq.Stage{Name: "d", Handler: forward})
	id, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, p, "a", "b")
	var tr *mongoq.Trace
	require.Eventually(t, func() bool {
		tr, err = p.Trace(t.Context(), id)
		return err == nil && tr.State == mongoq.TraceForked
	}, late, 5*time.Millisecond)
	require.Equal(t, []string{"a", "b"}, []string{tr.Steps[0].Stage, tr.Steps[1].Stage})
	require.Len(t, tr.Parts, 2)
	require.Equal(t, "c", tr.Parts[0].Steps[0].Stage)
	require.Equal(t, mongoq.TraceWaiting, tr.Parts[1].State)
}

// eventually is require.Eventually for those who have something to do when it fails.
func eventually(cond func() bool) bool {
	deadline := time.NewTimer(late)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-deadline.C:
			return false
		case <-tick.C:
		}
	}
	return true
}

// W3C trace context: the trace goes on, and each hop has a span of its own.
func TestPipelineCarriesTraceContext(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	seen := make(chan map[string]string, 16)
	look := func(route mongoq.Route) mongoq.StageHandler {
		return func(_ context.Context, r *mongoq.Reservation) (mongoq.Route, error) {
			seen <- r.Headers
			return route, nil
		}
	}
	const own = "00-4bf92f3577b34da6a3ce929d0e0e4736-00000000000000ab-01"
	p := newPipeline(t, openStore(t, db),
		&mongoq.Stage{Name: "plain", Handler: look(mongoq.Forward()), Next: "replaced"},
		&mongoq.Stage{Name: "replaced", Handler: look(mongoq.Forward(mongoq.Headers(map[string]string{"x": "y"}))), Next: "own"},
		&mongoq.Stage{Name: "own", Handler: look(mongoq.Forward(mongoq.AddHeaders(map[string]string{"traceparent": own}))), Next: "fork"},
		&mongoq.Stage{Name: "fork", Handler: look(mongoq.Forward()), Fork: []string{"c", "d"}},
		&mongoq.Stage{Name: "c", Handler: look(mongoq.Done())}, &mongoq.Stage{Name: "d", Handler: look(mongoq.Done())})
	runPipeline(t, p)
	push := func(headers map[string]string) (all []map[string]string) {
		_, err := p.Push(t.Context(), "x", mongoq.Headers(headers))
		require.NoError(t, err)
		for range 6 {
			all = append(all, await(t, seen, "a stage is missing"))
		}
		return all
	}
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-"
	got := push(map[string]string{"traceparent": trace + "00f067aa0ba902b7-01", "tracestate": "a=b", "h": "1"})
	spans := map[string]bool{}
	for i, h := range got {
		require.True(t, strings.HasPrefix(h["traceparent"], trace) && strings.HasSuffix(h["traceparent"], "-01"), h["traceparent"])
		require.Len(t, h["traceparent"], 55)
		require.Equal(t, "a=b", h["tracestate"], i)
		spans[h["traceparent"]] = true
	}
	require.Len(t, spans, 6, "each hop has its own")
	require.Equal(t, own, got[3]["traceparent"], "what a handler sets stays")
	require.Equal(t, "1", got[1]["h"])
	require.NotContains(t, got[2], "h")

	for _, h := range push(map[string]string{"traceparent": "nonsense"})[:3] {
		require.Equal(t, "nonsense", h["traceparent"], "what is no trace context is a header like any other")
	}
	for _, h := range push(map[string]string{"h": "1"})[:3] {
		require.NotContains(t, h, "traceparent")
	}
	later := push(map[string]string{"traceparent": "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"})
	require.True(t, strings.HasPrefix(later[1]["traceparent"], trace), later[1]["traceparent"])
	require.Len(t, later[1]["traceparent"], 55)
}
