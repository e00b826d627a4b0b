package mongotest

import (
	"io"
	"os"
	"strings"
)

const (
	tailLines = 20
	tailBytes = 16 << 10
)

// log is what this run of mongod wrote so far, its last megabyte at most.
func (p *process) log() string { return readTail(p.logPath, p.logFrom, 1<<20) }

// tail is the end of the log, made to be appended to an error.
func (p *process) tail() string {
	text := lastLines(readTail(p.logPath, p.logFrom, tailBytes), tailLines)
	if text == "" {
		return "\nmongod wrote no log"
	}
	return "\nlast lines of its log:\n  " + strings.ReplaceAll(text, "\n", "\n  ")
}

// lastLines is the end of text, at most n lines.
func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// readTail reads the last n bytes of a file, nothing before offset from. What
// cannot be read is empty: a log is only evidence.
func readTail(path string, from, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	from = max(from, info.Size()-n)
	b, err := io.ReadAll(io.NewSectionReader(f, from, info.Size()-from))
	if err != nil {
		return ""
	}
	return string(b)
}
