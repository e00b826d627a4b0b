package task

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// grace is how long an operation may take beyond the limit before the run counts as failed.
const grace = 2 * time.Minute

// load is a closed loop: workers, each of which does one operation after the other.
type load struct {
	workers int
	jobs    int           // operations in all
	limit   time.Duration // after which none is begun; 0: none
	start   time.Time
	timings *child.Timings // may be nil
}

// run does op for each number below jobs, and returns how many were done. The first error ends it.
func (ld load) run(ctx context.Context, op func(ctx context.Context, n int) error) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if ld.limit > 0 {
		var end context.CancelFunc
		ctx, end = context.WithTimeout(ctx, ld.limit+grace)
		defer end()
	}
	var next, done atomic.Int64
	var wg sync.WaitGroup
	for range ld.workers {
		wg.Go(func() {
			for ctx.Err() == nil && (ld.limit == 0 || time.Since(ld.start) < ld.limit) {
				n := int(next.Add(1)) - 1
				if n >= ld.jobs {
					return
				}
				began := time.Now()
				if err := op(ctx, n); err != nil {
					cancel(err)
					return
				}
				if ld.timings != nil {
					ld.timings.Add(time.Since(began))
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	return int(done.Load()), context.Cause(ctx)
}

// timedLoad measures the loop that the spec asks for: as many workers and jobs, within the limit.
func timedLoad(ctx context.Context, l *child.Link, op func(ctx context.Context, n int) error) (child.Report, error) {
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	t := &child.Timings{}
	done, err := load{workers: l.Spec.Workers, jobs: l.Spec.Jobs, limit: l.Spec.Limit, start: m.Start(), timings: t}.run(ctx, op)
	return m.Stop(done, t), err
}

// warm does op a little before anything is measured: connections are opened, code and caches are warm.
func warm(ctx context.Context, l *child.Link, op func(ctx context.Context, n int) error) error {
	_, err := load{workers: l.Spec.Workers, jobs: 50 + 4*l.Spec.Workers}.run(ctx, op)
	return err
}

// unmeasured is the report of a task that prepares.
func unmeasured(l *child.Link, jobs int, do func() error) (child.Report, error) {
	m, err := l.Begin()
	if err == nil {
		err = do()
	}
	if err != nil {
		return child.Report{}, err
	}
	return m.Stop(jobs, nil), nil
}

// batches cuts n jobs into batches of at most size, and gives the bounds of each.
func batches(n, size int) [][2]int {
	var all [][2]int
	for from := 0; from < n; from += size {
		all = append(all, [2]int{from, min(from+size, n)})
	}
	return all
}
