package proc

import (
	"strings"
	"sync"
)

// tailSize is how much of a process's errors is kept.
const tailSize = 4 << 10

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	last []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = append(t.last, b...)
	if extra := len(t.last) - tailSize; extra > 0 {
		t.last = append(t.last[:0], t.last[extra:]...)
	}
	return len(b), nil
}

// text is what is kept, to be put behind an error.
func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := strings.TrimSpace(string(t.last))
	if s == "" {
		return ""
	}
	return "\n" + s
}
