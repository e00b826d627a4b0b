package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
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
