package pipefile_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/pipefile"
)

// A file holds a pipeline, or a mistake that is named by its line; it neither panics nor grows beyond its size, whatever
// aliases it has.
//
//	go test -run '^$' -fuzz FuzzParse -fuzztime 5m .
func FuzzParse(f *testing.F) {
	f.Add("pipeline: p\nstages:\n  - {name: a, next: b}\n  - {name: b}\n")
	f.Add("pipeline: p\nstages:\n  - name: a\n    fork: [b, c]\n  - {name: b, next: j}\n  - {name: c, next: j}\n  - name: j\n    join: {of: a, onDead: goOn}\n")
	f.Add("pipeline: p\nstages:\n  - name: a\n    choice: [b]\n    back: [{to: a, limit: 3}]\n    queue: {lease: 30s, retention: forever, onExpire: toDeadLetter, retry: {initial: 1s, max: 1h, factor: 2, jitter: 0.5, retries: 3}}\n    worker: {concurrency: 4, timeout: 1m, noHeartbeat: true}\n  - name: b\n")
	f.Add("pipeline: &a [*a, *a]\nstages: *a\n")
	f.Add("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\npipeline: *c\n")
	f.Add("pipeline: p\nstages: &s\n  - *s\n")
	f.Add("pipeline: p\nstages:\n  - {<<: {name: a}}\n")
	f.Add("pipeline: p\n---\nstages: []\n")
	f.Add("%YAML 9.9\n---\n!!binary x")
	f.Add(strings.Repeat("[", 2000))
	f.Add(strings.Repeat("- ", 2000))
	s := store(f)
	f.Fuzz(func(t *testing.T, text string) {
		file, err := pipefile.Parse([]byte(text))
		if err != nil {
			var wrong *pipefile.Error
			require.ErrorAs(t, err, &wrong)
			require.LessOrEqual(t, wrong.Line, strings.Count(text, "\n")+strings.Count(text, "\r")+2) // the end counts as a line
			return
		}
		require.NotEmpty(t, file.Name)
		require.LessOrEqual(t, len(file.Stages), len(text))
		registered := handlers("a")
		for i := range file.Stages {
			registered[file.Stages[i].Name] = forward
		}
		p, err := file.Build(s, registered)
		if err != nil {
			var wrong *pipefile.Error
			require.ErrorAs(t, err, &wrong)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption)
			return
		}
		for i := range file.Stages {
			_, err := p.Queue(file.Stages[i].Name)
			require.NoError(t, err)
		}
	})
}
