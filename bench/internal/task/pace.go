package task

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// produce pushes at the pace of the spec. It is an open loop: a slow push holds up no other. Each falls at random into
// its own slot, so that they don't beat in time with anybody's polling. push gets the time that the payload tells,
// which is now or, for delayed jobs, when it is due.
func produce(ctx context.Context, l *child.Link, push func(ctx context.Context, stamp time.Time) error) (child.Report, error) {
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	t := &child.Timings{}
	slot := time.Duration(float64(time.Second) / l.Spec.PerSecond)
	errs := make(chan error, l.Spec.Jobs)
	var wg sync.WaitGroup
	for i := range l.Spec.Jobs {
		at := m.Start().Add(time.Duration(i)*slot + rand.N(slot))
		if err := pause(ctx, time.Until(at)); err != nil {
			return child.Report{}, err
		}
		wg.Go(func() {
			began := time.Now()
			// Due times have milliseconds in most stores: a fraction would count as earliness.
			stamp := began
			if l.Spec.Delay > 0 {
				stamp = began.Add(l.Spec.Delay).Truncate(time.Millisecond)
			}
			errs <- push(ctx, stamp)
			t.Add(time.Since(began))
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return child.Report{}, err
		}
	}
	return m.Stop(l.Spec.Jobs, t), nil
}

// lateness notes how long after its stamp a job starts.
type lateness struct {
	*counter
	timings child.Timings
}

func newLateness(jobs int) *lateness { return &lateness{counter: newCounter(jobs)} }

// started is called first thing in a handler.
func (l *lateness) started(now time.Time, payload string) error {
	stamp, err := readStamp(payload)
	if err != nil {
		return err
	}
	l.timings.Add(now.Sub(stamp))
	l.add()
	return nil
}

// pause waits for d or for ctx to end.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
