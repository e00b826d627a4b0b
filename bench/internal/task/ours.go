package task

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// database is where the MongoDB systems keep their jobs.
const database = "bench"

// ours is a store with the queues of the spec.
type ours struct {
	client *mongo.Client
	store  *mongoq.Store
	queues []*mongoq.Queue
	warm   *mongoq.Queue
}

func openOurs(ctx context.Context, spec child.Spec, cfg mongoq.QueueConfig) (*ours, error) {
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI))
	if err != nil {
		return nil, err
	}
	o := &ours{client: client}
	if spec.Unheard {
		if err := refuseSignals(ctx, client); err != nil {
			return nil, err
		}
	}
	// Warnings are shown if the process fails.
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if o.store, err = mongoq.Open(ctx, client.Database(database), mongoq.Config{Logger: log, PartitionHistory: partitioning(spec)}); err != nil {
		return nil, err
	}
	for i := range max(spec.Queues, 1) {
		name := spec.Queue
		if spec.Stage != "" {
			name += "." + spec.Stage
		}
		if spec.Queues > 1 {
			name += strconv.Itoa(i)
		}
		q, err := o.store.Queue(name, cfg)
		if err != nil {
			return nil, err
		}
		o.queues = append(o.queues, q)
	}
	o.warm, err = o.store.Queue("warm", cfg)
	return o, err
}

// refuseSignals makes the collection for signals one that takes none.
func refuseSignals(ctx context.Context, client *mongo.Client) error {
	err := client.Database(database).RunCommand(ctx, bson.D{
		{Key: "create", Value: "mongoq.signals"}, {Key: "capped", Value: true}, {Key: "size", Value: 4096},
		{Key: "validator", Value: bson.D{{Key: "$expr", Value: false}}},
	}).Err()
	var se mongo.ServerError
	if errors.As(err, &se) && se.HasErrorCode(48) { // NamespaceExists: another process has
		return nil
	}
	return err
}

func (o *ours) queue() *mongoq.Queue { return o.queues[0] }

// close gives up whatever is open; nothing measured comes after it.
func (o *ours) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = o.store.Close(ctx)
	_ = o.client.Disconnect(ctx)
}

// collection is where the store's envelopes are.
func (o *ours) collection() *mongo.Collection {
	return o.client.Database(database).Collection("mongoq")
}

func oursLeft(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	names := bson.A{}
	for _, q := range o.queues {
		names = append(names, q.Name())
	}
	n, err := o.collection().CountDocuments(ctx, bson.D{
		{Key: "q", Value: bson.D{{Key: "$in", Value: names}}},
		{Key: "processed", Value: nil},
		// What is delayed lies beside the work and is none of it.
		{Key: "when", Value: bson.D{{Key: "$lt", Value: time.Now().Add(10 * time.Minute)}}},
	})
	if err != nil {
		return child.Report{}, err
	}
	return unmeasured(l, int(n), func() error { return nil })
}
