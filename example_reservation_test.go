package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-de459a48/mongoq"
)

func ExampleReservation_Commit() {
	ctx := context.Background()
	// Without Retention a commit deletes the envelope.
	sums, done := exampleQueue("sums", mongoq.QueueConfig{Retention: mongoq.KeepForever}, []int{3, 4})
	defer done()

	r, err := sums.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	var n []int
	if err := r.Decode(&n); err != nil {
		panic(err)
	}
	if err := r.Commit(ctx, mongoq.Result(n[0]+n[1])); err != nil {
		panic(err)
	}

	e, err := sums.Get(ctx, r.ID)
	if err != nil {
		panic(err)
	}
	fmt.Println(e.Payload, "->", e.Result, !e.Processed.IsZero())
	// Output:
	// [{"$numberInt":"3"},{"$numberInt":"4"}] -> {"$numberInt":"7"} true
}

// A lease that ran out and was taken by somebody else cannot be used any more: the work is theirs now.
func ExampleReservation_Commit_leaseLost() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()

	slow, err := mails.Reserve(ctx, mongoq.LeaseFor(20*time.Millisecond))
	if err != nil {
		panic(err)
	}
	other, err := mails.Reserve(ctx) // gets it when the lease has run out
	if err != nil {
		panic(err)
	}

	fmt.Println(slow.Commit(ctx))
	fmt.Println(other.Commit(ctx), other.Deliveries, other.Failures[0].Msg)
	// Output:
	// mongoq: lease lost
	// <nil> 2 the consumer was lost: its lease ran out
}

func ExampleQueue_CommitMany() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "a", "b", "c")
	defer done()

	rs, err := mails.ReserveMany(ctx, 3)
	if err != nil {
		panic(err)
	}
	if err := rs[1].Release(ctx); err != nil { // we gave the second one back
		panic(err)
	}

	err = mails.CommitMany(ctx, rs)

	var some *mongoq.BatchError
	if errors.As(err, &some) {
		for _, f := range some.Failed {
			fmt.Println(textOf(&rs[f.Index].Envelope), f.Err)
		}
	}
	// Output:
	// b mongoq: lease lost
}

func ExampleReservation_Rollback() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{
		Retry: func() backoff.BackOff {
			return backoff.WithMaxRetries(backoff.NewConstantBackOff(50*time.Millisecond), 2)
		},
	}, "hello")
	defer done()

	for range 3 { // the first delivery and two retries
		r, err := mails.Reserve(ctx)
		if err != nil {
			panic(err)
		}
		fmt.Println("delivery with retries", r.Retries)
		if err := r.Rollback(ctx, errors.New("no answer")); err != nil {
			panic(err)
		}
	}

	s, err := mails.Stats(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println("dead letters:", s.Dead)
	// Output:
	// delivery with retries 0
	// delivery with retries 1
	// delivery with retries 2
	// dead letters: 1
}

// A cause wrapped in backoff.Permanent: no retry would help.
func ExampleReservation_Rollback_permanent() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()

	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	if err := r.Rollback(ctx, backoff.Permanent(errors.New("no such address"))); err != nil {
		panic(err)
	}

	for e, err := range mails.DeadLetters().List(ctx) {
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s from %s: %s\n", e.Dead.Kind, e.Dead.From, e.Dead.Msg)
	}
	// Output:
	// permanent from mails: no such address
}

// After says how long to wait in place of the policy, as a server's Retry-After does. A rollback may also keep what
// was found out so far.
func ExampleAfter() {
	ctx := context.Background()
	calls, done := exampleQueue("calls", mongoq.QueueConfig{}, "page 1")
	defer done()

	r, err := calls.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	err = r.Rollback(ctx, errors.New("429 too many requests"),
		mongoq.After(50*time.Millisecond), mongoq.Payload("page 2"))
	if err != nil {
		panic(err)
	}

	r, err = calls.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(&r.Envelope), r.Retries, r.Failures[0].Msg)
	// Output:
	// page 2 1 429 too many requests
}

// Release gives an envelope back without counting a failure: at a shutdown, or to be done later.
func ExampleReservation_Release() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()

	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	if err := r.Release(ctx, mongoq.Delay(50*time.Millisecond)); err != nil { // the office opens in 50 ms
		panic(err)
	}

	r, err = mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println("retries:", r.Retries, "deliveries:", r.Deliveries)
	// Output:
	// retries: 0 deliveries: 2
}

// Extend keeps the lease alive while the work goes on.
func ExampleReservation_Extend() {
	ctx := context.Background()
	videos, done := exampleQueue("videos", mongoq.QueueConfig{Lease: 200 * time.Millisecond}, "a film")
	defer done()

	r, err := videos.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	for range 3 {
		time.Sleep(100 * time.Millisecond) // a part of the work
		if err := r.Extend(ctx, 200*time.Millisecond); err != nil {
			panic(err) // ErrLeaseLost: somebody else has it, stop working
		}
	}
	fmt.Println(r.Commit(ctx))
	// Output:
	// <nil>
}

// MoveToQ hands an envelope on to the next queue in one atomic step: there is no moment at which it is in both, or in
// none.
func ExampleReservation_MoveToQ() {
	ctx := context.Background()
	store, done := exampleStore()
	defer done()
	read, err := store.Queue("read", mongoq.QueueConfig{})
	if err != nil {
		panic(err)
	}
	count, err := store.Queue("count", mongoq.QueueConfig{})
	if err != nil {
		panic(err)
	}
	if _, err := read.Push(ctx, "file.txt"); err != nil {
		panic(err)
	}

	r, err := read.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	err = r.MoveToQ(ctx, "count",
		mongoq.Payload("the text of the file"), // in the place of the name
		mongoq.AddHeaders(map[string]string{"file": textOf(&r.Envelope)}))
	if err != nil {
		panic(err)
	}

	r, err = count.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Headers["file"], "|", textOf(&r.Envelope), "|", r.Moves, "move from", r.Hops[0].From)
	// Output:
	// file.txt | the text of the file | 1 move from read
}

func ExampleReservation_DeadLetter() {
	ctx := context.Background()
	orders, done := exampleQueue("orders", mongoq.QueueConfig{DeadLetter: "clerk"}, "-3 books")
	defer done()

	r, err := orders.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	if err := r.DeadLetter(ctx, errors.New("a clerk should look at this")); err != nil {
		panic(err)
	}

	for e, err := range orders.DeadLetters().List(ctx) {
		if err != nil {
			panic(err)
		}
		fmt.Println(e.Q, e.Dead.Kind, e.Dead.Msg)
	}
	// Output:
	// clerk explicit a clerk should look at this
}
