package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// A fork without a join: a copy for each branch, with what is its own, and the original is gone.
func TestForkMakesACopyForEachBranch(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	seen := make(chan *mongoq.Envelope, 3)
	end := func(name string) *mongoq.Stage {
		return &mongoq.Stage{Name: name, Handler: func(_ context.Context, r *mongoq.Reservation) (mongoq.Route, error) {
			seen <- &r.Envelope
			return mongoq.Done(), nil
		}}
	}
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "split", Fork: []string{"a", "b", "c"}, Handler: func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
			return mongoq.Fork(mongoq.AddHeaders(map[string]string{"all": "1"})).
				Branch("b", mongoq.Payload("b's"), mongoq.Priority(1)).
				Branch("c", mongoq.Headers(map[string]string{"c": "1"}), mongoq.Delay(20*time.Millisecond)), nil
		}},
		end("a"), end("b"), end("c"),
	)
	id, err := p.Push(t.Context(), "x", mongoq.Headers(map[string]string{"h": "1"}), mongoq.TTL(time.Hour))
	require.NoError(t, err)
	pushed, err := store.Get(t.Context(), id)
	require.NoError(t, err)
	stop := runPipeline(t, p)
	var es []*mongoq.Envelope
	for range 3 {
		es = append(es, await(t, seen, "a copy is missing"))
	}
	stop()
	slices.SortFunc(es, func(a, b *mongoq.Envelope) int { return a.Part.Index - b.Part.Index })
	for i, name := range []string{"a", "b", "c"} {
		e := es[i]
		require.NotEqual(t, id, e.ID)
		require.Equal(t, "p."+name, e.Q)
		require.Equal(t, []any{id, name, i, 3}, []any{e.Part.Of, e.Part.Branch, e.Part.Index, e.Part.Count})
		require.Equal(t, pushed.Pushed, e.Pushed)
		require.Equal(t, pushed.Deadline, e.Deadline)
		require.Equal(t, 1, e.Moves)
		require.Equal(t, "p.split", e.Hops[0].From)
	}
	require.Equal(t, []string{"x", "b's", "x"}, []string{payloadOf[string](t, es[0]), payloadOf[string](t, es[1]), payloadOf[string](t, es[2])})
	require.Equal(t, []int{2, 1, 2}, []int{es[0].Priority, es[1].Priority, es[2].Priority})
	require.Equal(t, map[string]string{"h": "1", "all": "1"}, es[0].Headers)
	require.Equal(t, map[string]string{"c": "1"}, es[2].Headers)
	require.Zero(t, docs(t, db))
}

// A fork whose lease was lost makes no copies, alone and among others.
func TestForkOfAStaleStageMakesNoCopies(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	const n = 20
	release := make(chan struct{})
	begun := make(chan struct{}, 2*n)
	lost, forked := make(chan struct{}, n), make(chan struct{}, n)
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "split", Fork: []string{"a", "b"}, Queue: mongoq.QueueConfig{Lease: time.Minute},
			Handler: mongoq.Step(func(_ context.Context, r *mongoq.Reservation, i int) (mongoq.Route, error) {
				begun <- struct{}{}
				if i == 7 && r.Deliveries > 1 {
					return mongoq.Drop("the second time"), nil
				}
				<-release
				return mongoq.Fork(), nil
			}), Worker: mongoq.WorkerConfig{Concurrency: 2 * n, OnEvent: func(e mongoq.Event) {
				switch e.Kind {
				case mongoq.EventLeaseLost:
					lost <- struct{}{}
				case mongoq.EventForked:
					forked <- struct{}{}
				case mongoq.EventDropped:
					close(release)
				}
			}}},
		&mongoq.Stage{Name: "a", Handler: forward}, &mongoq.Stage{Name: "b", Handler: forward},
	)
	ids, err := p.PushMany(t.Context(), ints(n))
	require.NoError(t, err)
	stop := runPipeline(t, p, "split")
	for range n {
		await(t, begun, "not all were begun")
	}
	setDue(t, db, ids[7], 0)
	await(t, lost, "the stale one was not told")
	for range n - 1 {
		await(t, forked, "not all were forked")
	}
	stop()
	require.EqualValues(t, 2*(n-1), docs(t, db))
	count, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "part.of", Value: ids[7]}})
	require.NoError(t, err)
	require.Zero(t, count)
}

// joining is a pipeline that forks to three branches and joins them: the joined payload is the branches' payloads.
func joinStages(j *journal, policy mongoq.JoinPolicy, branch func(name string, r *mongoq.Reservation, s string) (mongoq.Route, error)) []*mongoq.Stage {
	stages := []*mongoq.Stage{{Name: "split", Handler: forward, Fork: []string{"a", "b", "c"}}}
	for _, name := range []string{"a", "b", "c"} {
		stages = append(stages, &mongoq.Stage{Name: name, Next: "join", Queue: mongoq.QueueConfig{Retry: quick(1)},
			Handler: mongoq.Step(func(_ context.Context, r *mongoq.Reservation, s string) (mongoq.Route, error) {
				return branch(name, r, s)
			})})
	}
	return append(stages,
		&mongoq.Stage{Name: "join", Next: "end", Join: &mongoq.Join{Of: "split", OnDead: policy},
			Handler: mongoq.Merge(func(_ context.Context, whole string, parts *mongoq.Joined) (string, error) {
				out := whole + "="
				for i := range parts.Parts {
					var s string
					if err := parts.Parts[i].Decode(&s); err != nil {
						return "", err
					}
					out += s
				}
				for _, m := range parts.Missing {
					out += fmt.Sprintf("-%s(%t,%s,%s)", m.Branch, m.Ended, m.Dead, m.Msg)
				}
				return out, nil
			})},
		j.end("end"))
}

func TestJoinWaitsForAllParts(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	defer open()
	p := newPipeline(t, store, joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
		if name == "b" {
			<-gate
		}
		return mongoq.Forward(mongoq.Payload(name)), nil
	})...)
	id, err := p.Push(t.Context(), "x", mongoq.Headers(map[string]string{"h": "1"}))
	require.NoError(t, err)
	stop := runPipeline(t, p)
	require.Eventually(t, func() bool {
		e, err := store.Get(t.Context(), id)
		return err == nil && e.Joined != nil && len(e.Joined.Parts) == 2
	}, late, 5*time.Millisecond)
	require.Empty(t, j.of("end"))
	e, err := store.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, "p.join", e.Q)
	require.False(t, e.Joined.Closed)
	require.Nil(t, e.Joined.Part("b"))
	require.NotNil(t, e.Joined.Part("c"))
	require.Eventually(t, func() bool { return docs(t, db) == 2 }, late, 5*time.Millisecond, "the whole and the part that is under way")
	open()
	require.Equal(t, []string{"x=abc"}, j.awaits(t, "end", 1))
	stop()
	require.Zero(t, docs(t, db))
}

// A branch may lead straight to the join, and forks may stand within forks and in loops.
func TestJoinOfForksWithinForks(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	text := func(parts *mongoq.Joined) string {
		var all []string
		for i := range parts.Parts {
			var s string
			_ = parts.Parts[i].Decode(&s)
			all = append(all, s)
		}
		return "(" + strings.Join(all, " ") + ")"
	}
	mark := func(name, next string) *mongoq.Stage {
		return &mongoq.Stage{Name: name, Next: next, Handler: mongoq.Transform(func(_ context.Context, s string) (string, error) { return s + name, nil })}
	}
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "outer", Handler: forward, Fork: []string{"inner", "plain", "joined"}},
		&mongoq.Stage{Name: "inner", Handler: forward, Fork: []string{"x", "y"}},
		mark("x", "k"), mark("y", "k"), mark("plain", "joined"),
		&mongoq.Stage{Name: "k", Join: &mongoq.Join{Of: "inner"}, Next: "joined",
			Handler: mongoq.Merge(func(_ context.Context, _ string, parts *mongoq.Joined) (string, error) { return text(parts), nil })},
		&mongoq.Stage{Name: "joined", Join: &mongoq.Join{Of: "outer"}, Next: "end", Back: []mongoq.Back{{To: "outer", Limit: 1}},
			Handler: mongoq.Step(func(_ context.Context, r *mongoq.Reservation, _ string) (mongoq.Route, error) {
				out := mongoq.Payload(text(r.Joined))
				if len(r.Loops) == 0 {
					return mongoq.GoTo("outer", out), nil
				}
				return mongoq.Forward(out), nil
			})},
		j.end("end"),
	)
	_, err := p.Push(t.Context(), "")
	require.NoError(t, err)
	stop := runPipeline(t, p)
	once := "((x y) plain )"
	require.Equal(t, []string{fmt.Sprintf("((%[1]sx %[1]sy) %[1]splain %[1]s)", once)}, j.awaits(t, "end", 1))
	stop()
	require.Zero(t, docs(t, db))
}

// A part that dies fails the whole, which waits as a dead letter; when the part is redriven, it comes back to life.
func TestJoinFailsTheWhole(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	var healed atomic.Bool
	slow := make(chan struct{})
	p := newPipeline(t, store, joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
		switch {
		case name == "b" && !healed.Load():
			return mongoq.Route{}, backoff.Permanent(errors.New("b is broken"))
		case name == "c":
			<-slow
		}
		return mongoq.Forward(mongoq.Payload(name)), nil
	})...)
	id, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, p)
	dead := deadOf(t, p, "join", 1)[0]
	require.Equal(t, id, dead.ID)
	require.Equal(t, mongoq.DeadPart, dead.Dead.Kind)
	part := deadOf(t, p, "b", 1)[0]
	require.Equal(t, fmt.Sprintf("part %q (%s) died: permanent: b is broken", "b", part.ID.Hex()), dead.Dead.Msg)

	// The whole by itself dies again, since its part is dead.
	n, err := stageQueue(t, p, "join").DeadLetters().Redrive(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	require.Eventually(t, func() bool {
		e, err := store.Get(t.Context(), id)
		return err == nil && e.Dead != nil && e.Moves > dead.Moves+1
	}, late, 5*time.Millisecond)

	// What arrives late is kept with it.
	close(slow)
	require.Eventually(t, func() bool {
		e, err := store.Get(t.Context(), id)
		return err == nil && e.Dead != nil && len(e.Joined.Parts) == 2
	}, late, 5*time.Millisecond)
	require.Eventually(t, func() bool { return docs(t, db) == 2 }, late, 5*time.Millisecond, "the whole and the dead part")

	healed.Store(true)
	n, err = stageQueue(t, p, "b").DeadLetters().Redrive(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	require.Equal(t, []string{"x=abc"}, j.awaits(t, "end", 1))
	require.Eventually(t, func() bool { return docs(t, db) == 0 }, late, 5*time.Millisecond)
}

// GoOn: the join goes on without a part that died, and knows why; redriven, the part dies again.
func TestJoinGoesOnWithoutADeadPart(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	var healed atomic.Bool
	p := newPipeline(t, store, joinStages(&j, mongoq.GoOn, func(name string, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
		if name == "b" && !healed.Load() {
			return mongoq.Route{}, errors.New("b is broken")
		}
		return mongoq.Forward(mongoq.Payload(name)), nil
	})...)
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, p)
	require.Equal(t, []string{"x=ac-b(false,retries,b is broken)"}, j.awaits(t, "end", 1))
	part := deadOf(t, p, "b", 1)[0]
	require.Equal(t, mongoq.DeadRetries, part.Dead.Kind)
	healed.Store(true)
	_, err = stageQueue(t, p, "b").DeadLetters().Redrive(t.Context())
	require.NoError(t, err)
	late := deadOf(t, p, "join", 1)[0]
	require.Equal(t, part.ID, late.ID)
	require.Equal(t, mongoq.DeadUnroutable, late.Dead.Kind)
	require.Contains(t, late.Dead.Msg, "its join has gone on without it")
	require.Equal(t, []string{"x=ac-b(false,retries,b is broken)"}, j.of("end"))
	require.EqualValues(t, 1, docs(t, db))
}

// Parts that die otherwise than in a handler: by their deadline, removed, or with their consumers. The whole finds out
// by itself.
func TestJoinLooksForItsParts(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	stages := joinStages(&j, mongoq.GoOn, func(name string, r *mongoq.Reservation, s string) (mongoq.Route, error) {
		return mongoq.Forward(mongoq.Payload(name)), nil
	})
	stages[0].Handler = func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
		return mongoq.Fork().Branch("c", mongoq.TTL(time.Millisecond)), nil
	}
	stages[3].Queue.OnExpire = mongoq.ToDeadLetter
	p := newPipeline(t, store, stages...)
	id, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	stop := runPipeline(t, p, "split", "a")
	require.Eventually(t, func() bool { return sizes(t, stageQueue(t, p, "join")) == "2110" }, late, 5*time.Millisecond)
	stop()
	b, err := stageQueue(t, p, "b").Peek(t.Context(), 1)
	require.NoError(t, err)
	require.NoError(t, stageQueue(t, p, "b").Remove(t.Context(), b[0].ID))
	runPipeline(t, p)
	require.Equal(t, []string{"x=a-b(false,,)-c(false,expired,not taken before its deadline)"}, j.awaits(t, "end", 1))
	require.Eventually(t, func() bool {
		_, err := store.Get(t.Context(), id)
		return errors.Is(err, mongoq.ErrNotFound)
	}, late, 5*time.Millisecond)
}

// A part that its stage ends tells the join, which goes on without it whatever its policy.
func TestJoinIsToldOfPartsThatEnd(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	stages := joinStages(&j, mongoq.FailWhole, func(name string, r *mongoq.Reservation, s string) (mongoq.Route, error) {
		switch name {
		case "a":
			return mongoq.Drop("no use"), nil
		case "b":
			return mongoq.Done(), nil
		}
		return mongoq.Drop("kept"), nil
	})
	stages[3].Queue.Retention = mongoq.KeepForever
	p := newPipeline(t, store, stages...)
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	stop := runPipeline(t, p)
	got := j.awaits(t, "end", 1)[0]
	stop()
	for _, want := range []string{"-a(true,,dropped: no use)", "-b(true,,done: )", "-c(true,,dropped: kept)"} {
		require.Contains(t, got, want)
	}
	require.EqualValues(t, 1, docs(t, db), "what c keeps in its history")
}

// What comes to a join and is no part of its fork is dead-lettered.
func TestJoinRefusesStrangers(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	p := newPipeline(t, store, joinStages(&j, mongoq.GoOn, func(name string, r *mongoq.Reservation, s string) (mongoq.Route, error) {
		return mongoq.Forward(mongoq.Payload(name)), nil
	})...)
	id := push(t, stageQueue(t, p, "join"), "stranger")
	runPipeline(t, p)
	dead := deadOf(t, p, "join", 1)[0]
	require.Equal(t, id, dead.ID)
	require.Equal(t, mongoq.DeadUnroutable, dead.Dead.Kind)
}

// The whole need not wait with what its parts carry.
func TestForkChangesTheWhole(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	stages := joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
		return mongoq.Forward(mongoq.Payload(s + name)), nil
	})
	stages[0].Handler = func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
		return mongoq.Fork().Whole(mongoq.Payload("small"), mongoq.AddHeaders(map[string]string{"k": "v"})), nil
	}
	headers := make(chan map[string]string, 1)
	end := stages[5].Handler
	stages[5].Handler = func(ctx context.Context, r *mongoq.Reservation) (mongoq.Route, error) {
		headers <- r.Headers
		return end(ctx, r)
	}
	p := newPipeline(t, store, stages...)
	_, err := p.Push(t.Context(), "large", mongoq.Headers(map[string]string{"h": "1"}))
	require.NoError(t, err)
	runPipeline(t, p)
	require.Equal(t, []string{"small=largealargeblargec"}, j.awaits(t, "end", 1))
	require.Equal(t, map[string]string{"h": "1", "k": "v"}, await(t, headers, "none"))

	bare, err := mongoq.NewPipeline(store, "bare",
		&mongoq.Stage{Name: "split", Handler: stages[0].Handler, Fork: []string{"a", "b"}},
		&mongoq.Stage{Name: "a", Handler: forward}, &mongoq.Stage{Name: "b", Handler: forward})
	require.NoError(t, err)
	_, err = bare.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, bare, "split")
	require.Contains(t, deadOf(t, bare, "split", 1)[0].Dead.Msg, "Whole needs a fork that is joined")
}
