package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
)

// machine says what the figures were measured on.
func machine() string {
	parts := []string{fmt.Sprintf("%d cores", runtime.NumCPU())}
	if model := procField("/proc/cpuinfo", "model name"); model != "" {
		parts[0] += " of " + model
	}
	kib, err := strconv.Atoi(strings.TrimSuffix(procField("/proc/meminfo", "MemTotal"), " kB"))
	if err == nil {
		parts = append(parts, fmt.Sprintf("%d GiB of memory", (kib+1<<19)>>20))
	}
	return strings.Join(append(parts, runtime.GOOS+"/"+runtime.GOARCH, runtime.Version()), ", ")
}

// requiredCores is what the figures that must be reached are for.
const requiredCores = 2

// oddities are what sets this machine apart from one whose figures count.
func oddities() []string {
	var all []string
	if n := runtime.NumCPU(); n != requiredCores {
		all = append(all, fmt.Sprintf("what must be reached is for %d cores; here are %d", requiredCores, n))
	}
	const tmpfs = 0x01021994
	var fs syscall.Statfs_t
	if err := syscall.Statfs(os.TempDir(), &fs); err == nil && fs.Type == tmpfs {
		all = append(all, "the temporary folder is in memory: a journal there costs nothing and outlasts nothing")
	}
	return all
}

// peers are the versions of those that are built into the bench.
func peers() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	var all []string
	for _, m := range info.Deps {
		switch m.Path {
		case "github.com/riverqueue/river", "github.com/hibiken/asynq", "go.mongodb.org/mongo-driver/v2":
			all = append(all, m.Path+" "+m.Version)
		}
	}
	return strings.Join(all, ", ")
}

// procField reads the first field of that name; "" if there is none.
func procField(file, name string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		key, value, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
