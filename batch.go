package mongoq

import (
	"context"
	"slices"
	"sync"
)

// batcher sends together what arrives while earlier rounds are under way. A call that finds a free flight goes at once,
// by itself: a lone caller waits for nobody. What comes meanwhile stands in line and goes in the next round. There is
// no timer, and when nothing is under way nothing waits.
//
// A caller holds a place from its call to its answer. There are so many places and no more: a producer that is faster
// than the server waits, and memory does not grow.
type batcher[T any] struct {
	s       *Store
	limit   int              // calls in one round
	flights int              // rounds under way at once
	places  chan struct{}    // of those in line or under way
	round   func([]*call[T]) // sends a round, and answers each of its calls
	weigh   func(T) int      // an item's bytes; nil: they don't count
	most    int              // bytes in one round

	mu     sync.Mutex
	line   []*call[T]
	flying int
}

// call is one member of a round.
type call[T any] struct {
	item   T
	answer chan error
	done   func(error)   // is told instead, if nobody waits for the answer; it must not block
	places chan struct{} // it holds one of these until it is answered; nil: none
}

// tell answers a call; nothing of it is under way any more.
func (c *call[T]) tell(err error) {
	if c.places != nil {
		<-c.places
	}
	if c.done != nil {
		c.done(err)
		return
	}
	c.answer <- err
}

func newBatcher[T any](s *Store, limit, flights int, round func([]*call[T])) *batcher[T] {
	return &batcher[T]{s: s, limit: limit, flights: flights, places: make(chan struct{}, 4*limit*flights), round: round}
}

// do sends an item: alone, if a flight is free, else with others; without a way to go alone, as a round of one. sent is
// false when the caller's context ended before anything was sent; when it ended later, the outcome is unknown to the
// caller, and the round goes on.
func (b *batcher[T]) do(ctx context.Context, item T, alone func(context.Context) error) (sent bool, err error) {
	select {
	case b.places <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	c := &call[T]{item: item, answer: make(chan error, 1), places: b.places}
	free := b.enter(c)
	switch {
	case free && alone != nil:
		err := alone(ctx)
		<-b.places
		b.land()
		return true, err
	case free:
		go b.fly([]*call[T]{c})
	}
	select {
	case err := <-c.answer:
		return true, err
	case <-ctx.Done():
		return b.leave(ctx, c)
	}
}

// post sends an item like do, and waits for nothing but a place: done is told the outcome, and must not block.
func (b *batcher[T]) post(item T, alone func(context.Context) error, done func(error)) {
	b.places <- struct{}{}
	c := &call[T]{item: item, done: done, places: b.places}
	if !b.enter(c) {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
		defer cancel()
		err := alone(ctx)
		b.land()
		c.tell(err)
	}()
}

// enter gives a call a flight of its own, if one is free, or puts it in line.
func (b *batcher[T]) enter(c *call[T]) (free bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.flying == b.flights || len(b.line) > 0 {
		b.line = append(b.line, c)
		return false
	}
	b.flying++
	return true
}

// leave takes a call whose caller gives up out of the line, if it still stands there.
func (b *batcher[T]) leave(ctx context.Context, c *call[T]) (sent bool, err error) {
	b.mu.Lock()
	i := slices.Index(b.line, c)
	if i >= 0 {
		b.line = slices.Delete(b.line, i, i+1)
		<-b.places
	}
	b.mu.Unlock()
	if i >= 0 {
		return false, ctx.Err()
	}
	return true, c.await(ctx)
}

// await gives the answer of a call under way, or tells that it is unknown when the context has ended without one.
func (c *call[T]) await(ctx context.Context) error {
	select {
	case err := <-c.answer:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-c.answer: // in the same moment
		return err
	default:
		return unknown(ctx.Err())
	}
}

// land ends a lone call's flight: if others stand in line, they go now.
func (b *batcher[T]) land() {
	if calls := b.next(); calls != nil {
		go b.fly(calls)
	}
}

// next takes a round from the line; nil: there is nobody, and the flight is over.
func (b *batcher[T]) next() []*call[T] {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := min(len(b.line), b.limit)
	if n == 0 {
		b.flying--
		return nil
	}
	if b.weigh != nil {
		bytes := b.weigh(b.line[0].item)
		for i := 1; i < n; i++ {
			if bytes += b.weigh(b.line[i].item); bytes > b.most {
				n = i
			}
		}
	}
	calls := slices.Clone(b.line[:n])
	rest := copy(b.line, b.line[n:])
	clear(b.line[rest:])
	b.line = b.line[:rest]
	return calls
}

func (b *batcher[T]) fly(calls []*call[T]) {
	if b.s.begin() { // else the store is closed, and what is settled after that is settled all the same
		defer b.s.wg.Done()
	}
	for calls != nil {
		b.round(calls)
		calls = b.next()
	}
}

// singly answers a call of a round by its own write, without holding up the round.
func singly[T interface{ alone(context.Context) error }](c *call[T]) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), attempts*attemptTimeout)
		defer cancel()
		c.tell(c.item.alone(ctx))
	}()
}

func items[T any](calls []*call[T]) []T {
	all := make([]T, len(calls))
	for i, c := range calls {
		all[i] = c.item
	}
	return all
}

func answer[T any](calls []*call[T], err error) {
	for _, c := range calls {
		c.tell(err)
	}
}
