// Command quickstart is a walk through the queue, printed as it happens: push, delay, priority, reserve, a failure and
// its backoff, the dead-letter queue and the way back, history, stats.
//
// It uses the server that MONGODB_URI names, and there the database mongoq_quickstart, which it drops first. Without
// MONGODB_URI it starts a mongod for as long as it runs.
//
//	go run ./examples/quickstart
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Mail is what goes through the queue: anything that BSON can encode.
type Mail struct {
	To   string `bson:"to"`
	Text string `bson:"text"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if os.Getenv("MONGODB_URI") == "" {
		fmt.Println("MONGODB_URI is not set: this program brings its own server")
	}
	client, disconnect, err := mongotest.Connect(ctx, func(what string) { fmt.Println("  " + what) })
	if err != nil {
		return err
	}
	defer disconnect()
	db := client.Database("mongoq_quickstart")
	if err := db.Drop(ctx); err != nil {
		return fmt.Errorf("dropping what the last run left: %w", err)
	}

	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	mails, err := store.Queue("mails", mongoq.QueueConfig{
		Lease:     10 * time.Second, // a consumer that takes longer without Extend loses the envelope to another
		Retention: time.Hour,        // what is done stays in the history for an hour
		Retry:     threeQuickRetries,
	})
	if err != nil {
		return err
	}

	story := story{mails: mails, began: time.Now()}
	for _, chapter := range []func(context.Context) error{
		story.pushAndCommit, story.order, story.failure, story.secondChance, story.history, story.sizes,
	} {
		if err := chapter(ctx); err != nil {
			return err
		}
	}
	return nil
}

// threeQuickRetries waits 0.2 s, 0.4 s and 0.8 s, then gives up. The default, mongoq.DefaultRetry, is more patient: 25
// retries, from 1 s to 1 h, with jitter.
func threeQuickRetries() backoff.BackOff {
	return backoff.WithMaxRetries(backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(200*time.Millisecond),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0),
		backoff.WithMaxElapsedTime(0),
	), 3)
}

type story struct {
	mails *mongoq.Queue
	began time.Time
}

func (s story) tellf(format string, args ...any) {
	fmt.Printf("%5.2f s  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// take reserves the next mail, waiting for it, and decodes it.
func (s story) take(ctx context.Context) (*mongoq.Reservation, Mail, error) {
	var m Mail
	r, err := s.mails.Reserve(ctx)
	if err != nil {
		return nil, m, err
	}
	return r, m, r.Decode(&m)
}

func (s story) pushAndCommit(ctx context.Context) error {
	fmt.Println("\nPush, reserve, commit")
	id, err := s.mails.Push(ctx, Mail{To: "ada", Text: "welcome"})
	if err != nil {
		return err
	}
	s.tellf("pushed %s: it is stored, a majority of the servers has it", id.Hex())
	r, m, err := s.take(ctx)
	if err != nil {
		return err
	}
	s.tellf("reserved %q for %s: nobody else gets it for %v", m.Text, m.To, time.Until(r.When).Round(time.Second))
	if err := r.Commit(ctx, mongoq.Result("sent to "+m.To)); err != nil {
		return err
	}
	s.tellf("committed, with a result")
	return nil
}

func (s story) order(ctx context.Context) error {
	fmt.Println("\nDelay and priority")
	if _, err := s.mails.Push(ctx, Mail{To: "bob", Text: "a reminder"}, mongoq.Delay(1500*time.Millisecond)); err != nil {
		return err
	}
	s.tellf("pushed a reminder, due in 1.5 s")
	if _, err := s.mails.Push(ctx, Mail{To: "cleo", Text: "a newsletter"}); err != nil {
		return err
	}
	s.tellf("pushed a newsletter")
	if _, err := s.mails.Push(ctx, Mail{To: "dan", Text: "a password reset"}, mongoq.Priority(1)); err != nil {
		return err
	}
	s.tellf("pushed a password reset, priority 1")
	for range 3 {
		r, m, err := s.take(ctx)
		if err != nil {
			return err
		}
		s.tellf("got %s", m.Text)
		if err := r.Commit(ctx, mongoq.Result("sent to "+m.To)); err != nil {
			return err
		}
	}
	return nil
}

// failure delivers a mail that cannot be sent until the queue's policy gives up.
func (s story) failure(ctx context.Context) error {
	fmt.Println("\nA failure and its backoff")
	id, err := s.mails.Push(ctx, Mail{To: "eve", Text: "an invoice"})
	if err != nil {
		return err
	}
	for {
		r, m, err := s.take(ctx)
		if err != nil {
			return err
		}
		s.tellf("got %s, retries so far: %d", m.Text, r.Retries)
		if err := r.Rollback(ctx, errors.New("mail server refuses "+m.To)); err != nil {
			return err
		}
		e, err := s.mails.Get(ctx, id)
		if errors.Is(err, mongoq.ErrNotFound) {
			s.tellf("rolled back, and the policy says stop: it went to %s.dead", s.mails.Name())
			return nil
		}
		if err != nil {
			return err
		}
		s.tellf("rolled back: it comes again in %v", time.Until(e.When).Round(100*time.Millisecond))
	}
}

func (s story) secondChance(ctx context.Context) error {
	fmt.Println("\nThe dead letter, and the way back")
	for e, err := range s.mails.DeadLetters().List(ctx) {
		if err != nil {
			return err
		}
		s.tellf("dead: %s from %s, kind %q, %q, %d failures kept", e.ID.Hex(), e.Dead.From, e.Dead.Kind, e.Dead.Msg, len(e.Failures))
	}
	n, err := s.mails.DeadLetters().Redrive(ctx)
	if err != nil {
		return err
	}
	s.tellf("the mail server works again: %d put back", n)
	r, m, err := s.take(ctx)
	if err != nil {
		return err
	}
	s.tellf("got %s, retries so far: %d", m.Text, r.Retries)
	if err := r.Commit(ctx, mongoq.Result("sent to "+m.To)); err != nil {
		return err
	}
	s.tellf("committed")
	return nil
}

func (s story) history(ctx context.Context) error {
	fmt.Println("\nHistory, the latest first")
	for e, err := range s.mails.History().List(ctx) {
		if err != nil {
			return err
		}
		var m Mail
		if err := e.Decode(&m); err != nil {
			return err
		}
		var result string
		if err := e.Result.Unmarshal(&result); err != nil {
			return err
		}
		s.tellf("%-18s %-14s deliveries: %d, moves: %d, kept until %s", m.Text, result, e.Deliveries, e.Moves, e.ExpireAt.Format("15:04"))
	}
	return nil
}

func (s story) sizes(ctx context.Context) error {
	fmt.Println("\nStats")
	if _, err := s.mails.Push(ctx, Mail{To: "fay", Text: "next week's news"}, mongoq.Delay(7*24*time.Hour)); err != nil {
		return err
	}
	st, err := s.mails.Stats(ctx)
	if err != nil {
		return err
	}
	s.tellf("total %d: ready %d, scheduled %d, reserved %d; processed %d, dead %d; next due %s",
		st.Total, st.Ready, st.Scheduled, st.Reserved, st.Processed, st.Dead, st.NextDue.Format(time.DateOnly))
	return nil
}
