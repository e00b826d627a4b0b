package mongoq

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// turn is a claimer's place among those of other processes on the same queue. Two that claim the same envelopes at once
// hinder each other on each of them, and one of them gets nothing for it. So claimers that met go one after another for
// a while: whose turn it is stands in <Collection>.turns, one document for each queue, until it gives the turn back or
// has had it for long enough. That is a courtesy: the claim's own guard is what keeps envelopes from being claimed twice,
// and a claimer that cannot get a turn soon claims without.
type turn struct {
	until time.Time     // claims go by turns; zero: there is nobody else
	pause time.Duration // between two tries
	made  bool          // the document is there
}

const (
	// turnsFor is how long claimers go by turns after they met.
	turnsFor = time.Second
	// turnLength is how long a turn lasts that is not given back.
	turnLength = 250 * time.Millisecond
	// turnPatience is how long a claimer tries to get one, and turnHaste how long if somebody wants to know at once
	// whether the queue is empty.
	turnPatience, turnHaste = 3 * time.Second, 250 * time.Millisecond
	// turnPause and turnPauses bound the time between two tries: it grows while they fail.
	turnPause, turnPauses = 2 * time.Millisecond, 250 * time.Millisecond
)

// learn notes how many candidates a claim has lost to others. One envelope that several woke for is no reason to queue.
func (t *turn) learn(lost int) {
	if lost > 1 {
		t.until = time.Now().Add(turnsFor)
	}
}

// takeTurn waits for the claimer's turn, if claims go by turns now. The function ends it.
func (c *claimer) takeTurn(ctx context.Context) (over func()) {
	if time.Now().After(c.turn.until) {
		return func() {}
	}
	by := bson.NewObjectID()
	patience := turnPatience
	if c.hasty {
		patience = turnHaste
	}
	for began := time.Now(); time.Since(began) < patience; {
		got, err := c.seizeTurn(ctx, by)
		if err != nil {
			break
		}
		if got {
			c.turn.pause /= 2
			return sync.OnceFunc(func() {
				if !c.s.begin() {
					return
				}
				go c.s.endTurn(c.name, by)
			})
		}
		c.turn.until = time.Now().Add(turnsFor) // there are others
		c.turn.pause = min(max(c.turn.pause*13/12, turnPause), turnPauses)
		if sleep(ctx, min(c.turn.pause/2+rand.N(c.turn.pause), patience-time.Since(began))) != nil {
			break
		}
	}
	c.turn.made = false // the document may be gone
	return func() {}
}

// seizeTurn takes the turn unless somebody has it.
func (c *claimer) seizeTurn(ctx context.Context, by bson.ObjectID) (bool, error) {
	if !c.turn.made {
		insert := op("$setOnInsert", bson.D{field("by", by)})
		if _, err := c.s.moveTurn(ctx, bson.D{field("_id", c.name)}, insert, true); err != nil && !hasCode(err, codeDuplicateKey) {
			return false, err
		}
		c.turn.made = true
	}
	free := bson.D{field("_id", c.name), field("$expr", op("$or", bson.A{
		op("$lte", bson.A{"$until", now}),
		op("$gt", bson.A{"$until", later(turnLength)}), // the server's clock was set back
	}))}
	return c.s.moveTurn(ctx, free, set(field("by", by), field("until", later(turnLength))), false)
}

// endTurn gives the turn back.
func (s *Store) endTurn(queue string, by bson.ObjectID) {
	defer s.wg.Done()
	_, _ = s.moveTurn(context.Background(), bson.D{field("_id", queue), field("by", by)}, op("$unset", bson.D{field("until", "")}), false)
}

// moveTurn updates a turn. It goes as a bare command, neither retried nor awaited by a majority.
func (s *Store) moveTurn(ctx context.Context, filter bson.D, update any, upsert bool) (bool, error) {
	reply, err := s.bounded(ctx, claimTimeout, bson.D{
		field("update", s.envs.Name()+".turns"),
		field("updates", bson.A{bson.D{field("q", filter), field("u", update), field("upsert", upsert)}}),
		field("writeConcern", bson.D{field("w", 1)}),
	})
	if err != nil {
		return false, err
	}
	if _, refused := reply.LookupErr("writeErrors"); refused == nil {
		return false, nil
	}
	n, _ := number(reply.Lookup("n"))
	return n == 1, nil
}
