package mongoq

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// DefaultRetry is the policy of a queue that names none: exponential with jitter, from 1 s, doubling, to 1 h, 25 retries
// in about 14 hours, then the dead-letter queue.
func DefaultRetry() backoff.BackOff {
	b := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(time.Second),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0.25),
		backoff.WithMaxInterval(time.Hour),
		backoff.WithMaxElapsedTime(0), // v4's default of 15 minutes would stop by waits that nobody slept
	)
	return backoff.WithMaxRetries(b, 25)
}

// most is how often a policy is asked at most: beyond it, its answer for that many failures stands.
const most = 10_000

// waitAfter is what the policy says of the n-th failure, counted from 1; stop means that it retries no more, and wait
// is then the longest that it said before.
func waitAfter(policy func() backoff.BackOff, n int) (wait time.Duration, stop bool) {
	b := policy()
	if b == nil {
		return 0, true
	}
	b.Reset()
	var longest time.Duration
	for range min(max(n, 1), most) {
		wait = b.NextBackOff()
		if wait == backoff.Stop {
			return longest, true
		}
		wait = max(wait, 0)
		longest = max(longest, wait)
	}
	return wait, false
}

// verdict is what becomes of an envelope that failed.
type verdict struct {
	wait time.Duration // until it may be taken again
	dead DeadKind      // or why it is dead-lettered instead
}

// judge says what becomes of an envelope at its n-th failure. A dead letter never dead-letters again, nor does an
// envelope of a queue without a dead-letter queue: where the policy gives up, they wait its longest.
func (q *Queue) judge(n int, cause error, isDead bool) verdict {
	wait, stop := waitAfter(q.cfg.Retry, n)
	var permanent *backoff.PermanentError
	forever := errors.As(cause, &permanent)
	if !stop && !forever {
		return verdict{wait: wait}
	}
	if isDead || q.cfg.DeadLetter == NoDeadLetter {
		if !stop {
			wait = q.longestWait(n)
		}
		return verdict{wait: wait}
	}
	if forever {
		return verdict{dead: DeadPermanent}
	}
	return verdict{dead: DeadRetries}
}

// longestWait is the longest that the policy says before it stops, or in a hundred failures more.
func (q *Queue) longestWait(n int) time.Duration {
	b := q.cfg.Retry()
	b.Reset()
	var longest time.Duration
	for range min(n+100, most) {
		wait := b.NextBackOff()
		if wait == backoff.Stop {
			break
		}
		longest = max(longest, wait)
	}
	return longest
}

// message is the text of a cause as it is stored.
func message(cause error) string {
	if cause == nil {
		return ""
	}
	return cut(cause.Error())
}

// cut makes a text fit to be stored: valid UTF-8 of at most 1 KiB.
func cut(s string) string { return cutTo(s, maxMessage) }

// cutTo is cut for n bytes.
func cutTo(s string, n int) string {
	// A rune cut in two is dropped with whatever else is no UTF-8.
	return strings.ToValidUTF8(s[:min(len(s), n)], "")
}

// jittered spreads a period over its last fifth, so that processes that started together don't ask together.
func jittered(d time.Duration) time.Duration {
	return d - time.Duration(float64(d)*0.2*rand.Float64())
}

// sleep waits for d or for ctx to end.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
