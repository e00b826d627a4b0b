package mongoq

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// ring wakes those who wait for the queue, in this process and in others: something in it falls due a wait after a moment
// that may lie so long ago; less than zero: it was due by so much before that.
func (s *Store) ring(queue string, wait, ago time.Duration) {
	s.ringHere(queue, wait-ago, wait > 0)
	s.bell.ring(queue, wait-ago, wait > 0)
}

// longAgo is for what has been due since nobody knows when.
const longAgo = 100 * 365 * 24 * time.Hour

// ringHere wakes those of this process. later: it falls due later than it was rung for.
func (s *Store) ringHere(queue string, in time.Duration, later bool) {
	if c := s.claimerOf(queue); c != nil {
		c.due(in, later)
	}
}

// claimerOf is the queue's claimer, if anybody has asked for one.
func (s *Store) claimerOf(queue string) *claimer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claimers[queue]
}

// ringAll wakes all who wait in this process.
func (s *Store) ringAll() {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.claimers))
	s.mu.Unlock()
	for _, c := range all { // outside: who joins a line holds its lock, and takes the store's
		c.missed()
	}
}

// pauseAge is how old the knowledge of which queues are paused may be.
const pauseAge = time.Second

// pauses are the paused queues, as last read: one query for all queues of the store.
type pauses struct {
	mu   sync.Mutex
	read time.Time
	set  map[string]bool
}

// paused tells whether a queue is paused, as of at most a second ago.
func (s *Store) paused(ctx context.Context, queue string) (bool, error) {
	p := &s.pauses
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.set == nil || time.Since(p.read) >= pauseAge {
		ctx, cancel := context.WithTimeout(ctx, lookTimeout)
		defer cancel()
		asked := time.Now()
		cur, err := s.queues.Find(ctx, bson.D{field("paused", true)}, options.Find().SetProjection(bson.D{field("_id", 1)}))
		if err != nil {
			return false, err
		}
		var docs []struct {
			ID string `bson:"_id"`
		}
		if err := cur.All(ctx, &docs); err != nil {
			return false, err
		}
		p.set, p.read = make(map[string]bool, len(docs)), asked
		for _, d := range docs {
			p.set[d.ID] = true
		}
	}
	return p.set[queue], nil
}

// notePause makes this process's knowledge follow its own Pause and Resume at once.
func (s *Store) notePause(queue string, paused bool) {
	p := &s.pauses
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.set != nil {
		p.set[queue] = paused
	}
}
