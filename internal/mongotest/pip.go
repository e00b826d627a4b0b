package mongotest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// A pip is a command that runs pip: a program and its first arguments.
type pip []string

// pips are the commands tried, in order.
var pips = []pip{{"python3", "-m", "pip"}, {"python", "-m", "pip"}, {"pip3"}, {"pip"}}

// pip finds the first pip that runs.
func (f finder) pip(ctx context.Context) (pip, error) {
	var tried []string
	for _, p := range pips {
		program, err := f.program(p[0])
		if err != nil {
			tried = append(tried, p[0]+": not on the PATH")
			continue
		}
		found := append(pip{program}, p[1:]...)
		if err := found.run(ctx, "", "--version"); err != nil {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			tried = append(tried, fmt.Sprintf("%s: %v", strings.Join(p, " "), err))
			continue
		}
		return found, nil
	}
	return nil, fmt.Errorf("%w:\n%s", errNoPip, strings.Join(tried, "\n"))
}

// download fetches the wheel of a requirement into dir and returns its path.
func (p pip) download(ctx context.Context, requirement, dir string) (string, error) {
	err := p.run(ctx, dir, "download", "--no-deps", "--only-binary=:all:",
		"--no-input", "--disable-pip-version-check", "--quiet", "-d", dir, requirement)
	if err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", fmt.Errorf("%w (%s): %w", errPipFailed, strings.Join(p, " "), err)
	}
	wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("%w (%s): it says it succeeded, but left %d wheels", errPipFailed, strings.Join(p, " "), len(wheels))
	}
	return wheels[0], nil
}

// run runs pip, with its own temporary files in tmp if that is not empty. An error holds
// the end of what pip wrote to its standard error.
func (p pip) run(ctx context.Context, tmp string, args ...string) error {
	cmd := exec.CommandContext(ctx, p[0], append(append([]string{}, p[1:]...), args...)...)
	cmd.WaitDelay = time.Second // a child of a killed pip may hold the pipes
	if tmp != "" {
		cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	}
	var problems bytes.Buffer
	cmd.Stderr = &problems
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if text := lastLines(problems.String(), 8); text != "" {
		err = errors.Join(err, errors.New(text))
	}
	return err
}
