package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// peakRSS is the most memory, in MiB, that a process had resident since its program began. That is the kernel's VmHWM:
// ru_maxrss would also count what the bench itself held when it started the process.
func peakRSS(pid int) (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	return parseHighWater(string(status))
}

func parseHighWater(status string) (float64, error) {
	for line := range strings.Lines(status) {
		value, ok := strings.CutPrefix(line, "VmHWM:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 64)
		if err != nil {
			return 0, err
		}
		return kib / 1024, nil
	}
	return 0, errors.New("no VmHWM in the process's status")
}
