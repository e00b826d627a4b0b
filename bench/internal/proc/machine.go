package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Busy is the CPU time, in seconds, that all processors have been busy with since the machine started, with what its host
// gave to others.
func Busy() (float64, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return parseBusy(string(text))
}

// parseBusy sums up the first line, of all processors: user, nice, system, idle, iowait, irq, softirq, steal.
func parseBusy(text string) (float64, error) {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q", line)
	}
	sum := 0
	for i, f := range fields[1:9] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		if i != 3 && i != 4 {
			sum += n
		}
	}
	return float64(sum) / ticksPerSecond, nil
}
