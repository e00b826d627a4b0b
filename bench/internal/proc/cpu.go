// Package proc starts the processes that are measured, and reads what they cost.
package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ticksPerSecond is the unit of times in /proc, the same on every Linux that Go runs on (USER_HZ).
const ticksPerSecond = 100

// stat is what matters here of a line of /proc/<pid>/stat.
type stat struct {
	pid, parent int
	dead        bool // it waits for its parent to notice that it has ended
	ticks       int  // user and system, with those of children that it has waited for
}

// parseStat reads such a line. The program's name, in parentheses, may hold anything.
func parseStat(line string) (stat, error) {
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || end < open {
		return stat{}, fmt.Errorf("no program's name in %q", line)
	}
	fields := strings.Fields(line[end+1:]) // from the third field, the state, on
	if len(fields) < 15 {
		return stat{}, fmt.Errorf("too few fields in %q", line)
	}
	var s stat
	var err error
	if s.pid, err = strconv.Atoi(strings.TrimSpace(line[:open])); err != nil {
		return stat{}, err
	}
	if s.parent, err = strconv.Atoi(fields[1]); err != nil {
		return stat{}, err
	}
	s.dead = fields[0] == "Z" || fields[0] == "X"
	for _, f := range fields[11:15] { // utime, stime, cutime, cstime
		n, err := strconv.Atoi(f)
		if err != nil {
			return stat{}, err
		}
		s.ticks += n
	}
	return s, nil
}

// TreeCPU is the CPU time, in seconds, that a process and all its descendants have taken, those that ended included.
func TreeCPU(pid int) (float64, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	children := map[int][]stat{}
	var root *stat
	for _, path := range paths {
		line, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		s, err := parseStat(string(line))
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		if s.pid == pid {
			root = &s
		}
		children[s.parent] = append(children[s.parent], s)
	}
	if root == nil || root.dead {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, os.ErrProcessDone)
	}
	return float64(sumTicks(*root, children)) / ticksPerSecond, nil
}

func sumTicks(s stat, children map[int][]stat) int {
	sum := s.ticks
	for _, c := range children[s.pid] {
		sum += sumTicks(c, children)
	}
	return sum
}
