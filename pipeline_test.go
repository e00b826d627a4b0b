package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// newPipeline builds a pipeline of the name "p".
func newPipeline(t testing.TB, store *mongoq.Store, stages ...*mongoq.Stage) *mongoq.Pipeline {
	t.Helper()
	p, err := mongoq.NewPipeline(store, "p", stages...)
	require.NoError(t, err)
	return p
}

// runPipeline runs stages of a pipeline until stop is called or the test ends.
func runPipeline(t testing.TB, p *mongoq.Pipeline, stages ...string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var err error
	go func() {
		defer close(done)
		err = p.Run(ctx, stages...)
	}()
	stop = func() {
		cancel()
		await(t, done, "Run did not return")
		require.NoError(t, err)
	}
	t.Cleanup(stop)
	return stop
}

// journal notes what was seen, by name.
type journal struct {
	mu   sync.Mutex
	seen map[string][]string
}

func (j *journal) note(name, what string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.seen == nil {
		j.seen = map[string][]string{}
	}
	j.seen[name] = append(j.seen[name], what)
}

func (j *journal) of(name string) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.seen[name])
}

func (j *journal) awaits(t testing.TB, name string, n int) []string {
	t.Helper()
	require.Eventually(t, func() bool { return len(j.of(name)) >= n }, late, 2*time.Millisecond, "%d of %s", n, name)
	return j.of(name)
}

// end is a sink that notes its payloads, which are strings.
func (j *journal) end(name string) *mongoq.Stage {
	return &mongoq.Stage{Name: name, Handler: mongoq.Sink(func(_ context.Context, s string) error {
		j.note(name, s)
		return nil
	})}
}

// stageQueue is the queue of a stage.
func stageQueue(t testing.TB, p *mongoq.Pipeline, stage string) *mongoq.Queue {
	t.Helper()
	q, err := p.Queue(stage)
	require.NoError(t, err)
	return q
}

// deadOf waits until a stage has n dead letters, and gives them.
func deadOf(t testing.TB, p *mongoq.Pipeline, stage string, n int) []*mongoq.Envelope {
	t.Helper()
	q := stageQueue(t, p, stage)
	var all []*mongoq.Envelope
	require.Eventually(t, func() bool {
		all = nil
		for e, err := range q.DeadLetters().List(t.Context()) {
			require.NoError(t, err)
			all = append(all, e)
		}
		return len(all) >= n
	}, late, 5*time.Millisecond, "%d dead letters of %s", n, stage)
	require.Len(t, all, n)
	return all
}

// docs is how many envelopes there are, in whatever state.
func docs(t testing.TB, db *mongo.Database) int64 {
	t.Helper()
	n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "divider", Value: nil}})
	require.NoError(t, err)
	return n
}

// forward is a handler that changes nothing.
func forward(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
	return mongoq.Forward(), nil
}

// quick is a policy of retries that are due in a moment.
func quick(n uint64) func() backoff.BackOff {
	return func() backoff.BackOff {
		return backoff.WithMaxRetries(backoff.NewConstantBackOff(10*time.Millisecond), n)
	}
}

// Three hops: the payload as it was, replaced, and patched; headers with it; retries begin at 0 in each stage.
func TestPipelineOfThreeHops(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		type job struct {
			Name string
			N    int
		}
		var retries sync.Map
		failOnce := func(next mongoq.Handler) mongoq.Handler {
			return func(ctx context.Context, r *mongoq.Reservation) error {
				retries.Store(r.Q+fmt.Sprint(r.Retries), true)
				if r.Retries == 0 {
					return mongoq.RetryIn(0, errors.New("once"))
				}
				return next(ctx, r)
			}
		}
		ended := make(chan *mongoq.Envelope, 1)
		worker := mongoq.WorkerConfig{Middleware: []mongoq.Middleware{failOnce}}
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "same", Handler: forward, Next: "new", Worker: worker},
			&mongoq.Stage{Name: "new", Handler: mongoq.Transform(func(_ context.Context, s string) (job, error) {
				return job{Name: s, N: 1}, nil
			}), Next: "patch", Worker: worker},
			&mongoq.Stage{Name: "patch", Handler: mongoq.Step(func(_ context.Context, r *mongoq.Reservation, j job) (mongoq.Route, error) {
				j.N++
				return mongoq.Forward(mongoq.Payload(j), mongoq.AddHeaders(map[string]string{"b": "2"}), mongoq.Priority(1)), nil
			}), Next: "end", Worker: worker},
			&mongoq.Stage{Name: "end", Handler: func(_ context.Context, r *mongoq.Reservation) (mongoq.Route, error) {
				ended <- &r.Envelope
				return mongoq.Done(), nil
			}, Worker: worker},
		)
		require.Equal(t, []string{"same", "new", "patch", "end"}, p.Stages())
		id, err := p.Push(t.Context(), "$x", mongoq.Headers(map[string]string{"a": "1"}))
		require.NoError(t, err)
		stop := runPipeline(t, p)
		e := await(t, ended, "it came to no end")
		require.Equal(t, id, e.ID)
		require.Equal(t, job{Name: "$x", N: 2}, payloadOf[job](t, e))
		require.Equal(t, map[string]string{"a": "1", "b": "2"}, e.Headers)
		require.Equal(t, 1, e.Priority)
		require.Equal(t, 3, e.Moves)
		require.Equal(t, []string{"p.same", "p.new", "p.patch"}, []string{e.Hops[0].From, e.Hops[1].From, e.Hops[2].From})
		stop()
		for _, stage := range p.Stages() {
			for _, n := range []string{"0", "1"} {
				_, ok := retries.Load("p." + stage + n)
				require.True(t, ok, "%s with %s retries", stage, n)
			}
		}
		require.Zero(t, docs(t, db))
		stats, err := p.Stats(t.Context())
		require.NoError(t, err)
		for _, st := range stats.Stages {
			require.EqualValues(t, 1, st.Retries, st.Stage)
			require.EqualValues(t, 1, st.In, st.Stage)
			require.EqualValues(t, 1, st.Out, st.Stage)
		}
		require.Equal(t, map[string]int64{"new": 1}, stats.Stages[0].To)
		require.Zero(t, stats.Live())
	})
}

// Those that fail wait for their retry, and others pass them; each is retried as its policy says, and is finished once.
func TestPipelineFailuresAreOvertaken(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		const n = 60
		var tries [n]atomic.Int64
		var j journal
		release := make(chan struct{})
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "odd", Next: "end", Queue: mongoq.QueueConfig{Retry: rest(3)},
				Handler: mongoq.Transform(func(_ context.Context, i int) (string, error) {
					k := tries[i].Add(1)
					switch {
					case i%3 != 0:
						return fmt.Sprint(i), nil
					case k <= 2:
						return "", mongoq.RetryIn(time.Millisecond, errors.New("not yet"))
					}
					<-release // until all others have passed
					return fmt.Sprint(i), nil
				}), Worker: mongoq.WorkerConfig{Concurrency: n}},
			j.end("end"),
		)
		_, err := p.PushMany(t.Context(), ints(n))
		require.NoError(t, err)
		stop := runPipeline(t, p)
		passed := j.awaits(t, "end", n-n/3)
		for _, s := range passed {
			var i int
			_, err := fmt.Sscan(s, &i)
			require.NoError(t, err)
			require.NotZero(t, i%3)
		}
		close(release)
		all := j.awaits(t, "end", n)
		stop()
		slices.Sort(all)
		require.Len(t, slices.Compact(all), n, "each once")
		require.Len(t, j.of("end"), n)
		for i := range tries {
			want := int64(1)
			if i%3 == 0 {
				want = 3
			}
			require.Equal(t, want, tries[i].Load(), i)
		}
	})
}

func TestPipelineChoice(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		var j journal
		var turn atomic.Int64
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "deal", Choice: []string{"a", "b", "c"},
				Handler: mongoq.Step(func(_ context.Context, _ *mongoq.Reservation, i int) (mongoq.Route, error) {
					k := turn.Add(1) - 1
					return mongoq.GoTo(string(rune('a'+k%3)), mongoq.Payload(fmt.Sprint(i))), nil
				})},
			j.end("a"), j.end("b"), j.end("c"),
		)
		_, err := p.PushMany(t.Context(), ints(17))
		require.NoError(t, err)
		stop := runPipeline(t, p)
		a, b, c := j.awaits(t, "a", 6), j.awaits(t, "b", 6), j.awaits(t, "c", 5)
		stop()
		require.Equal(t, []int{6, 6, 5}, []int{len(a), len(b), len(c)})
		all := slices.Concat(a, b, c)
		slices.Sort(all)
		require.Len(t, slices.Compact(all), 17)
		require.Zero(t, docs(t, db))
	})
}

// What no link declares is a mistake of the program: dead at once, with the reason, never tried again.
func TestPipelineUndeclaredTargets(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		var runs atomic.Int64
		routes := map[string]mongoq.Route{
			"nowhere": mongoq.GoTo("nowhere"), "unlinked": mongoq.GoTo("first"), "forward": mongoq.Forward(),
			"fork": mongoq.Fork(), "bad": mongoq.GoTo("end", mongoq.Payload(func() {})),
		}
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "first", Handler: forward, Next: "choose"},
			&mongoq.Stage{Name: "choose", Choice: []string{"end"},
				Handler: mongoq.Step(func(_ context.Context, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
					runs.Add(1)
					return routes[s], nil
				})},
			&mongoq.Stage{Name: "end", Handler: forward},
		)
		for name := range routes {
			_, err := p.Push(t.Context(), name)
			require.NoError(t, err)
		}
		stop := runPipeline(t, p)
		dead := deadOf(t, p, "choose", len(routes))
		stop()
		require.EqualValues(t, len(routes), runs.Load())
		reasons := map[string]string{
			"nowhere": `stage "choose" has no link to "nowhere"`, "unlinked": `stage "choose" has no link to "first"`,
			"forward": `stage "choose" forwards, and has no next stage`, "fork": `stage "choose" has no fork`,
			"bad": "Payload must be encodable as BSON",
		}
		for _, e := range dead {
			name := payloadOf[string](t, e)
			kind := mongoq.DeadUnroutable
			if name == "bad" {
				kind = mongoq.DeadPermanent
			}
			require.Equal(t, kind, e.Dead.Kind, name)
			require.Contains(t, e.Dead.Msg, reasons[name])
			require.Equal(t, "p.choose", e.Dead.From)
		}
	})
}

func TestPipelineLoopEndsAtItsLimit(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		var j journal
		var rounds atomic.Int64
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "try", Handler: mongoq.Step(func(_ context.Context, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
				if s == "self" {
					return mongoq.GoTo("try"), nil
				}
				rounds.Add(1)
				return mongoq.Forward(), nil
			}), Next: "look", Back: []mongoq.Back{{To: "try", Limit: 2}}},
			&mongoq.Stage{Name: "look", Handler: mongoq.Step(func(_ context.Context, r *mongoq.Reservation, s string) (mongoq.Route, error) {
				if s == "good" && r.Loops["look>try"] == 2 {
					return mongoq.Forward(), nil
				}
				return mongoq.GoTo("try"), nil
			}), Next: "end", Back: []mongoq.Back{{To: "try", Limit: 4}}},
			j.end("end"),
		)
		for _, s := range []string{"good", "bad", "self"} {
			_, err := p.Push(t.Context(), s)
			require.NoError(t, err)
		}
		stop := runPipeline(t, p)
		dead := deadOf(t, p, "look", 1)[0]
		require.Equal(t, mongoq.DeadHops, dead.Dead.Kind)
		require.Equal(t, `it went back from "look" to "try" 4 times, which is the limit`, dead.Dead.Msg)
		require.Equal(t, "bad", payloadOf[string](t, dead))
		self := deadOf(t, p, "try", 1)[0]
		require.Equal(t, `it went back from "try" to "try" 2 times, which is the limit`, self.Dead.Msg)
		require.Equal(t, map[string]int{"try>try": 2}, self.Loops)
		require.Equal(t, []string{"good"}, j.awaits(t, "end", 1))
		require.EqualValues(t, 3+5, rounds.Load())

		// A redrive begins anew.
		n, err := stageQueue(t, p, "look").DeadLetters().Redrive(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		require.Eventually(t, func() bool {
			again, err := store.Get(t.Context(), dead.ID)
			return err == nil && again.Dead != nil && again.Moves > dead.Moves+2
		}, late, 5*time.Millisecond)
		stop()
		require.EqualValues(t, 3+5+4, rounds.Load())
	})
}

// An envelope whose stage lost its lease stays with the one who has it, and leaves no copy.
func TestPipelineStaleStageMovesNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		var j journal
		begun, release := make(chan struct{}, 2), make(chan struct{})
		events := make(chan mongoq.Event, 16)
		first := &mongoq.Stage{Name: "first", Next: "end", Queue: mongoq.QueueConfig{Lease: time.Minute},
			Handler: mongoq.Step(func(_ context.Context, r *mongoq.Reservation, s string) (mongoq.Route, error) {
				begun <- struct{}{}
				if r.Deliveries == 1 {
					<-release
				}
				return mongoq.Forward(mongoq.Payload(fmt.Sprint(s, r.Deliveries))), nil
			}), Worker: mongoq.WorkerConfig{OnEvent: func(e mongoq.Event) { events <- e }}}
		p := newPipeline(t, store, first, j.end("end"))
		id, err := p.Push(t.Context(), "x")
		require.NoError(t, err)
		runPipeline(t, p)
		await(t, begun, "it was not begun")
		setDue(t, db, id, 0) // as if its lease had run out
		await(t, begun, "nobody else took it")
		require.Equal(t, []string{"x2"}, j.awaits(t, "end", 1))
		close(release)
		for {
			if e := await(t, events, "no event"); e.Kind == mongoq.EventLeaseLost {
				break
			}
		}
		require.Eventually(t, func() bool { return docs(t, db) == 0 }, soon, 5*time.Millisecond, "the last stage's commit is behind its handler")
		require.Equal(t, []string{"x2"}, j.of("end"))
	})
}

// What a stage drops is gone, or in the history with the reason.
func TestPipelineDrop(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		dropped := make(chan mongoq.Event, 4)
		worker := mongoq.WorkerConfig{OnEvent: func(e mongoq.Event) {
			if e.Kind == mongoq.EventDropped {
				dropped <- e
			}
		}}
		drop := mongoq.Step(func(_ context.Context, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
			if s == "on" {
				return mongoq.Forward(), nil
			}
			return mongoq.Drop("not wanted"), nil
		})
		p := newPipeline(t, store,
			&mongoq.Stage{Name: "bare", Handler: drop, Next: "kept", Worker: worker},
			&mongoq.Stage{Name: "kept", Handler: drop, Next: "end", Worker: worker, Entry: true, Queue: mongoq.QueueConfig{Retention: mongoq.KeepForever}},
			&mongoq.Stage{Name: "end", Handler: mongoq.Transform(func(_ context.Context, s string) (string, error) { return s + "!", nil }),
				Queue: mongoq.QueueConfig{Retention: mongoq.KeepForever}},
		)
		bare, err := p.Push(t.Context(), "a")
		require.NoError(t, err)
		kept := push(t, stageQueue(t, p, "kept"), "b")
		on, err := p.Push(t.Context(), "on")
		require.NoError(t, err)
		stop := runPipeline(t, p)
		await(t, dropped, "nothing was dropped")
		await(t, dropped, "one was not dropped")
		require.Eventually(t, func() bool {
			e, err := store.Get(t.Context(), on)
			return err == nil && !e.Processed.IsZero()
		}, late, 5*time.Millisecond)
		stop()
		_, err = store.Get(t.Context(), bare)
		require.ErrorIs(t, err, mongoq.ErrNotFound)
		e, err := store.Get(t.Context(), kept)
		require.NoError(t, err)
		require.Equal(t, "not wanted", e.Result.Document().Lookup("dropped").StringValue())
		e, err = store.Get(t.Context(), on)
		require.NoError(t, err)
		require.Equal(t, "on!", e.Result.StringValue(), "what a sink returns is the result")
		require.EqualValues(t, 2, docs(t, db))
		stats, err := p.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, stats.Stages[0].Dropped)
		require.EqualValues(t, 2, stats.Stages[0].Out)
	})
}

// What one process left in the middle, another takes up: nothing is lost, and nothing done again after its move.
func TestPipelineStopsAndStartsElsewhere(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 300
		var one, two, three [n]atomic.Int64
		build := func(gate chan struct{}) *mongoq.Pipeline {
			count := func(c *[n]atomic.Int64) mongoq.StageHandler {
				return mongoq.Step(func(ctx context.Context, _ *mongoq.Reservation, i int) (mongoq.Route, error) {
					select {
					case <-gate:
					case <-ctx.Done():
						return mongoq.Route{}, mongoq.Snooze(0)
					}
					c[i].Add(1)
					return mongoq.Forward(), nil
				})
			}
			return newPipeline(t, openStore(t, db),
				&mongoq.Stage{Name: "one", Handler: count(&one), Next: "two"},
				&mongoq.Stage{Name: "two", Handler: count(&two), Next: "three"},
				&mongoq.Stage{Name: "three", Handler: count(&three)},
			)
		}
		gate := make(chan struct{}, n)
		for range n {
			gate <- struct{}{} // a third of the work
		}
		first := build(gate)
		_, err := first.PushMany(t.Context(), ints(n))
		require.NoError(t, err)
		stop := runPipeline(t, first)
		require.Eventually(t, func() bool { return len(gate) < n/4 }, late, time.Millisecond)
		close(gate)
		stop()
		live, err := first.Stats(t.Context())
		require.NoError(t, err)

		open := make(chan struct{})
		close(open)
		second := build(open)
		empty, err := second.Empty(t.Context())
		require.NoError(t, err)
		require.Equal(t, live.Live() == 0, empty)
		stop = runPipeline(t, second)
		require.Eventually(t, func() bool {
			empty, err := second.Empty(t.Context())
			return err == nil && empty
		}, late, 5*time.Millisecond)
		stop()
		require.Zero(t, docs(t, db))
		for i := range n {
			require.Equal(t, []int64{1, 1, 1}, []int64{one[i].Load(), two[i].Load(), three[i].Load()}, i)
		}
		t.Logf("%d were left in the middle", live.Live())
	})
}

// The stages stop in the order of the flow: what one does last, the next still does.
func TestPipelineDrainsUpstreamFirst(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.Standalone)
	store := openStore(t, db)
	var j journal
	begun, gate := make(chan struct{}), make(chan struct{})
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "first", Next: "end", Handler: func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
			close(begun)
			<-gate
			return mongoq.Forward(), nil
		}},
		j.end("end"),
	)
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	await(t, begun, "it was not begun")
	require.ErrorIs(t, p.Run(t.Context(), "first"), mongoq.ErrInvalidOption, "a stage runs once at a time")
	cancel()
	push(t, stageQueue(t, p, "end"), "y")
	require.Equal(t, []string{"y"}, j.awaits(t, "end", 1), "the last stage works while the first drains")
	close(gate)
	require.NoError(t, await(t, done, "Run did not return"))
	require.Contains(t, []int64{0, 1}, docs(t, db))
}
