package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// The examples of this package share one server, started when the first of them runs: that of MONGODB_URI if it is a
// replica set, since one example has a transaction, else an embedded one, which ends with the process.
var exampleClient = sync.OnceValue(func() *mongo.Client {
	ctx := context.Background()
	client, stop, err := mongotest.Connect(ctx)
	if err != nil {
		panic(err)
	}
	raw, err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Raw()
	if err != nil {
		panic(err)
	}
	_, single := raw.Lookup("setName").StringValueOK()
	_, cluster := raw.Lookup("msg").StringValueOK()
	if single || cluster {
		return client
	}
	stop()
	server, err := mongotest.Start(ctx, mongotest.Options{ReplicaSet: 1})
	if err != nil {
		panic(err)
	}
	client, err = mongo.Connect(options.Client().ApplyURI(server.URI()))
	if err != nil {
		panic(err)
	}
	return client
})

// exampleDatabase gives an example an empty database, and what drops it.
func exampleDatabase() (db *mongo.Database, drop func()) {
	db = exampleClient().Database(fmt.Sprintf("mongoq_example_%08x", rand.Uint32()))
	return db, func() {
		if err := db.Drop(context.Background()); err != nil {
			panic(err)
		}
	}
}

// exampleStore gives an example a store in an empty database, and what ends both.
func exampleStore() (store *mongoq.Store, done func()) {
	db, drop := exampleDatabase()
	store, err := mongoq.Open(context.Background(), db, mongoq.Config{})
	if err != nil {
		panic(err)
	}
	return store, func() {
		err := store.Close(context.Background())
		drop()
		if err != nil {
			panic(err)
		}
	}
}

// exampleQueue gives an example a queue that holds some payloads, and what ends it.
func exampleQueue(name string, cfg mongoq.QueueConfig, payloads ...any) (q *mongoq.Queue, done func()) {
	store, done := exampleStore()
	q, err := store.Queue(name, cfg)
	if err == nil && len(payloads) > 0 {
		_, err = q.PushMany(context.Background(), payloads)
	}
	if err != nil {
		panic(errors.Join(err, errors.New("in exampleQueue")))
	}
	return q, done
}

// textOf is a payload that is a string.
func textOf(e *mongoq.Envelope) string {
	var s string
	if err := e.Decode(&s); err != nil {
		return err.Error()
	}
	return s
}
