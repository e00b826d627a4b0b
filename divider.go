package mongoq

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Dividers stand in a queue that is busy: documents of the ready index that are never due, one in front of each
// priority. A look that finds nothing where it begins goes on to the next living key, whatever bound it has, through all
// dead entries between: a look for the first priority through those of the second, and a look into an empty queue
// through those of a busy neighbour. It ends at a divider instead.

// dividers are their priorities.
var dividers = bson.A{0.5, 1.5, 2.5, 3.5}

// undivided is for queries that would meet dividers otherwise: those that do not ask for what is due, or is dead.
var undivided = field("prio", op("$nin", dividers))

// never is when a divider falls due: later than any program writes.
var never = time.Date(9999, time.December, 31, 0, 0, 0, 0, time.UTC)

const (
	// dividersAfter is how many envelopes a claimer meets before a queue is called busy.
	dividersAfter = 500
	// dividersLast is how long dividers stay in a queue that is busy no more, and dividersAnew how often they are renewed
	// in one that is.
	dividersLast = 7 * 24 * time.Hour
	dividersAnew = 24 * time.Hour
)

// divide puts dividers into a queue that has become busy, and renews them once a day. Without them it is slower, no more.
func (c *claimer) divide() {
	met := int64(c.low.met)
	if met-c.divided.Load() < dividersAfter || time.Now().Before(time.Unix(0, c.dividing.Load())) || !c.s.begin() {
		return
	}
	c.dividing.Store(time.Now().Add(dividersAnew).UnixNano())
	go func() {
		defer c.s.wg.Done()
		ctx, cancel := context.WithTimeout(c.s.life, attemptTimeout)
		defer cancel()
		var models []mongo.WriteModel
		for _, prio := range dividers {
			models = append(models, mongo.NewUpdateOneModel().SetUpsert(true).
				SetFilter(bson.D{field("_id", fmt.Sprintf("%s\x00%v", c.name, prio))}).
				SetUpdate(op("$set", bson.D{
					field("q", c.name), field("prio", prio), field("when", never), field("divider", true),
					field("expireAt", c.s.clock.guess().Add(dividersLast)),
				})))
		}
		if _, err := c.s.quick.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false)); err != nil {
			c.s.log.Debug("mongoq: no dividers could be put into a busy queue; looks into it take longer", "queue", c.name, "error", err)
			c.dividing.Store(time.Now().Add(time.Minute).UnixNano())
			return
		}
		c.divided.Store(met)
	}()
}
