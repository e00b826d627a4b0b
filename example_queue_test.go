package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
)

// Peek shows what would be taken next, and takes nothing.
func ExampleQueue_Peek() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "one", "two", "three")
	defer done()

	next, err := mails.Peek(ctx, 2)
	if err != nil {
		panic(err)
	}
	for _, e := range next {
		fmt.Println(textOf(e))
	}
	// Output:
	// one
	// two
}

func ExampleQueue_Get() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()
	id, err := mails.Push(ctx, "hello")
	if err != nil {
		panic(err)
	}

	e, err := mails.Get(ctx, id)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(e))
	_, err = mails.Get(ctx, bson.NewObjectID())
	fmt.Println(errors.Is(err, mongoq.ErrNotFound))
	// Output:
	// hello
	// true
}

func ExampleQueue_Remove() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()
	id, err := mails.Push(ctx, "hello")
	if err != nil {
		panic(err)
	}
	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}

	fmt.Println(mails.Remove(ctx, id)) // somebody works on it
	if err := r.Release(ctx); err != nil {
		panic(err)
	}
	fmt.Println(mails.Remove(ctx, id))
	// Output:
	// mongoq: envelope is reserved
	// <nil>
}

func ExampleQueue_Purge() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "one", "two", "three")
	defer done()
	if _, err := mails.Reserve(ctx); err != nil {
		panic(err)
	}

	n, err := mails.Purge(ctx) // what waits; not what somebody holds
	if err != nil {
		panic(err)
	}
	fmt.Println(n)
	// Output:
	// 2
}

// Pause holds for every process that uses the queue, until Resume.
func ExampleQueue_Pause() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()

	if err := mails.Pause(ctx); err != nil {
		panic(err)
	}
	_, err := mails.TryReserve(ctx)
	fmt.Println(err)

	if err := mails.Resume(ctx); err != nil {
		panic(err)
	}
	r, err := mails.TryReserve(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(&r.Envelope))
	// Output:
	// mongoq: queue is paused
	// hello
}

func ExampleQueue_Resume() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()
	if err := mails.Pause(ctx); err != nil {
		panic(err)
	}

	go func() {
		time.Sleep(50 * time.Millisecond)
		if err := mails.Resume(ctx); err != nil {
			panic(err)
		}
	}()
	r, err := mails.Reserve(ctx) // waits for the end of the pause
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(&r.Envelope))
	// Output:
	// hello
}

func ExampleQueue_Stats() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "one", "two")
	defer done()
	if _, err := mails.Push(ctx, "tomorrow", mongoq.Delay(24*time.Hour)); err != nil {
		panic(err)
	}
	if _, err := mails.Reserve(ctx); err != nil {
		panic(err)
	}

	s, err := mails.Stats(ctx) // bounded at 10,000 a count; mongoq.Exact() counts to the end
	if err != nil {
		panic(err)
	}
	fmt.Printf("total %d: ready %d, scheduled %d, reserved %d\n", s.Total, s.Ready, s.Scheduled, s.Reserved)
	fmt.Println("capped:", s.Capped, "paused:", s.Paused)
	// Output:
	// total 3: ready 1, scheduled 1, reserved 1
	// capped: false paused: false
}
