package mongoq

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// The bell wakes waiting consumers of other processes. Who makes an envelope due writes the queue's name into a small
// capped collection, <Collection>.signals, and every process that waits follows it with one tailable cursor. A signal
// is a hint: one that is lost costs a poll interval, or lowMost in a busy claimer, no more.

const (
	// signalsSize is the capped collection's, in bytes: some thousand signals.
	signalsSize = 256 << 10
	// ringEvery is the least time between two signals of a process. The first goes at once, and what rings meanwhile
	// goes together after it, so that no ring is lost.
	ringEvery = 10 * time.Millisecond
	// ringMost is how many queues one signal names: with the longest names it is half the collection.
	ringMost = 400
	// muteFor is how long a process that may not write signals goes without trying.
	muteFor = time.Minute
	// awaitTime is how long the server holds a getMore that finds nothing.
	awaitTime = 5 * time.Second
	// silence is how long an answer may take beyond that, before the server counts as away.
	silence = 3 * time.Second
	// watchMost is how many writes are watched at once, watchFor how long: MongoDB ends a transaction after a minute.
	watchMost = 1000
	watchFor  = time.Minute
	// watchPause and watchPauses bound the time between two looks for them.
	watchPause, watchPauses = 2 * time.Millisecond, 250 * time.Millisecond
)

type bell struct {
	s    *Store
	coll *mongo.Collection
	more chan struct{} // rings whoever watches

	mu        sync.Mutex
	awaited   []awaited
	watching  bool
	pending   map[string]rung
	ringing   bool
	listening bool      // the goroutine runs
	hears     bool      // and its cursor is open
	deaf      bool      // it was said that signals cannot be had
	mute      bool      // nor sent
	muted     time.Time // when that was tried last
}

// rung is what a queue rings for.
type rung struct {
	at    time.Time // the first is due, by this process's clock
	later bool      // one of them was not due yet
	again bool      // it could not be sent before
}

// with is one ring for both.
func (r rung) with(other rung) rung {
	return rung{at: minTime(r.at, other.at), later: r.later || other.later, again: r.again && other.again}
}

// signal is a document of the collection: several queues in one.
type signal struct {
	Queues []struct {
		Q     string    `bson:"q"`
		When  time.Time `bson:"when"`  // something is due, by the server's clock
		Later bool      `bson:"later"` // something was not when it rang
	} `bson:"qs"`
}

func newBell(s *Store, name string) *bell {
	return &bell{
		s: s, more: make(chan struct{}, 1), pending: map[string]rung{},
		coll: s.db.Collection(name, options.Collection().SetWriteConcern(writeconcern.W1()).SetReadPreference(readpref.Primary())),
	}
}

// open makes the collection when the store opens: a write would make one that is not capped. Where it is refused, nothing is
// sent.
func (b *bell) open(ctx context.Context) {
	err := b.prepare(ctx)
	switch {
	case mayPass(err): // whoever follows tries again
	case err != nil:
		b.mute, b.deaf, b.muted = true, true, time.Now()
		b.s.log.Warn("mongoq: no signals between processes can be had; consumers poll", "collection", b.coll.Name(), "error", err)
	}
}

// ring tells other processes that something in the queue falls due in the given time; later: it was to start later when
// it was written.
func (b *bell) ring(queue string, in time.Duration, later bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mute {
		if time.Since(b.muted) > muteFor && b.s.begin() {
			b.muted = time.Now()
			go b.speak()
		}
		return
	}
	b.put(queue, rung{at: time.Now().Add(in), later: later})
	if b.ringing || !b.s.begin() {
		return
	}
	b.ringing = true
	go b.send()
}

// put has a queue ring soon; b.mu is held.
func (b *bell) put(queue string, r rung) {
	if had, ok := b.pending[queue]; ok {
		r = r.with(had)
	}
	b.pending[queue] = r
}

// speak sees whether signals can be sent now.
func (b *bell) speak() {
	defer b.s.wg.Done()
	if b.prepare(b.s.life) == nil {
		b.heals()
	}
}

// heals notes that signals can be had.
func (b *bell) heals() {
	b.mu.Lock()
	was := b.deaf
	b.deaf, b.mute = false, false
	b.mu.Unlock()
	if was {
		b.s.log.Info("mongoq: signals between processes can be had again", "collection", b.coll.Name())
	}
}

// send writes what rings, as long as anything does.
func (b *bell) send() {
	defer b.s.wg.Done()
	for {
		b.mu.Lock()
		if len(b.pending) == 0 {
			b.ringing = false
			b.mu.Unlock()
			return
		}
		var qs bson.A
		now := b.s.clock.guess()
		some := map[string]rung{}
		for q, r := range b.pending {
			if len(qs) == ringMost {
				break
			}
			qs = append(qs, bson.D{field("q", q), field("when", now.Add(time.Until(r.at))), field("later", r.later)})
			some[q] = r
			delete(b.pending, q)
		}
		b.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), claimTimeout)
		_, err := b.coll.InsertOne(ctx, bson.D{field("qs", qs)})
		cancel()
		if err != nil {
			b.s.log.Debug("mongoq: a signal could not be sent; others find the envelope when they poll", "error", err)
			b.mu.Lock()
			for q, r := range some { // once more: the primary may have changed
				if !r.again {
					r.again = true
					b.put(q, r)
				}
			}
			b.mu.Unlock()
		}
		_ = sleep(b.s.life, ringEvery)
	}
}

// listen sees that somebody listens as long as anybody waits.
func (b *bell) listen() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.listening || !b.s.begin() {
		return
	}
	b.listening = true
	go b.follow()
}

// heard is true while signals are followed: polling may then be slower.
func (b *bell) heard() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.hears
}

// follow follows the signals until the store closes or nobody waits, and through the server's absence.
func (b *bell) follow() {
	defer b.s.wg.Done()
	trouble := troubles()
	for {
		err := b.followOnce(b.s.life)
		b.mu.Lock()
		was := b.hears
		if err != nil && (was || mayPass(err)) {
			b.s.clock.distrust() // the server may be another one
		}
		b.hears = false
		if b.s.life.Err() != nil || err == nil {
			b.listening = false
			b.mu.Unlock()
			if b.s.serving.Load() > 0 { // and saw this one listen
				b.listen()
			}
			return
		}
		say := !was && !b.deaf && !mayPass(err)
		b.deaf = b.deaf || say
		b.mu.Unlock()
		if say {
			b.s.log.Warn("mongoq: no signals between processes can be had; consumers poll", "collection", b.coll.Name(), "error", err)
		}
		if was {
			trouble.Reset()
			b.s.ringAll() // polling starts now
		}
		if sleep(b.s.life, max(trouble.NextBackOff(), 100*time.Millisecond)) != nil {
			continue
		}
	}
}

var errDeadCursor = errors.New("the signals' cursor is dead")

// followOnce opens the cursor and rings for what it brings. No error: nobody waits any more.
func (b *bell) followOnce(ctx context.Context) error {
	if err := b.prepare(ctx); err != nil {
		return err
	}
	cur, err := b.coll.Find(ctx, bson.D{}, options.Find().SetCursorType(options.TailableAwait).SetMaxAwaitTime(awaitTime))
	if err != nil {
		return err
	}
	defer closeCursor(ctx, cur)
	b.heals()
	b.s.ringAll() // what rang while nobody listened
	b.mu.Lock()
	b.hears = true
	b.mu.Unlock()
	for {
		for tryNext(ctx, cur) {
			var sig signal
			if bson.Unmarshal(cur.Current, &sig) != nil {
				continue // not of ours
			}
			for _, q := range sig.Queues {
				b.s.ringHere(q.Q, q.When.Sub(b.s.clock.guess()), q.Later)
			}
		}
		if err := cur.Err(); err != nil {
			return err
		}
		if cur.ID() == 0 {
			return errDeadCursor
		}
		if b.s.serving.Load() == 0 {
			return nil
		}
	}
}

// tryNext waits for the next signal as long as the server should at most.
func tryNext(ctx context.Context, cur *mongo.Cursor) bool {
	ctx, cancel := context.WithTimeout(ctx, awaitTime+silence)
	defer cancel()
	return cur.TryNext(ctx)
}

// prepare makes the capped collection, with a first signal, since a tailable cursor on an empty one is dead. One that is
// not capped, made by a write after somebody dropped it, is made anew: signals are hints.
func (b *bell) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	err := b.s.again(ctx, func() error {
		specs, err := b.s.db.ListCollectionSpecifications(ctx, bson.D{field("name", b.coll.Name())})
		if err != nil {
			return err
		}
		if len(specs) == 1 {
			if capped, _ := specs[0].Options.Lookup("capped").BooleanOK(); capped {
				return nil
			}
			if err := b.coll.Drop(ctx); err != nil {
				return err
			}
		}
		return b.s.db.RunCommand(ctx, bson.D{
			field("create", b.coll.Name()), field("capped", true), field("size", signalsSize),
		}).Err()
	})
	if err != nil {
		return err
	}
	n, err := b.coll.EstimatedDocumentCount(ctx)
	if err != nil || n > 0 {
		return err
	}
	_, err = b.coll.InsertOne(ctx, bson.D{field("qs", bson.A{})})
	return err
}

// awaited is a write that may come to be seen: one in a transaction, or one whose answer was lost.
type awaited struct {
	id    bson.ObjectID
	lease bson.ObjectID // of the verb that is to be the envelope's last; zero: it is to be there
	verb  string
	queue string
	wait  time.Duration // from then on
	began time.Time     // the write may have the time of then
	until time.Time     // it is given up

	next  time.Time // it is looked for again
	pause time.Duration
}

// watch rings for a write once it can be seen.
func (b *bell) watch(a awaited) {
	a.until, a.next, a.pause = time.Now().Add(watchFor), time.Now().Add(watchPause), watchPause
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.awaited) >= watchMost { // consumers find the oldest when they look from the head
		b.awaited = slices.Delete(b.awaited, 0, 1)
	}
	b.awaited = append(b.awaited, a)
	select {
	case b.more <- struct{}{}:
	default:
	}
	if b.watching || !b.s.begin() {
		return
	}
	b.watching = true
	go b.watchAll()
}

// watchAll looks for what is awaited while there is any: soon after it has come, and then less often.
func (b *bell) watchAll() {
	defer b.s.wg.Done()
	for {
		some, in, over := b.upNext()
		if over {
			return
		}
		if len(some) > 0 {
			seen := b.seen(some)
			for _, a := range seen {
				b.s.ring(a.queue, a.wait, time.Since(a.began))
			}
			b.mu.Lock()
			b.awaited = slices.DeleteFunc(b.awaited, func(a awaited) bool { return slices.Contains(seen, a) })
			b.mu.Unlock()
			continue
		}
		t := time.NewTimer(in)
		select {
		case <-b.more:
		case <-t.C:
		case <-b.s.life.Done():
			t.Stop()
			return
		}
		t.Stop()
	}
}

// upNext are those to be looked for now and, so that they go together, those that would be soon; else in how long the
// first is to be. Nobody watches any more when it is over.
func (b *bell) upNext() (some []awaited, in time.Duration, over bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.awaited = slices.DeleteFunc(b.awaited, func(a awaited) bool { return now.After(a.until) })
	in = watchPauses
	for _, a := range b.awaited {
		in = min(in, a.next.Sub(now))
	}
	if in > 0 {
		b.watching = len(b.awaited) > 0
		return nil, in, !b.watching
	}
	for i := range b.awaited {
		if a := &b.awaited[i]; a.next.Sub(now) <= a.pause/4 {
			a.pause = min(a.pause*3/2, watchPauses)
			a.next = now.Add(a.pause)
			some = append(some, *a)
		}
	}
	return some, 0, false
}

// seen are those that can be seen now.
func (b *bell) seen(all []awaited) []awaited {
	ctx, cancel := context.WithTimeout(b.s.life, lookTimeout)
	defer cancel()
	ids := bson.A{}
	for _, a := range all {
		ids = append(ids, a.id)
	}
	cur, err := b.s.envs.Find(ctx, bson.D{field("_id", op("$in", ids))}, options.Find().SetProjection(bson.D{field("last", 1)}))
	if err != nil {
		return nil
	}
	defer cur.Close(ctx)
	last := map[bson.ObjectID]lastVerb{}
	for cur.Next(ctx) {
		id, _ := cur.Current.Lookup("_id").ObjectIDOK()
		last[id], _ = readLast(cur.Current.Lookup("last"))
	}
	return slices.DeleteFunc(all, func(a awaited) bool {
		l, there := last[a.id]
		return !there || !a.lease.IsZero() && l != (lastVerb{lease: a.lease, verb: a.verb})
	})
}
