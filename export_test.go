package mongoq

import (
	"context"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// What tests see of the inside.
var CheckVersion = checkVersion

// CacheIsFull tells a write that the server undid for want of room in its cache.
func CacheIsFull(err error) bool { return hasCode(err, fullCodes...) }

// Line tells how many wait in line for a queue in this process, and whether the goroutine that serves them runs, and
// sleeps.
func Line(s *Store, queue string) (waiters int, serving, asleep bool) {
	s.mu.Lock()
	c := s.claimers[queue]
	s.mu.Unlock()
	if c == nil {
		return 0, false, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiters {
		if !w.gone {
			waiters++
		}
	}
	return waiters, c.running, c.running && !c.asleep.IsZero() && len(c.wake) == 0
}

// Rests tells whether the claimer of a queue that is not paused sleeps, after a look that had all that has rung.
func Rests(s *Store, queue string) bool {
	c := s.claimerOf(queue)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running && !c.asleep.IsZero() && !c.looked.IsZero() && len(c.wake) == 0
}

// Hears tells whether the signals of other processes are followed now.
func Hears(s *Store) bool { return s.bell.heard() }

// InLine tells how many pushes and verbs stand in line for the next round, and how many places they and those under way
// have.
func InLine(s *Store) (pushes, verbs, places int) {
	pushes, verbs = s.pushes.waiting(), s.settles.waiting()+s.extends.waiting()
	return pushes, verbs, len(s.pushes.places) + len(s.settles.places) + len(s.extends.places)
}

func (b *batcher[T]) waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.line)
}

// Narrow has a store, before its use, send so many in a round at the most.
func Narrow(s *Store, limit int) {
	s.pushes = s.newPushes(limit)
	s.settles = newBatcher(s, limit, settleFlights, s.settleRound)
	s.extends = newBatcher(s, limit, settleFlights, s.extendRound)
}

// HasMet has the claimer of a queue go by turns, as if it had met another at the head.
func HasMet(s *Store, queue string) {
	c, err := s.claimer(queue)
	if err != nil {
		return
	}
	c.flying.Lock()
	defer c.flying.Unlock()
	c.turn = turn{until: time.Now().Add(time.Minute)}
}

// KeepsMeeting has the claimer of a queue go on by turns.
func KeepsMeeting(s *Store, queue string) {
	c := s.claimerOf(queue)
	c.flying.Lock()
	defer c.flying.Unlock()
	c.turn.until = time.Now().Add(time.Minute)
}

// NoteTransaction notes that a session has a transaction open, which may be ended in a while.
func NoteTransaction(ctx context.Context, s *Store, session *mongo.Session, in time.Duration) error {
	_, err := s.noted.InsertOne(ctx, bson.D{field("_id", session.ID()), field("until", time.Now().Add(in))})
	return err
}

// KeepOnce has a store keep its history now, if it has or gets the lease; watched tells what it is told.
func KeepOnce(ctx context.Context, s *Store, me bson.ObjectID) (held bool, err error) {
	state, err := s.holdKeeping(ctx, me)
	if err != nil || state == nil {
		return false, err
	}
	return true, s.keepOnce(ctx, me, &watch{s: s})
}

// Ahead has a store take the server's clock to be so far ahead, from now on.
func Ahead(s *Store, d time.Duration) {
	s.clock.hears(func(state *serverState) { state.localTime = state.localTime.Add(d) })
}

// AnotherTerm has a store see another term from now on, as after a failover.
func AnotherTerm(s *Store) {
	s.clock.hears(func(state *serverState) { state.epoch += ", another" })
}

// hears has a clock be told otherwise of the server, from now on.
func (c *serverClock) hears(otherwise func(*serverState)) {
	c.turn <- struct{}{} // nobody measures
	defer func() { <-c.turn }()
	defer c.distrust()
	hello := c.hello
	c.hello = func(ctx context.Context) (serverState, error) {
		state, err := hello(ctx)
		otherwise(&state)
		return state, err
	}
}

// PartitionOf is the partition of what was committed at a time, to be kept for so long.
func PartitionOf(s *Store, committed time.Time, keep time.Duration) string {
	return s.partitionOf(committed, keep).name
}

// Missed tells the claimer of a queue that something may have rung that it has not heard.
func Missed(s *Store, queue string) { s.claimerOf(queue).missed() }

// LooksFrom is from where on the claimer of a queue looks, while it serves nobody; zero: from the head.
func LooksFrom(s *Store, queue string) time.Time {
	c := s.claimerOf(queue)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running {
		return time.Time{}
	}
	return c.low.from()
}

// Forecast is when something in a queue falls due as far as this process knows; zero: never.
func Forecast(s *Store, queue string) time.Time {
	next, _ := s.claimerOf(queue).forecast()
	return next
}

// GiveBack gives an envelope back as for a caller that left.
func GiveBack(ctx context.Context, s *Store, r *Reservation) { s.giveBack(ctx, []*Reservation{r}, nil) }

// TakeLate is since when what was last said to have come late is due; zero: nothing was.
func TakeLate(s *Store, queue string) time.Time { return s.claimerOf(queue).late.take() }

// MuteForLong has a store that may not send signals try it with the next.
func MuteForLong(s *Store) {
	s.bell.mu.Lock()
	defer s.bell.mu.Unlock()
	s.bell.muted = time.Time{}
}

// Ring has the claimer of a queue look.
func Ring(s *Store, queue string) { s.ringHere(queue, 0, false) }

// RingOut rings for a queue here and elsewhere.
func RingOut(s *Store, queue string) { s.ring(queue, 0, 0) }

// FillBehind has no room left for what is settled behind handlers, until it is emptied.
func FillBehind(s *Store) (empty func()) {
	for range cap(s.behind) {
		s.behind <- struct{}{}
	}
	return sync.OnceFunc(func() {
		for range cap(s.behind) {
			<-s.behind
		}
	})
}

// Blur has a store know the server's clock within wide bounds only.
func Blur(s *Store, width time.Duration) {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.clock.width = width
}

// AheadAfter is what one handler, whose jobs last no time, has fetched ahead after so many were done in each step: how many it is
// to have ready, and with how many left it claims again. Claims take the latency; less than zero done is a time without jobs.
func AheadAfter(latency, step time.Duration, done ...int) (ahead, refill int) {
	p := pace{span: longestHold, latency: latency.Seconds()}
	now, all := time.Now(), int64(0)
	p.mark(now, 0, 0)
	for _, n := range done {
		now = now.Add(step)
		if n < 0 {
			p.rest(now, all, 0)
			continue
		}
		all += int64(n)
		p.mark(now, all, 0)
	}
	return p.ahead(1, longestHold)
}
