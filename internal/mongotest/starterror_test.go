package mongotest

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// script writes an executable shell script. Meanwhile no process is forked: one that had
// the file open for writing would make the script "text file busy".
func script(t *testing.T, path, body string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o755))
}

// fakeMongod starts a script in place of mongod.
func fakeMongod(t *testing.T, ctx context.Context, body string, o Options) error {
	t.Helper()
	dir := t.TempDir()
	script(t, filepath.Join(dir, "mongod"), body)
	l := launcher{finder: finder{path: dir}, port: freePort}
	s, err := l.start(ctx, o)
	require.Nil(t, s)
	return err
}

func TestStartErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body string
		want []string
	}{
		"shared library": {
			body: "echo 'mongod: error while loading shared libraries: libcrypto.so.3: cannot open shared object file' >&2; exit 127",
			want: []string{"exit status 127", "libcrypto.so.3", "apt-get install libssl3 libcurl4", "MONGODB_URI", "PATH"},
		},
		"old libc": {
			body: "echo \"mongod: /lib/libc.so.6: version \\`GLIBC_2.34' not found\" >&2; exit 1",
			want: []string{"exit status 1", "too old", "Debian 12", "MONGODB_URI"},
		},
		"no AVX":    {body: "kill -ILL $$", want: []string{"signal: illegal instruction", "AVX", "mongod wrote no log"}},
		"disk full": {body: "echo 'x: No space left on device'; exit 14", want: []string{"exit status 14", "TMPDIR"}},
		"unknown":   {body: "i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done; exit 3", want: []string{"exit status 3", "\n  line 80\n", "line 99"}},
		"ends well": {body: "exit 0", want: []string{"exit status 0"}},
		"cannot be loaded": {
			// What the shell says of a program whose loader is not there.
			body: "echo 'mongotest-launch: 1: exec: /x/mongod: not found'; exit 127",
			want: []string{"glibc", "Alpine"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := fakeMongod(t, t.Context(), c.body, Options{})
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
			require.NotContains(t, err.Error(), "line 79")
		})
	}
}

func TestStartTakesTooLong(t *testing.T) {
	t.Parallel()
	ctx, end := context.WithCancelCause(t.Context())
	defer end(nil)
	busy := writerFunc(func(p []byte) (int, error) {
		end(context.DeadlineExceeded) // once it has said so
		return len(p), nil
	})
	err := fakeMongod(t, ctx, "echo still busy; exec sleep 1000", Options{Log: busy})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "still busy")
}
