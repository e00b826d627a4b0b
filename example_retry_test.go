package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-de459a48/mongoq"
)

// A queue's retry policy is a BackOff of cenkalti/backoff: the n-th failure waits what the n-th NextBackOff says, and
// Stop means the dead-letter queue.
func ExampleQueueConfig() {
	ctx := context.Background()
	patient := func() backoff.BackOff {
		return backoff.WithMaxRetries(backoff.NewExponentialBackOff(
			backoff.WithInitialInterval(time.Minute),
			backoff.WithMultiplier(2),
			backoff.WithRandomizationFactor(0), // better leave some
			backoff.WithMaxElapsedTime(0),      // count retries, not time
		), 20)
	}
	mails, done := exampleQueue("mails", mongoq.QueueConfig{
		Lease:      5 * time.Minute,
		Retry:      patient,
		DeadLetter: "postmaster",
		Retention:  7 * 24 * time.Hour,
	}, "hello")
	defer done()

	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	if err := r.Rollback(ctx, errors.New("no answer")); err != nil {
		panic(err)
	}

	e, err := mails.Get(ctx, r.ID)
	if err != nil {
		panic(err)
	}
	fmt.Println("again in", e.When.Sub(e.Failures[0].At))
	// Output:
	// again in 1m0s
}

// The policy of a queue that names none.
func ExampleDefaultRetry() {
	policy := mongoq.DefaultRetry()
	retries := 0
	for policy.NextBackOff() != backoff.Stop {
		retries++
	}
	fmt.Println(retries, "retries, then the dead-letter queue")
	// Output:
	// 25 retries, then the dead-letter queue
}
