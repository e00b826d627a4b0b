package mongoq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Handler does the work of one envelope. What it returns settles the envelope:
//
//   - nil commits it;
//   - an error rolls it back by the queue's policy, which dead-letters it when it stops;
//   - an error wrapped in backoff.Permanent dead-letters it at once;
//   - [RetryIn] rolls it back for a given time, [Snooze] gives it back without counting a failure.
//
// A handler that has settled the reservation itself is left alone, and so is one that returns nil after a verb in a
// transaction. A panic counts as a failure. The context ends with the job's timeout, with its lease (its cause is then
// ErrLeaseLost, and whatever the handler returns is discarded) and when a drain has lasted too long.
type Handler func(ctx context.Context, r *Reservation) error

// Handle makes a handler of a function of the payload. A payload that cannot be decoded into a T is dead-lettered at
// once: it will never fit.
func Handle[T any](f func(context.Context, T) error) Handler {
	if f == nil {
		return nil // Worker refuses it
	}
	return func(ctx context.Context, r *Reservation) error {
		var v T
		if err := r.Decode(&v); err != nil {
			return backoff.Permanent(err)
		}
		return f(ctx, v)
	}
}

// retryIn is what RetryIn makes.
type retryIn struct {
	after time.Duration
	err   error
}

func (e *retryIn) Error() string { return e.err.Error() }
func (e *retryIn) Unwrap() error { return e.err }

// RetryIn makes a failure wait d in place of what the queue's policy says. It counts as any other: where the policy
// stops, the envelope is dead-lettered. A negative d counts as 0.
func RetryIn(d time.Duration, err error) error {
	if err == nil {
		err = errors.New("retry")
	}
	return &retryIn{after: max(d, 0), err: err}
}

// snooze is what Snooze makes.
type snooze struct{ d time.Duration }

func (e *snooze) Error() string { return fmt.Sprintf("snoozed for %v", e.d) }

// Snooze gives the envelope back for d without counting a failure. A negative d counts as 0.
func Snooze(d time.Duration) error { return &snooze{d: max(d, 0)} }

// Middleware wraps a handler, the first of a list outermost.
type Middleware func(Handler) Handler

// Logging logs the end of each job: what it failed with at level Warn, success and a snooze at level Debug. Never a payload.
func Logging(log *slog.Logger) Middleware {
	return func(next Handler) Handler {
		return func(ctx context.Context, r *Reservation) error {
			began := time.Now()
			err := next(ctx, r)
			attrs := []any{"queue", r.Q, "id", r.ID.Hex(), "retries", r.Retries, "ran", time.Since(began)}
			var nap *snooze
			if err != nil && !errors.As(err, &nap) {
				log.WarnContext(ctx, "mongoq: job failed", append(attrs, "error", err)...)
			} else {
				log.DebugContext(ctx, "mongoq: job done", append(attrs, "snoozed", nap != nil)...)
			}
			return err
		}
	}
}

// Timeout ends a job's context after d; 0 or less: never.
func Timeout(d time.Duration) Middleware {
	return func(next Handler) Handler {
		if d <= 0 {
			return next
		}
		return func(ctx context.Context, r *Reservation) error {
			ctx, cancel := context.WithTimeout(ctx, d)
			defer cancel()
			return next(ctx, r)
		}
	}
}

// PanicError is the failure of a handler that panicked; the failure list keeps it with the beginning of its stack.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("panic: %s\n%s", cutTo(fmt.Sprint(e.Value), panicValue), e.Stack)
}

// panicValue is how many bytes of what a handler panicked with stand before the stack, for which the failure list has
// little room.
const panicValue = 256

// protect runs a handler, and makes an error of its panic.
func protect(ctx context.Context, h Handler, r *Reservation) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	if err = h(ctx, r); err != nil {
		_ = err.Error() // that of a nil pointer panics: here that is the handler's failure
		_, _ = errors.Is(err, errGoexit), errors.As(err, new(*PanicError))
	}
	return err
}
