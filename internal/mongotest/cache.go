package mongotest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// A cache is the folder that holds one version of mongod. mongod comes to stand in it by a
// rename, after its content was checked, so whatever stands there is whole.
type cache struct {
	dir  string
	size int64 // of mongod, in bytes
}

func (f finder) cache() (cache, error) {
	dir, err := f.cacheDir()
	if err != nil {
		return cache{}, err
	}
	return cache{dir: filepath.Join(dir, "mongoq", f.pack.key), size: f.pack.binarySize}, nil
}

func (c cache) mongod() string { return filepath.Join(c.dir, "mongod") }

// check returns nil if mongod is there. It looks at the size only, since hashing 141 MB
// would double the time of a start; a copy that was cut short by a full disk or by hand
// is found by that.
func (c cache) check() error {
	info, err := os.Stat(c.mongod())
	switch {
	case os.IsNotExist(err):
		return fmt.Errorf("%s: not there", c.mongod())
	case err != nil:
		return err
	case info.Size() != c.size:
		return fmt.Errorf("%s: %d bytes instead of %d, not used", c.mongod(), info.Size(), c.size)
	case info.Mode()&0o100 == 0:
		return fmt.Errorf("%s: not executable, not used", c.mongod())
	}
	return nil
}

// lock waits until no other process fills this cache. waiting is called once if it has to
// wait. The lock ends with unlock or with the process.
func (c cache) lock(ctx context.Context, waiting func()) (unlock func(), err error) {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	// The file stays: removing it would let two processes lock two files of that name.
	file, err := os.OpenFile(filepath.Join(c.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock of the cache folder: %w", err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for first := true; ; first = false {
		ok, err := tryLock(file)
		if err != nil {
			file.Close()
			return nil, fmt.Errorf("locking %s: %w", file.Name(), err)
		}
		if ok {
			return func() { file.Close() }, nil
		}
		if first {
			waiting()
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("waiting for the process that holds %s: %w", file.Name(), context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// workDir makes a folder beside mongod for what is being fetched. It removes those that
// killed processes left; the caller holds the lock.
func (c cache) workDir() (string, error) {
	old, _ := filepath.Glob(filepath.Join(c.dir, "fetch-*"))
	for _, dir := range old {
		_ = os.RemoveAll(dir) // it costs space only
	}
	return os.MkdirTemp(c.dir, "fetch-")
}
