package pipefile_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
	"github.com/seed-de459a48/mongoq/pipefile"
)

const etl = `# read every file, count two things side by side
pipeline: etl
stages:
  - name: read
    handler: readFile
    next: parse
    queue:
      lease: 1m
      retention: forever
      onExpire: toDeadLetter
      retry: {initial: 10ms, factor: 3, jitter: 0, max: 50ms, retries: 3}
    worker: {concurrency: 4, timeout: 30s, drainTimeout: 5s}
  - name: parse
    fork: [count, longest]
    choice: [review]
  - name: review
    back:
      - {to: parse, limit: 2}
  - {name: count, next: summarise}
  - {name: longest, next: summarise, entry: false}
  - name: summarise
    join: {of: parse, onDead: goOn}
`

func forward(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
	return mongoq.Forward(), nil
}

func handlers(names ...string) pipefile.Handlers {
	h := pipefile.Handlers{}
	for _, name := range names {
		h[name] = forward
	}
	return h
}

func store(t testing.TB) *mongoq.Store {
	t.Helper()
	s, err := mongoq.Open(t.Context(), mongotest.Database(t, mongotest.ReplicaSet), mongoq.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close(context.Background())) })
	return s
}

func TestAFileIsAPipeline(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "etl.yaml")
	require.NoError(t, os.WriteFile(path, []byte(etl), 0o600))
	f, err := pipefile.Load(path)
	require.NoError(t, err)
	read := f.Stages[0]
	require.Equal(t, []any{"read", "parse", time.Minute, mongoq.KeepForever, mongoq.ToDeadLetter},
		[]any{read.Name, read.Next, read.Queue.Lease, read.Queue.Retention, read.Queue.OnExpire})
	require.Equal(t, []any{4, 30 * time.Second, 5 * time.Second},
		[]any{read.Worker.Concurrency, read.Worker.Timeout, read.Worker.DrainTimeout})
	policy := read.Queue.Retry()
	var waits []time.Duration
	for range 4 {
		waits = append(waits, policy.NextBackOff())
	}
	require.Equal(t, []time.Duration{10 * time.Millisecond, 30 * time.Millisecond, 50 * time.Millisecond, backoff.Stop}, waits)
	require.Equal(t, []mongoq.Back{{To: "parse", Limit: 2}}, f.Stages[2].Back)
	require.Equal(t, mongoq.Join{Of: "parse", OnDead: mongoq.GoOn}, *f.Stages[5].Join)

	var changed []string
	p, err := f.Build(store(t), handlers("readFile", "parse", "review", "count", "longest", "summarise"), func(st *mongoq.Stage) {
		changed = append(changed, st.Name)
	})
	require.NoError(t, err)
	require.Equal(t, "etl", p.Name())
	require.Equal(t, []string{"read", "parse", "review", "count", "longest", "summarise"}, changed)
	require.ElementsMatch(t, changed, p.Stages())

	_, err = f.Build(store(t), handlers("readFile", "parse"))
	require.ErrorIs(t, err, mongoq.ErrInvalidOption)
	require.ErrorContains(t, err, path+":16: ")
	require.ErrorContains(t, err, `stage "review": no handler "review" is registered, there are ["parse" "readFile"]`)
}

// Each mistake is told with its line.
func TestMistakesHaveLines(t *testing.T) {
	t.Parallel()
	s := store(t)
	for _, bad := range []struct {
		text, rule string
		line       int
	}{
		{"", "this one is empty", 1},
		{"- a", "a pipeline must be a mapping", 1},
		{"pipeline: p\nstages:\n  - name: a\n---\npipeline: q\n", "here begins another document", 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {retention: -1ns}\n", "retention must not be negative, got -1ns", 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {retry: {factor: .NaN}}\n", `factor must be a finite number, got ".NaN"`, 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {retry: {factor: NaN}}\n", `factor must be a finite number, got "NaN"`, 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {retry: {jitter: +Inf}}\n", `jitter must be a finite number, got "+Inf"`, 4},
		{"pipeline: p", "a pipeline needs stages", 1},
		{"stages: []\n", "must name its pipeline", 1},
		{"pipeline: p\nstages: []\n", "at least one stage", 1},
		{"pipeline: p\nstages: x\n", "stages must be a list", 2},
		{"pipeline: p\nstges: []\n", `a pipeline has no field "stges"`, 2},
		{"pipeline: p\nstages:\n  - name: a\n    nxt: b\n", `a stage has no field "nxt"`, 4},
		{"pipeline: p\nstages:\n  - name: a\n    next: b\n", `there is no "b"`, 4},
		{"pipeline: p\nstages:\n  - name: a\n    next: b\n    next: b\n", "next", 5},
		{"pipeline: p\nstages:\n  - name: a\n  - name: a\n", "no two stages may have the same name", 4},
		{"pipeline: p\nstages:\n  - name: a\n\n  - name: b\n", "no link leads to this one", 5},
		{"pipeline: p\nstages:\n  - name: a\n    queue:\n      lease: soon\n", `lease must be a duration such as 30s or 1h30m, got "soon"`, 5},
		{"pipeline: p\nstages:\n  - name: a\n    queue:\n      lease: 1us\n", "Lease must be >= 1ms", 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue:\n      retry: {retries: -1}\n", "retries must be >= 0, got -1", 5},
		{"pipeline: p\nstages:\n  - name: a\n    queue:\n      retry: {initial: 2s, max: 1s}\n", "0 <= initial <= max, got 2s and 1s", 5},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {retry: {factor: 0.5}}\n", "factor must be >= 1, got 0.5", 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {retry: {jitter: 2}}\n", "jitter must be 0 to 1, got 2", 4},
		{"pipeline: p\nstages:\n  - name: a\n    queue: {onExpire: never}\n", `onExpire must be one of ["discard" "toDeadLetter"], got "never"`, 4},
		{"pipeline: p\nstages:\n  - name: a\n    worker:\n      concurrency: many\n", `concurrency must be a whole number, got "many"`, 5},
		{"pipeline: p\nstages:\n  - name: a\n    worker: {concurrency: -1}\n", "Concurrency must be >= 1, got -1", 4},
		{"pipeline: p\nstages:\n  - name: a\n    entry: perhaps\n", `entry must be one of ["false" "true"], got "perhaps"`, 4},
		{"pipeline: p\nstages:\n  - name: a\n    back: [{to: a}]\n", "Limit must be >= 1, got 0", 4},
		{"pipeline: p\nstages:\n  - name: a\n    next: [b]\n", "next must be a text", 4},
		{"pipeline: p\nstages:\n  - name: a\n    choice:\n      - b\n      - {}\n", "each of choice must be a text", 6},
		{"pipeline: p\nstages:\n  - name: a\n    fork: [b]\n  - name: b\n", "a fork needs at least two stages", 4},
		{"pipeline: p\nstages:\n  - name: a\n    next: b\n  - name: b\n    join: {of: a}\n", `must name a stage that forks, "a" does not`, 6},
	} {
		f, err := pipefile.Parse([]byte(bad.text))
		if err == nil {
			_, err = f.Build(s, handlers("a", "b"))
		}
		require.ErrorIs(t, err, mongoq.ErrInvalidOption, bad.text)
		require.ErrorContains(t, err, bad.rule, bad.text)
		var wrong *pipefile.Error
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, bad.line, wrong.Line, "%s\n%v", bad.text, err)
	}
	_, err := pipefile.Parse([]byte("pipeline: p\nstages: [\n"))
	var wrong *pipefile.Error
	require.ErrorAs(t, err, &wrong)
	require.Positive(t, wrong.Line, "%v", err)
	_, err = pipefile.Load("nowhere.yaml")
	require.ErrorIs(t, err, os.ErrNotExist)
}
