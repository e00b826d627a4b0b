package task

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// plain is what one writes by hand on the same driver: an insertOne is a push, a findOneAndUpdate with a lease is a
// claim, a deleteOne is a commit. A job is {_id, when, payload}, with an index on when.
type plain struct {
	client *mongo.Client
	jobs   *mongo.Collection
	warm   *mongo.Collection
}

const plainLease = 30 * time.Second

func openPlain(ctx context.Context, spec child.Spec) (*plain, error) {
	// A connection for each goroutine: the driver's default is 100.
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI).SetMaxPoolSize(uint64(max(100, spec.Workers))))
	if err != nil {
		return nil, err
	}
	journaled := writeconcern.Majority()
	journaled.Journal = new(true)
	db := client.Database(database, options.Database().SetWriteConcern(journaled))
	p := &plain{client: client, jobs: db.Collection(spec.Queue), warm: db.Collection("warm")}
	for _, c := range []*mongo.Collection{p.jobs, p.warm} {
		_, err := c.Indexes().CreateOne(ctx, mongo.IndexModel{Keys: bson.D{{Key: "when", Value: 1}}})
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *plain) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = p.client.Disconnect(ctx)
}

func plainJob(n int) bson.D {
	return bson.D{{Key: "when", Value: time.Now()}, {Key: "payload", Value: payload(n)}}
}

// plainTake claims a job and commits it.
func plainTake(ctx context.Context, c *mongo.Collection) error {
	lease := bson.NewObjectID()
	for {
		now := time.Now()
		var job struct {
			ID      bson.ObjectID `bson:"_id"`
			Payload string        `bson:"payload"`
		}
		err := c.FindOneAndUpdate(ctx,
			bson.D{{Key: "when", Value: bson.D{{Key: "$lte", Value: now}}}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "when", Value: now.Add(plainLease)}, {Key: "lease", Value: lease}}}},
			options.FindOneAndUpdate().SetSort(bson.D{{Key: "when", Value: 1}}),
		).Decode(&job)
		if errors.Is(err, mongo.ErrNoDocuments) {
			continue // there are as many jobs as takers
		}
		if err != nil {
			return err
		}
		res, err := c.DeleteOne(ctx, bson.D{{Key: "_id", Value: job.ID}, {Key: "lease", Value: lease}})
		if err != nil {
			return err
		}
		if res.DeletedCount != 1 {
			return fmt.Errorf("job %s was taken by another", job.ID.Hex())
		}
		return nil
	}
}

func plainInsertMany(ctx context.Context, c *mongo.Collection, cut [2]int) error {
	docs := make([]any, 0, cut[1]-cut[0])
	for n := cut[0]; n < cut[1]; n++ {
		docs = append(docs, plainJob(n))
	}
	_, err := c.InsertMany(ctx, docs, options.InsertMany().SetOrdered(false))
	return err
}
