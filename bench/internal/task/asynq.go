package task

import (
	"context"
	"time"

	"github.com/hibiken/asynq"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

const (
	asynqType        = "bench"
	asynqQueue       = "default"
	asynqFillWorkers = 32 // it has no push of many
)

// asynqRedis gives each of n goroutines a connection of its own: the library's default is ten for each core.
func asynqRedis(spec child.Spec, n int) asynq.RedisClientOpt {
	return asynq.RedisClientOpt{Addr: spec.URI, PoolSize: max(n, 20)}
}

// quiet is a logger that says nothing.
type quiet struct{}

func (quiet) Debug(...any) {}
func (quiet) Info(...any)  {}
func (quiet) Warn(...any)  {}
func (quiet) Error(...any) {}
func (quiet) Fatal(...any) {}

func asynqFill(ctx context.Context, l *child.Link) (child.Report, error) {
	client := asynq.NewClient(asynqRedis(l.Spec, asynqFillWorkers))
	defer client.Close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		_, err := load{workers: asynqFillWorkers, jobs: l.Spec.Jobs}.run(ctx, func(ctx context.Context, n int) error {
			_, err := client.EnqueueContext(ctx, asynq.NewTask(asynqType, []byte(payload(n))))
			return err
		})
		return err
	})
}

// asynqSize is how many tasks are in the queue, whatever their state.
func asynqSize(spec child.Spec) (int, error) {
	inspector := asynq.NewInspector(asynqRedis(spec, 1))
	defer inspector.Close()
	info, err := inspector.GetQueueInfo(asynqQueue)
	if err != nil {
		return 0, err
	}
	return info.Size, nil
}

func asynqLeft(_ context.Context, l *child.Link) (child.Report, error) {
	n, err := asynqSize(l.Spec)
	if err != nil {
		return child.Report{}, err
	}
	return unmeasured(l, n, func() error { return nil })
}

// asynqDrain handles tasks until all are handled and none is left in the queue.
func asynqDrain(ctx context.Context, l *child.Link) (child.Report, error) {
	server := asynq.NewServer(asynqRedis(l.Spec, l.Spec.Workers), asynq.Config{Concurrency: l.Spec.Workers, Logger: quiet{}})
	if err := server.Ping(); err != nil { // it connects
		return child.Report{}, err
	}
	c := newCounter(l.Spec.Jobs)
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	running, cancel := c.until(ctx, l)
	defer cancel()
	err = server.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
		c.add()
		return nil
	}))
	if err != nil {
		return child.Report{}, err
	}
	<-running.Done()
	if c.count() == l.Spec.Jobs {
		for size := 1; size > 0 && ctx.Err() == nil; {
			if size, err = asynqSize(l.Spec); err != nil {
				return child.Report{}, err
			}
		}
	}
	report := c.report(m, nil)
	server.Shutdown()
	return report, nil
}

// asynqProduce enqueues at a pace.
func asynqProduce(ctx context.Context, l *child.Link) (child.Report, error) {
	client := asynq.NewClient(asynqRedis(l.Spec, 20))
	defer client.Close()
	if err := client.Ping(); err != nil {
		return child.Report{}, err
	}
	return produce(ctx, l, func(ctx context.Context, stamp time.Time) error {
		var opts []asynq.Option
		if l.Spec.Delay > 0 {
			opts = append(opts, asynq.ProcessAt(stamp))
		}
		_, err := client.EnqueueContext(ctx, asynq.NewTask(asynqType, []byte(stamped(stamp))), opts...)
		return err
	})
}

// asynqConsume handles tasks with asynq's defaults until it is told to stop.
func asynqConsume(ctx context.Context, l *child.Link) (child.Report, error) {
	late := newLateness(l.Spec.Jobs)
	server := asynq.NewServer(asynqRedis(l.Spec, 20), asynq.Config{Logger: quiet{}})
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	err = server.Start(asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		return late.started(time.Now(), string(t.Payload()))
	}))
	if err != nil {
		return child.Report{}, err
	}
	late.announce(ctx, l)
	report := late.report(m, &late.timings)
	server.Shutdown()
	return report, nil
}
