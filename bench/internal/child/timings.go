package child

import (
	"slices"
	"sync"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/figure"
)

// Timings collects how long single calls took. Many goroutines may add.
type Timings struct {
	mu sync.Mutex
	ms []float64
}

// Add notes one call.
func (t *Timings) Add(d time.Duration) {
	t.mu.Lock()
	t.ms = append(t.ms, float64(d)/float64(time.Millisecond))
	t.mu.Unlock()
}

// Len is how many there are.
func (t *Timings) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.ms)
}

func (t *Timings) fill(r *Report) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.Sort(t.ms)
	r.Timed = len(t.ms)
	r.P50 = figure.Percentile(t.ms, 50)
	r.P95 = figure.Percentile(t.ms, 95)
	r.P99 = figure.Percentile(t.ms, 99)
}
