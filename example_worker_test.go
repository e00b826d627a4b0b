package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/seed-de459a48/mongoq"
)

// A worker is a pool of handlers. What a handler returns settles its envelope: nil commits it, an error rolls it back.
func ExampleQueue_Worker() {
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "for ada")
	defer done()

	ctx, stop := context.WithCancel(context.Background()) // in a program: signal.NotifyContext
	defer stop()
	send := func(_ context.Context, r *mongoq.Reservation) error {
		fmt.Println("sending", textOf(&r.Envelope))
		stop() // somebody presses Ctrl-C
		return nil
	}
	w, err := mails.Worker(send, mongoq.WorkerConfig{Concurrency: 4, Timeout: time.Minute})
	if err != nil {
		panic(err)
	}
	// Works until ctx ends. Then it takes nothing more, lets what runs end, and stores what that came to.
	if err := w.Run(ctx); err != nil {
		panic(err)
	}

	s, err := mails.Stats(context.Background())
	if err != nil {
		panic(err)
	}
	fmt.Println(s.Total, "left")
	// Output:
	// sending for ada
	// 0 left
}

// Handle makes a handler of a function of the payload.
func ExampleHandle() {
	type Mail struct{ To, Text string }
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, Mail{To: "ada", Text: "welcome"})
	defer done()

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	w, err := mails.Worker(mongoq.Handle(func(_ context.Context, m Mail) error {
		fmt.Println("to", m.To+":", m.Text)
		stop()
		return nil
	}), mongoq.WorkerConfig{})
	if err != nil {
		panic(err)
	}
	if err := w.Run(ctx); err != nil {
		panic(err)
	}
	// Output:
	// to ada: welcome
}

// RetryIn waits as long as a server asks for, in place of the queue's policy. It counts as a failure.
func ExampleRetryIn() {
	calls, done := exampleQueue("calls", mongoq.QueueConfig{}, "a request")
	defer done()

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	w, err := calls.Worker(func(_ context.Context, r *mongoq.Reservation) error {
		if r.Retries == 0 {
			return mongoq.RetryIn(20*time.Millisecond, errors.New("429 too many requests"))
		}
		fmt.Println("retries:", r.Retries)
		stop()
		return nil
	}, mongoq.WorkerConfig{})
	if err != nil {
		panic(err)
	}
	if err := w.Run(ctx); err != nil {
		panic(err)
	}
	// Output:
	// retries: 1
}

// Snooze gives the envelope back for a while. It counts as no failure.
func ExampleSnooze() {
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	w, err := mails.Worker(func(_ context.Context, r *mongoq.Reservation) error {
		if r.Deliveries == 1 {
			return mongoq.Snooze(20 * time.Millisecond) // the office is closed
		}
		fmt.Println("retries:", r.Retries, "deliveries:", r.Deliveries)
		stop()
		return nil
	}, mongoq.WorkerConfig{})
	if err != nil {
		panic(err)
	}
	if err := w.Run(ctx); err != nil {
		panic(err)
	}
	// Output:
	// retries: 0 deliveries: 2
}

// One worker for two queues: of the handlers that become free, three in four take from orders while both have work.
func ExampleWorkerConfig() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	store, done := exampleStore()
	defer done()
	orders, err := store.Queue("orders", mongoq.QueueConfig{})
	if err != nil {
		panic(err)
	}
	mails, err := store.Queue("mails", mongoq.QueueConfig{})
	if err != nil {
		panic(err)
	}
	if _, err := orders.Push(ctx, "two books"); err != nil {
		panic(err)
	}

	order := func(ctx context.Context, _ *mongoq.Reservation) error {
		_, err := mails.Push(ctx, "thank you")
		return err
	}
	mail := func(_ context.Context, r *mongoq.Reservation) error {
		stop()
		return nil
	}
	w, err := orders.Worker(order, mongoq.WorkerConfig{
		Concurrency: 1,
		Weight:      3,
		Also:        []mongoq.Source{{Queue: mails, Handler: mail, Weight: 1}},
		Middleware:  []mongoq.Middleware{mongoq.Timeout(time.Minute)},
		OnEvent: func(e mongoq.Event) { // for metrics
			if e.Kind == mongoq.EventCommitted {
				fmt.Println(e.Q, e.Kind)
			}
		},
	})
	if err != nil {
		panic(err)
	}
	if err := w.Run(ctx); err != nil {
		panic(err)
	}
	// Unordered output:
	// orders committed
	// mails committed
}

// Logging logs what jobs fail with, never their payload.
func ExampleLogging() {
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "hello")
	defer done()
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr { // what is the same at each run
			switch a.Key {
			case slog.TimeKey, "id", "ran":
				return slog.Attr{}
			}
			return a
		},
	}))

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	w, err := mails.Worker(func(context.Context, *mongoq.Reservation) error {
		stop()
		return errors.New("no answer")
	}, mongoq.WorkerConfig{Middleware: []mongoq.Middleware{mongoq.Logging(log)}})
	if err != nil {
		panic(err)
	}
	if err := w.Run(ctx); err != nil {
		panic(err)
	}
	// Output:
	// level=WARN msg="mongoq: job failed" queue=mails retries=0 error="no answer"
}
