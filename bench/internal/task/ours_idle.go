package task

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// idleSettle is how long a worker may take to get all that it needs for waiting.
const idleSettle = 2 * time.Second

// oursIdle runs a pool on an empty queue until the limit. Its jobs are the calls that the server has had for it: by the
// server's profiler, which sees the store's database only, not the driver's own monitoring.
func oursIdle(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	pool, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = runPool(pool, o.queue(), l.Spec.Workers, func(context.Context, *mongoq.Reservation) error { return nil })
	}()
	defer func() {
		stop()
		<-ended
	}()
	if err := pause(ctx, idleSettle); err != nil {
		return child.Report{}, err
	}
	db := o.client.Database(database)
	if err := db.RunCommand(ctx, bson.D{{Key: "profile", Value: 2}}).Err(); err != nil {
		return child.Report{}, err
	}
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	if err := pause(ctx, l.Spec.Limit); err != nil {
		return child.Report{}, err
	}
	report := m.Stop(0, nil)
	if err := db.RunCommand(ctx, bson.D{{Key: "profile", Value: 0}}).Err(); err != nil {
		return child.Report{}, err
	}
	calls, err := db.Collection("system.profile").CountDocuments(ctx, bson.D{
		{Key: "command.profile", Value: bson.D{{Key: "$exists", Value: false}}},
	})
	report.Jobs = int(calls)
	return report, err
}
