package mongoq_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/seed-de459a48/mongoq"
)

func ExampleOpen() {
	ctx := context.Background()
	db, drop := exampleDatabase() // client.Database("app")
	defer drop()

	store, err := mongoq.Open(ctx, db, mongoq.Config{
		Collection: "jobs", // all queues of the store live here
		Logger:     slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		panic(err)
	}
	mails, err := store.Queue("mails", mongoq.QueueConfig{Lease: time.Minute, Retention: 24 * time.Hour})
	if err != nil {
		panic(err)
	}
	fmt.Println("opened, with the queue", mails.Name())

	// Close ends those who wait in Reserve, and gives back what was being claimed for them.
	if err := store.Close(ctx); err != nil {
		panic(err)
	}
	_, err = mails.Push(ctx, "too late")
	fmt.Println(err)
	// Output:
	// opened, with the queue mails
	// mongoq: store is closed
}

func ExampleStore_Queues() {
	ctx := context.Background()
	store, done := exampleStore()
	defer done()
	for _, name := range []string{"mails", "reports"} {
		q, err := store.Queue(name, mongoq.QueueConfig{})
		if err != nil {
			panic(err)
		}
		if _, err := q.Push(ctx, "work"); err != nil {
			panic(err)
		}
	}

	all, err := store.Queues(ctx)
	if err != nil {
		panic(err)
	}
	for _, s := range all {
		fmt.Println(s.Q, s.Total)
	}
	// Output:
	// mails 1
	// reports 1
}

func ExampleStore_Get() {
	ctx := context.Background()
	store, done := exampleStore()
	defer done()
	orders, err := store.Queue("orders", mongoq.QueueConfig{})
	if err != nil {
		panic(err)
	}
	id, err := orders.Push(ctx, "two books")
	if err != nil {
		panic(err)
	}
	r, err := orders.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	if err := r.MoveToQ(ctx, "shipping"); err != nil {
		panic(err)
	}

	// Wherever it is now. Queue.Get looks in one queue.
	e, err := store.Get(ctx, id)
	if err != nil {
		panic(err)
	}
	fmt.Printf("in %s, came from %s\n", e.Q, e.Hops[0].From)
	// Output:
	// in shipping, came from orders
}

func ExampleStore_Forgetting() {
	ctx := context.Background()
	store, done := exampleStore()
	defer done()

	f, err := store.Forgetting(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(f.Behind(), f.Undated, len(f.Partitions))
	// Output:
	// false 0 0
}
