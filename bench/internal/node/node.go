// Package node runs the peers that are npm packages: their scripts are part of the bench, and what they need is
// installed once into the user's cache folder, at the versions of the lock file.
package node

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"github.com/seed-de459a48/mongoq/bench/internal/proc"
)

//go:embed peers
var peers embed.FS

// Missing says what to install before npm peers can run; "" if they can.
func Missing() string {
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			return "install nodejs and npm"
		}
	}
	return ""
}

var installed struct {
	sync.Once
	dir string
	err error
}

// Command is how a script of the peers is started. The first call installs what they need.
func Command(ctx context.Context, script string, progress func(string)) (proc.Command, error) {
	installed.Do(func() { installed.dir, installed.err = install(ctx, progress) })
	if installed.err != nil {
		return proc.Command{}, installed.err
	}
	node, err := exec.LookPath("node")
	if err != nil {
		return proc.Command{}, err
	}
	return proc.Command{Path: node, Args: []string{script}, Dir: installed.dir}, nil
}

// Version names the program.
func Version() string {
	out, err := exec.Command("node", "--version").Output()
	if err != nil {
		return ""
	}
	return "Node " + strings.TrimSpace(string(out))
}

// install makes a folder with the scripts and their packages, unless it stands. Its name tells its contents, and it
// appears whole or not at all.
func install(ctx context.Context, progress func(string)) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum, err := digest()
	if err != nil {
		return "", err
	}
	base := filepath.Join(cache, "mongoq-bench")
	dir := filepath.Join(base, "peers-"+sum)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	progress("installing the npm packages")
	if err := os.MkdirAll(base, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(base, "installing-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	if err := unpack(work); err != nil {
		return "", err
	}
	npm := exec.CommandContext(ctx, "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
	npm.Dir = work
	if out, err := npm.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm ci: %w\n%s", err, strings.TrimSpace(string(out)))
	}
	if err := os.Rename(work, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		if _, there := os.Stat(dir); there != nil { // another bench was quicker
			return "", err
		}
	}
	return dir, nil
}

// digest is of all embedded files.
func digest() (string, error) {
	h := sha256.New()
	err := eachFile(func(name string, text []byte) error {
		fmt.Fprintf(h, "%s %d\n", name, len(text))
		h.Write(text)
		return nil
	})
	return hex.EncodeToString(h.Sum(nil))[:16], err
}

func unpack(dir string) error {
	return eachFile(func(name string, text []byte) error {
		return os.WriteFile(filepath.Join(dir, name), text, 0o644)
	})
}

func eachFile(f func(name string, text []byte) error) error {
	files, err := peers.ReadDir("peers")
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := peers.ReadFile(path.Join("peers", file.Name()))
		if err == nil {
			err = f(file.Name(), text)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
