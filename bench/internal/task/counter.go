package task

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// counter counts handled jobs up to a goal.
type counter struct {
	goal    int64
	n       atomic.Int64
	last    atomic.Int64  // when the last one that counts was handled, UnixNano
	reached chan struct{} // closed at the goal
}

func newCounter(goal int) *counter {
	return &counter{goal: int64(goal), reached: make(chan struct{})}
}

// add counts one. What comes after the goal does not move its time.
func (c *counter) add() {
	n := c.n.Add(1)
	if n <= c.goal {
		c.last.Store(time.Now().UnixNano())
	}
	if n == c.goal {
		close(c.reached)
	}
}

// count is how many there were, at most the goal.
func (c *counter) count() int { return int(min(c.n.Load(), c.goal)) }

// announce tells the bench the count whenever it has changed, until ctx ends, and then once more.
func (c *counter) announce(ctx context.Context, l *child.Link) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	said := 0
	for more := true; more; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			more = false
		}
		if n := int(c.n.Load()); n != said {
			l.Count(n)
			said = n
		}
	}
}

// until gives a context that ends with ctx, at the limit, or when the counter reaches its goal: where others work on
// the same jobs, only the bench knows when all are done.
func (c *counter) until(ctx context.Context, l *child.Link) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if l.Spec.Limit > 0 {
		time.AfterFunc(l.Spec.Limit, cancel)
	}
	if l.Spec.Shared {
		go c.announce(ctx, l)
	} else {
		go func() {
			select {
			case <-c.reached:
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	return ctx, cancel
}

// report is the meter's, with the time of the last job that counts.
func (c *counter) report(m *child.Meter, t *child.Timings) child.Report {
	r := m.Stop(c.count(), t)
	r.Handled = c.last.Load()
	return r
}
