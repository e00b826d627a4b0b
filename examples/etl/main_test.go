package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// fakeRoot makes a GOROOT of two standard packages, a command, and test data that does not parse.
func fakeRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"alpha/a.go":            "package alpha\n\nfunc A() {\n\treturn\n}\n",
		"alpha/a_test.go":       "package alpha\n\ntype T[K any] struct{}\n\nfunc (t *T[K]) Long() {\n\t_ = 1\n\t_ = 2\n}",
		"alpha/beta/b.go":       "package beta\n",
		"alpha/testdata/bad.go": "package ???\n",
		"cmd/x/x.go":            "package main\n\nfunc main() {}\n",
		"alpha/README.md":       "not Go\n",
	} {
		path := filepath.Join(root, "src", filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o750))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return root
}

func TestETL(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	var out bytes.Buffer
	cfg := config{goroot: fakeRoot(t), check: true, workers: 4}
	require.NoError(t, etl(t.Context(), db, cfg, &out))
	require.Contains(t, out.String(), "check: a plain walk and go list std say the same")
	require.Contains(t, out.String(), "flowchart LR")

	var facts Facts
	err := db.Collection("files").FindOne(t.Context(), bson.D{{Key: "_id", Value: "alpha/a_test.go"}}).Decode(&facts)
	require.NoError(t, err)
	require.Equal(t, Facts{
		File:  File{Path: "alpha/a_test.go", Package: "alpha", Std: true},
		Lines: 8, Functions: 1, Longest: Function{Name: "T.Long", Lines: 4},
	}, facts)
}

// The worker processes of -kill are this binary again.
func TestMain(m *testing.M) {
	if told := os.Getenv(childVariable); told != "" {
		exit(work(told))
	}
	m.Run()
}

func TestETLThoughWorkersAreKilled(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	root := fakeRoot(t)
	for i := range 400 {
		text := fmt.Sprintf("package alpha\n\nfunc F%d() {\n}\n", i)
		require.NoError(t, os.WriteFile(filepath.Join(root, "src", "alpha", fmt.Sprintf("f%d.go", i)), []byte(text), 0o600))
	}
	var out bytes.Buffer
	cfg := config{goroot: root, kill: true, workers: 2, uri: mongotest.URI(t, mongotest.ReplicaSet)}
	require.NoError(t, etl(t.Context(), db, cfg, &out))
	require.Contains(t, out.String(), "check: a plain walk and go list std say the same")
	require.Regexp(t, `(?m)^[1-9]\d* worker processes were killed`, out.String())
}

// A worker process whose input ends while it still opens the store ends in order: the work may be over that early.
func TestETLWorkerToldToEndAtOnce(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	spec := childSpec{URI: mongotest.URI(t, mongotest.ReplicaSet), DB: db.Name(), Src: t.TempDir(), Workers: 1}
	told, err := json.Marshal(spec)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	for range 5 {
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env = append(os.Environ(), childVariable+"="+string(told))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

// A server without transactions is refused before anything is pushed.
func TestETLNeedsAReplicaSet(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.Standalone)
	err := etl(t.Context(), db, config{goroot: fakeRoot(t), workers: 1}, &bytes.Buffer{})
	require.ErrorIs(t, err, mongoq.ErrInvalidOption)
	require.ErrorContains(t, err, `stage "parse", Fork`)
}

func TestCheckFindsDifferences(t *testing.T) {
	t.Parallel()
	root := fakeRoot(t)
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store, err := mongoq.Open(t.Context(), db, mongoq.Config{})
	require.NoError(t, err)
	std, err := listStd(t.Context(), root)
	require.NoError(t, err)
	require.Equal(t, map[string]int{"alpha": 2, "alpha/beta": 1}, std)
	src := filepath.Join(root, "src")
	files, err := walk(src, std)
	require.NoError(t, err)
	p, err := newPipeline(store, src, db.Collection("files"), 2)
	require.NoError(t, err)
	require.NoError(t, p.run(t.Context(), files, &bytes.Buffer{}))
	sum, err := p.summarise(t.Context())
	require.NoError(t, err)
	require.NoError(t, p.check(t.Context(), sum, root))

	// A summary that is off, a result that is lost, one that is wrong, a broken file that nobody will review.
	off := *sum
	off.std.lines++
	require.ErrorContains(t, p.check(t.Context(), &off, root), "standard library")

	id := bson.D{{Key: "_id", Value: "alpha/a.go"}}
	_, err = p.files.UpdateOne(t.Context(), id, bson.D{{Key: "$set", Value: bson.D{{Key: "lines", Value: 7}}}})
	require.NoError(t, err)
	require.ErrorContains(t, p.check(t.Context(), sum, root), "alpha/a.go")
	_, err = p.files.DeleteOne(t.Context(), id)
	require.NoError(t, err)
	require.ErrorContains(t, p.check(t.Context(), sum, root), "alpha/a.go: not stored")
	fact, err := analyse(Source{File: File{Path: "alpha/a.go", Package: "alpha", Std: true}, Text: []byte("package alpha\n\nfunc A() {\n\treturn\n}\n")})
	require.NoError(t, err)
	_, err = p.files.InsertOne(t.Context(), fact)
	require.NoError(t, err)
	require.NoError(t, p.check(t.Context(), sum, root))

	n, err := p.review.DeadLetters().Purge(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), n)
	require.ErrorContains(t, p.check(t.Context(), sum, root), "alpha/testdata/bad.go")
}
