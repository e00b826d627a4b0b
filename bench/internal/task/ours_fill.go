package task

import (
	"context"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

const (
	fillBatch   = 1000
	fillWorkers = 2
)

// oursFill pushes jobs, as many to each queue, due at once or after the spec's delay.
func oursFill(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{Delay: l.Spec.Delay})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		for _, share := range shares(l.Spec.Jobs, o.queues) {
			cuts := batches(share.jobs, fillBatch)
			_, err := load{workers: fillWorkers, jobs: len(cuts)}.run(ctx, func(ctx context.Context, n int) error {
				_, err := share.queue.PushMany(ctx, payloadRange(cuts[n]))
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// share is what one of several queues gets.
type share struct {
	queue *mongoq.Queue
	jobs  int
}

func shares(jobs int, queues []*mongoq.Queue) []share {
	all := make([]share, len(queues))
	for i, q := range queues {
		all[i] = share{queue: q, jobs: jobs / len(queues)}
		if i < jobs%len(queues) {
			all[i].jobs++
		}
	}
	return all
}

func payloadRange(cut [2]int) []any {
	all := make([]any, 0, cut[1]-cut[0])
	for n := cut[0]; n < cut[1]; n++ {
		all = append(all, payload(n))
	}
	return all
}
