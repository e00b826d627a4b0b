package mongoq

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

const (
	// measureEvery is how long an offset is trusted.
	measureEvery = time.Minute
	// measureAttempts is how often it is measured anew when the measurement cannot be trusted from the start.
	measureAttempts = 3
	// driftPerSecond is what two clocks may drift apart: 100 ppm, several times what quartz does.
	driftPerSecond = 100 * time.Microsecond
	// jump is a difference between the wall clock and the monotonic one that means that one of them was set, or that
	// the machine slept.
	jump = 500 * time.Millisecond
	// orderSlack is by how much a new measurement may disagree with the last before pushes stop keeping their order:
	// beyond it the server's clock has changed, and due at once comes before in order.
	orderSlack = 5 * time.Millisecond
)

// serverClock tells the server's time from this process's clock, as bounds: earliest never lies past the server's
// clock, latest never before it. A push for now takes the earliest, so that it is due at once; a push for later counts
// from the latest, so that it is never delivered early.
type serverClock struct {
	now   func() time.Time
	hello func(context.Context) (serverState, error)

	turn chan struct{} // of the one who measures

	mu sync.Mutex
	reading
	stale bool
	last  time.Time // last earliest given: order within the process is kept
}

// serverState is what hello says of the server that answers.
type serverState struct {
	localTime time.Time
	epoch     string
}

// sayHello asks the primary for its clock and for what identifies its term: the election's id, and the process's, which
// changes when a server restarts.
func sayHello(db *mongo.Database) func(context.Context) (serverState, error) {
	return func(ctx context.Context) (serverState, error) {
		ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
		raw, err := db.RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Raw()
		if err != nil {
			return serverState{}, err
		}
		t, ok := raw.Lookup("localTime").TimeOK()
		if !ok {
			return serverState{}, errors.New("mongoq: hello without localTime")
		}
		election, _ := raw.Lookup("electionId").ObjectIDOK()
		process, _ := raw.Lookup("topologyVersion", "processId").ObjectIDOK()
		return serverState{localTime: t, epoch: election.Hex() + "/" + process.Hex()}, nil
	}
}

// reading is one measurement.
type reading struct {
	base  time.Time     // this process's clock then
	lo    time.Time     // the server's time then, at the least
	width time.Duration // how much later it may have been
	epoch string
}

// measure reads the server's clock. Of three answers the quickest bounds it best.
func (c *serverClock) measure(ctx context.Context) (r reading, err error) {
	var best time.Duration
	for i := range 3 {
		sent := c.now()
		state, err := c.hello(ctx)
		if err != nil {
			return r, err
		}
		got := c.now()
		if trip := max(got.Sub(sent), 0); i == 0 || trip < best {
			best = trip
			// localTime is cut to the millisecond, and was read somewhere between sent and got.
			r.base, r.lo, r.width = got, state.localTime, trip+time.Millisecond
		}
		r.epoch = state.epoch
	}
	return r, nil
}

// bounds gives the server's time now: not before lo, not after hi. One caller measures when that is due, and the others
// wait for it.
func (c *serverClock) bounds(ctx context.Context) (lo, hi time.Time, err error) {
	if lo, hi, ok := c.current(); ok {
		return lo, hi, nil
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return lo, hi, ctx.Err()
	}
	for range measureAttempts { // this process's clock may be set, or the server change, while it is measured
		lo, hi, ok := c.current()
		if ok {
			return lo, hi, nil
		}
		if err := c.renew(ctx); err != nil {
			return lo, hi, err
		}
	}
	lo, hi, _ = c.current()
	return lo, hi, nil
}

// renew measures; the turn to do so is the caller's.
func (c *serverClock) renew(ctx context.Context) error {
	c.mu.Lock()
	c.stale = false // unless somebody says so again meanwhile
	c.mu.Unlock()
	r, err := c.measure(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.stale = true
		return err
	}
	c.reading = r
	return nil
}

// current gives the bounds by the last measurement; ok is false when it is time for another.
func (c *serverClock) current() (lo, hi time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	age := now.Sub(c.base)
	ok = !c.stale && !c.base.IsZero() && age >= 0 && age <= measureEvery &&
		(now.Round(0).Sub(c.base.Round(0))-age).Abs() <= jump
	age = max(age, 0)
	drift := time.Duration(age.Seconds() * float64(driftPerSecond))
	lo = c.lo.Add(age - drift)
	hi = c.lo.Add(age + c.width + drift)
	if behind := c.last.Sub(lo); behind > 0 && behind < orderSlack+c.width {
		lo = c.last
	}
	if ok {
		c.last = lo
	}
	return lo, hi, ok
}

// guess is the latest that the server's clock can show, by what was measured last, while the server cannot be asked.
func (c *serverClock) guess() time.Time {
	_, hi, _ := c.current()
	return hi
}

// least is the earliest that the server's clock can show, by what was measured last.
func (c *serverClock) least() time.Time {
	lo, _, _ := c.current()
	return lo
}

// distrust makes the next use measure again: the server may be another one.
func (c *serverClock) distrust() {
	c.mu.Lock()
	c.stale = true
	c.mu.Unlock()
}

// known is the epoch of the last measurement.
func (c *serverClock) known() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.epoch
}
