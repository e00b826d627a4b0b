package task

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

func plainFill(ctx context.Context, l *child.Link) (child.Report, error) {
	p, err := openPlain(ctx, l.Spec)
	if err != nil {
		return child.Report{}, err
	}
	defer p.close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		cuts := batches(l.Spec.Jobs, fillBatch)
		_, err := load{workers: fillWorkers, jobs: len(cuts)}.run(ctx, func(ctx context.Context, n int) error {
			return plainInsertMany(ctx, p.jobs, cuts[n])
		})
		return err
	})
}

func plainLeft(ctx context.Context, l *child.Link) (child.Report, error) {
	p, err := openPlain(ctx, l.Spec)
	if err != nil {
		return child.Report{}, err
	}
	defer p.close()
	n, err := p.jobs.CountDocuments(ctx, bson.D{})
	if err != nil {
		return child.Report{}, err
	}
	return unmeasured(l, int(n), func() error { return nil })
}

func plainPush(ctx context.Context, l *child.Link) (child.Report, error) {
	p, err := openPlain(ctx, l.Spec)
	if err != nil {
		return child.Report{}, err
	}
	defer p.close()
	push := func(c *mongo.Collection) func(context.Context, int) error {
		return func(ctx context.Context, n int) error {
			_, err := c.InsertOne(ctx, plainJob(n))
			return err
		}
	}
	if err := warm(ctx, l, push(p.warm)); err != nil {
		return child.Report{}, err
	}
	return timedLoad(ctx, l, push(p.jobs))
}

func plainPushMany(ctx context.Context, l *child.Link) (child.Report, error) {
	p, err := openPlain(ctx, l.Spec)
	if err != nil {
		return child.Report{}, err
	}
	defer p.close()
	insert := func(c *mongo.Collection) func(context.Context, int) error {
		return func(ctx context.Context, n int) error {
			return plainInsertMany(ctx, c, [2]int{n * l.Spec.Batch, (n + 1) * l.Spec.Batch})
		}
	}
	return timedBatches(ctx, l, insert(p.warm), insert(p.jobs))
}

func plainReserve(ctx context.Context, l *child.Link) (child.Report, error) {
	p, err := openPlain(ctx, l.Spec)
	if err != nil {
		return child.Report{}, err
	}
	defer p.close()
	err = warm(ctx, l, func(ctx context.Context, n int) error {
		if _, err := p.warm.InsertOne(ctx, plainJob(n)); err != nil {
			return err
		}
		return plainTake(ctx, p.warm)
	})
	if err != nil {
		return child.Report{}, err
	}
	return timedLoad(ctx, l, func(ctx context.Context, _ int) error { return plainTake(ctx, p.jobs) })
}
