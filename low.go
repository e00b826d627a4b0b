package mongoq

import (
	"context"
	"slices"
	"sync"
	"time"
)

// low is from where on a claimer looks. What was claimed or deleted stays in the index as dead entries, for minutes
// (minSnapshotHistoryWindowInSeconds), and a claim that begins at the head walks them all.
//
// It is a bound on `when` for each priority. A read from the head sets it, and every claim that finds what comes first
// moves it on. What becomes due does so at a later `when` than that: pushes, rollbacks and moves take the server's time,
// and a lease lapses at its end. What comes with a time that has passed - a push that took long, or was in a
// transaction, or an envelope that is given back to its place - says so when it rings, and lowers the bound. What
// somebody writes by hand does not, nor does a ring that is lost. So the claimer begins at the head again each second,
// or less often where that takes long, before anybody is told that a queue is empty, and when something is due that a
// claim has not seen.
type low struct {
	bounds [levels]time.Time
	known  bool
	read   time.Time     // when they were read from the head, or that was put off
	cost   time.Duration // how long that took
	met    int           // candidates since the claimer began, whoever got them
	before int           // met when they were read
	whole  time.Time     // when a claim from the head, of whatever priority, last found nothing
	tried  time.Time     // when one was last made though there was a bound
}

const (
	// lowAfter is how many envelopes a claimer meets before it looks from anywhere but the head: a queue that is little
	// used has few dead entries, unless others have used it.
	lowAfter = 50
	// lowPace is how many it must have met since it last read the bounds to read them anew.
	lowPace = 20
	// lowFor is how long the bounds hold at the least, and lowCost how many times as long as it takes to read them for all
	// queues that this process claims of: a read walks the dead entries of neighbours, too.
	lowFor  = time.Second
	lowCost = 50
	// lowMost is how long they hold at the most: what nobody has rung for is found then.
	lowMost = 10 * time.Second
	// lowSlack is by how much they lie before now at the least: what comes may be that late without saying so.
	lowSlack = 50 * time.Millisecond
	// lowLate is how late something comes that says so.
	lowLate = lowSlack / 2
)

// from is the bound for all priorities; zero: the head.
func (l *low) from() time.Time {
	if !l.known {
		return time.Time{}
	}
	return slices.MinFunc(l.bounds[:], time.Time.Compare)
}

// drop has claims begin at the head until the bounds are read again.
func (l *low) drop() {
	l.bounds, l.known, l.read, l.before = [levels]time.Time{}, false, time.Now(), l.met
}

// after tells whether a bound lies after now.
func (l *low) after(now time.Time) bool {
	return slices.ContainsFunc(l.bounds[:], func(b time.Time) bool { return b.After(now) })
}

// lower makes room for something that came with a time that has passed.
func (l *low) lower(to time.Time) {
	for i, b := range l.bounds {
		l.bounds[i] = minTime(b, to.Add(-lowSlack))
	}
}

// saw notes the first of a priority that a look, begun at that time by the server's clock, has found: there is nothing
// before it, and nothing of a higher priority.
func (l *low) saw(prio int, when, began time.Time) {
	for p := 1; p <= min(prio, len(l.bounds)); p++ {
		to := began.Add(-lowSlack)
		if p == prio {
			to = minTime(when, to)
		}
		l.bounds[p-1] = maxTime(l.bounds[p-1], to)
	}
}

// empty notes that a look, begun at that time by the server's clock, has found nothing.
func (l *low) empty(began time.Time) { l.saw(len(l.bounds)+1, began, began) }

// late is the earliest time of what has come late, by this process's clock; zero: nothing has.
type late struct {
	mu sync.Mutex
	at time.Time
}

func (l *late) note(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at = sooner(l.at, at)
}

// noteUnknown notes that something may have come late, nobody knows since when.
func (l *late) noteUnknown() { l.note(time.Now().Add(-longAgo)) }

func (l *late) take() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := l.at
	l.at = time.Time{}
	return at
}

// floor gives the bound for the next look, which begins at now by the server's clock; zero: from the head.
func (c *claimer) floor(ctx context.Context, now time.Time) (time.Time, error) {
	if at := c.late.take(); !at.IsZero() {
		c.low.lower(now.Add(time.Until(at)))
		if time.Since(at) > longAgo/2 { // nobody knows
			c.low.read = time.Time{}
		}
	}
	if c.low.after(now) { // the server's clock was set back
		c.low.drop()
	}
	switch {
	case c.low.met < lowAfter:
		return time.Time{}, nil
	case time.Since(c.low.read) < min(max(lowFor, lowCost*c.low.cost*time.Duration(c.s.serving.Load())), lowMost):
		return c.low.from(), nil
	case c.low.met-c.low.before < lowPace:
		c.low.drop()
		return time.Time{}, nil
	}
	return c.readLow(ctx, now)
}

// readLow looks for the first of each priority from the head on.
func (c *claimer) readLow(ctx context.Context, now time.Time) (time.Time, error) {
	began := time.Now()
	c.low.drop()
	var bounds [levels]time.Time
	for i := range bounds {
		bounds[i] = now.Add(-lowSlack)
	}
	for raw, err := range c.firsts(ctx, time.Time{}) {
		if err != nil {
			return time.Time{}, err
		}
		if when, ok := raw.Lookup("when").TimeOK(); ok {
			p := priorityOf(raw)
			if p < 1 || p > levels { // written by hand, and in front of others that it hides
				return time.Time{}, nil
			}
			bounds[p-1] = minTime(bounds[p-1], when)
		}
	}
	c.low.bounds, c.low.known, c.low.cost = bounds, true, time.Since(began)
	return c.low.from(), nil
}
