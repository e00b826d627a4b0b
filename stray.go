package mongoq

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// A claim whose answer was lost may have taken envelopes, or may yet, under a token that nobody holds. They are looked
// for and released, at once and again, until the claim cannot run any more.

const (
	// strayPause and strayPauses bound the time between two looks: it doubles after each, and begins anew with a new token.
	strayPause, strayPauses = 10 * time.Millisecond, 2 * time.Second
	// strayFor is how long a token is looked for at the most; a lease that has ended needs nobody.
	strayFor = time.Minute
)

// stray is a token that nobody holds.
type stray struct {
	token bson.ObjectID
	lease time.Duration
	until time.Time
}

// strays are those of a claimer.
type strays struct {
	more chan struct{} // rings whoever looks

	mu      sync.Mutex
	all     []stray
	looking bool
}

// abandon has envelopes under a token released.
func (c *claimer) abandon(token bson.ObjectID, lease time.Duration) {
	c.strays.mu.Lock()
	defer c.strays.mu.Unlock()
	c.strays.all = append(c.strays.all, stray{token, lease, time.Now().Add(min(lease+claimTimeout, strayFor))})
	select {
	case c.strays.more <- struct{}{}:
	default:
	}
	if c.strays.looking || !c.s.begin() {
		return
	}
	c.strays.looking = true
	go c.retrieve()
}

// retrieve looks for strays, all in one statement, while there are any, and a last time when the store closes.
func (c *claimer) retrieve() {
	defer c.s.wg.Done()
	pause := strayPause
	for over := false; ; pause = min(2*pause, strayPauses) {
		pause, over = c.strays.pause(c.s.life, pause)
		c.strays.mu.Lock()
		all := slices.Clone(c.strays.all)
		c.strays.mu.Unlock()
		began := time.Now()
		n, err := c.releaseStrays(all)
		if n > 0 || mayHaveHappened(err) {
			c.s.ring(c.name, 0, longAgo)
		}
		c.strays.mu.Lock()
		had := len(c.strays.all)
		c.strays.all = slices.DeleteFunc(c.strays.all, func(s stray) bool { return over || began.After(s.until) })
		left := len(c.strays.all)
		c.strays.looking = left > 0
		c.strays.mu.Unlock()
		if left < had && err != nil {
			c.s.log.Warn("mongoq: an abandoned claim could not be looked for; its envelope is delivered again when the lease ends", "queue", c.name, "error", err)
		}
		if left == 0 {
			return
		}
	}
}

// pause waits until it is time to look, and gives how long that was to be: it is short for a new token. It is over when
// ctx is.
func (s *strays) pause(ctx context.Context, d time.Duration) (waited time.Duration, over bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-s.more:
			if d > strayPause { // else it is near
				d = strayPause
				t.Reset(d)
			}
		case <-t.C:
			return d, false
		case <-ctx.Done():
			return d, true
		}
	}
}

// releaseStrays releases what is reserved under tokens, without a trace of the claims but their delivery counts.
func (c *claimer) releaseStrays(all []stray) (int64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), attemptTimeout)
	defer cancel()
	tokens, lease := make(bson.A, len(all)), time.Duration(0)
	for i, s := range all {
		tokens[i], lease = s.token, max(lease, s.lease)
	}
	filter := bson.D{
		field("q", c.name), field("processed", nil), field("lease", op("$in", tokens)),
		field("prio", op("$in", priorities)),
		field("$expr", op("$and", bson.A{
			op("$gt", bson.A{"$when", now}), op("$lte", bson.A{"$when", later(lease)}),
		})),
	}
	update := releaseUpdate(bson.NewObjectID(), start{place: true}, c.s.policyOf(c.name))
	res, err := c.s.envs.UpdateMany(ctx, filter, update, options.UpdateMany().SetHint(c.s.ready))
	if err != nil {
		return 0, err
	}
	return res.MatchedCount, nil
}
