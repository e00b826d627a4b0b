package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-de459a48/mongoq"
)

// deadLetterNext dead-letters the next envelope of a queue.
func deadLetterNext(ctx context.Context, q *mongoq.Queue, why string) *mongoq.Envelope {
	r, err := q.Reserve(ctx)
	if err == nil {
		err = r.DeadLetter(ctx, errors.New(why))
	}
	if err != nil {
		panic(err)
	}
	return &r.Envelope
}

func ExampleDeadLetters_List() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()
	deadLetterNext(ctx, mails, "no such address")

	for e, err := range mails.DeadLetters().List(ctx) {
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s: %s from %s in %s: %s\n", textOf(e), e.Dead.Kind, e.Dead.From, e.Q, e.Dead.Msg)
	}
	// Output:
	// hello: explicit from mails in mails.dead: no such address
}

// Redrive puts dead letters back to where they came from, with a fresh count of retries.
func ExampleDeadLetters_Redrive() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "for ada", "for bob", "for cleo")
	defer done()
	ada := deadLetterNext(ctx, mails, "mailbox full")
	deadLetterNext(ctx, mails, "mailbox full")
	deadLetterNext(ctx, mails, "mailbox full")

	n, err := mails.DeadLetters().Redrive(ctx, mongoq.IDs(ada.ID)) // this one
	if err != nil {
		panic(err)
	}
	fmt.Println(n)
	n, err = mails.DeadLetters().Redrive(ctx) // all that are left
	if err != nil {
		panic(err)
	}
	fmt.Println(n)
	// Output:
	// 1
	// 2
}

// A selection is redriven, mended on the way. Options choose by time, id, kind and header.
func ExampleDeadLetters_Redrive_mended() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "for ada", "for bob")
	defer done()
	deadLetterNext(ctx, mails, "mailbox full")
	deadLetterNext(ctx, mails, "mailbox full")

	n, err := mails.DeadLetters().Redrive(ctx,
		mongoq.Kinds(mongoq.DeadExplicit), mongoq.Since(time.Now().Add(-time.Hour)), mongoq.Rate(1000),
		mongoq.Rewrite(func(e *mongoq.Envelope) (any, error) { return "shorter, " + textOf(e), nil }))
	if err != nil {
		panic(err)
	}
	for range n {
		e, err := mails.Pop(ctx)
		if err != nil {
			panic(err)
		}
		fmt.Println(textOf(e))
	}
	// Unordered output:
	// shorter, for ada
	// shorter, for bob
}

func ExampleDeadLetters_Count() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "for ada", "for bob", "for cleo")
	defer done()
	deadLetterNext(ctx, mails, "no such address")
	deadLetterNext(ctx, mails, "no such address")
	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	if err := r.Rollback(ctx, backoff.Permanent(errors.New("refused"))); err != nil {
		panic(err)
	}

	counts, err := mails.DeadLetters().Count(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(counts)
	// Output:
	// map[explicit:2 permanent:1]
}

func ExampleDeadLetters_Page() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "for ada", "for bob", "for cleo")
	defer done()
	for range 3 {
		deadLetterNext(ctx, mails, "no such address")
	}

	first, err := mails.DeadLetters().Page(ctx, mongoq.Limit(2))
	if err != nil {
		panic(err)
	}
	second, err := mails.DeadLetters().Page(ctx, mongoq.Limit(2), mongoq.Cursor(first.Next))
	if err != nil {
		panic(err)
	}
	fmt.Println(len(first.Envelopes), len(second.Envelopes), textOf(second.Envelopes[0]), second.Next == "")
	// Output:
	// 2 1 for ada true
}

func ExampleDeadLetters_Purge() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()
	deadLetterNext(ctx, mails, "no such address")

	n, err := mails.DeadLetters().Purge(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(n)
	// Output:
	// 1
}

// The history holds what was committed for as long as the queue's Retention says.
func ExampleHistory_List() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{Retention: 24 * time.Hour}, "one", "two")
	defer done()
	for range 2 {
		r, err := mails.Reserve(ctx)
		if err != nil {
			panic(err)
		}
		if err := r.Commit(ctx, mongoq.Result("sent "+textOf(&r.Envelope))); err != nil {
			panic(err)
		}
	}

	for e, err := range mails.History().List(ctx) { // the latest first
		if err != nil {
			panic(err)
		}
		fmt.Println(e.Result.StringValue(), "kept for", e.ExpireAt.Sub(e.Processed))
	}
	// Output:
	// sent two kept for 24h0m0s
	// sent one kept for 24h0m0s
}

// Pages go back in time. The cursor of the next one is a string, to be put into a link.
func ExampleHistory_Page() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{Retention: 24 * time.Hour}, "one", "two", "three")
	defer done()
	for range 3 {
		if _, err := mails.Pop(ctx); err != nil {
			panic(err)
		}
	}

	next := ""
	for i := 1; i == 1 || next != ""; i++ {
		page, err := mails.History().Page(ctx, mongoq.Limit(2), mongoq.Cursor(next))
		if err != nil {
			panic(err)
		}
		for _, e := range page.Envelopes {
			fmt.Printf("page %d: %s, %s\n", i, textOf(e), e.Outcome())
		}
		next = page.Next
	}
	// Output:
	// page 1: three, done
	// page 1: two, done
	// page 2: one, done
}

func ExampleHistory_Count() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{Retention: 24 * time.Hour})
	defer done()
	for _, to := range []string{"ada", "bob", "ada"} {
		if _, err := mails.Push(ctx, "hello", mongoq.Headers(map[string]string{"to": to})); err != nil {
			panic(err)
		}
		if _, err := mails.Pop(ctx); err != nil {
			panic(err)
		}
	}

	n, err := mails.History().Count(ctx, mongoq.Since(time.Now().Add(-time.Hour)), mongoq.Header("to", "ada"))
	if err != nil {
		panic(err)
	}
	fmt.Println(n)
	// Output:
	// 2
}

// The history of a store is that of all its queues, in one list.
func ExampleStore_History() {
	ctx := context.Background()
	store, done := exampleStore()
	defer done()
	for _, name := range []string{"mails", "bills"} {
		q, err := store.Queue(name, mongoq.QueueConfig{Retention: 24 * time.Hour})
		if err != nil {
			panic(err)
		}
		if _, err := q.Push(ctx, "for ada"); err != nil {
			panic(err)
		}
		if _, err := q.Pop(ctx); err != nil {
			panic(err)
		}
	}

	for e, err := range store.History().List(ctx) { // the latest first
		if err != nil {
			panic(err)
		}
		fmt.Println(e.Q, textOf(e))
	}
	// Output:
	// bills for ada
	// mails for ada
}

// Replay does finished work again, as a new envelope.
func ExampleHistory_Replay() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{Retention: 24 * time.Hour}, "hello")
	defer done()
	first, err := mails.Pop(ctx)
	if err != nil {
		panic(err)
	}

	id, err := mails.History().Replay(ctx, first.ID)
	if err != nil {
		panic(err)
	}
	again, err := mails.Pop(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(again), again.ID == id, again.ID != first.ID)
	// Output:
	// hello true true
}

// ReplayMany does what is chosen of the history again. Repeated under the same id it pushes nothing twice.
func ExampleHistory_ReplayMany() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{Retention: 24 * time.Hour}, "for ada", "for bob")
	defer done()
	for range 2 {
		if _, err := mails.Pop(ctx); err != nil {
			panic(err)
		}
	}

	for range 2 { // the second time by accident
		n, err := mails.History().ReplayMany(ctx, "outage of monday", mongoq.Since(time.Now().Add(-time.Hour)))
		if err != nil {
			panic(err)
		}
		s, err := mails.Stats(ctx)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%d replayed, %d to do\n", n, s.Total)
	}
	e, err := mails.Pop(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(e), "again, by the", e.ReplayID)
	// Output:
	// 2 replayed, 2 to do
	// 2 replayed, 2 to do
	// for bob again, by the outage of monday
}

// SetRetention changes for how long what is in the history stays.
func ExampleHistory_SetRetention() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{Retention: time.Hour}, "for ada", "for bob")
	defer done()
	for _, opts := range [][]mongoq.CommitOption{nil, {mongoq.Retain(mongoq.KeepForever)}} {
		r, err := mails.Reserve(ctx)
		if err != nil {
			panic(err)
		}
		if err := r.Commit(ctx, opts...); err != nil {
			panic(err)
		}
	}
	n, err := mails.History().SetRetention(ctx, 24*time.Hour)
	if err != nil {
		panic(err)
	}
	fmt.Println(n)
	for e, err := range mails.History().List(ctx) {
		if err != nil {
			panic(err)
		}
		fmt.Println(textOf(e), "kept for", e.ExpireAt.Sub(e.Processed))
	}
	// Output:
	// 2
	// for bob kept for 24h0m0s
	// for ada kept for 24h0m0s
}
