package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
)

const (
	// crowded is how many jobs of a queue may be due before producers wait for the consumers.
	crowded = 1500
	// pushers are the goroutines of a producer.
	pushers = 4
	// callTimeout bounds a call whose caller is patient.
	callTimeout = 30 * time.Second
)

// errOnPurpose aborts a transaction.
var errOnPurpose = errors.New("aborted on purpose")

// produce pushes until ctx ends.
func (c *client) produce(ctx context.Context) {
	pipe, err := c.pipeline()
	if err != nil {
		c.trouble("pipeline", err)
		return
	}
	done := make(chan struct{})
	for range pushers {
		go func() {
			defer func() { done <- struct{}{} }()
			for pause(ctx, c.rng.span(0, time.Duration(2*pushers*float64(time.Second)/c.spec.Rate))) == nil {
				if !c.isCrowded(ctx) {
					c.pushSome(pipe)
				}
			}
		}()
	}
	for range pushers {
		<-done
	}
}

// isCrowded waits a while if a queue that it draws has too many due.
func (c *client) isCrowded(ctx context.Context) bool {
	if !c.rng.chance(0.05) {
		return false
	}
	specs := queueSpecs()
	s, err := c.queues[specs[c.rng.intn(len(specs))].name].Stats(ctx)
	if err != nil || s.Ready < crowded {
		return false
	}
	_ = pause(ctx, time.Second)
	return true
}

// A draft is a job and how it is to be pushed.
type draft struct {
	job        job
	opts       []mongoq.PushOption
	delay, ttl time.Duration
}

// pushed is a push on the way.
type pushed struct {
	c   *client
	key string
	q   string
}

func (c *client) key() string { return fmt.Sprintf("%s-%d", c.spec.Proc, c.tries.Add(1)) }

func (c *client) pushes(q string, d draft, id bson.ObjectID) pushed {
	e := entry{What: notePush, Key: d.job.Key, Q: q, Delay: int64(d.delay), TTL: int64(d.ttl)}
	if !id.IsZero() {
		e.ID = id.Hex()
	}
	c.ledger.write(e)
	return pushed{c: c, key: d.job.Key, q: q}
}

func (p pushed) told(id bson.ObjectID, err error) {
	result, text := resultOf(err)
	p.toldAs(id, result, text)
}

func (p pushed) toldAs(id bson.ObjectID, result, text string) {
	e := entry{What: notePushed, Key: p.key, Q: p.q, Result: result, Err: text}
	if !id.IsZero() {
		e.ID = id.Hex()
	}
	p.c.ledger.write(e)
}

// patience is a context for one call: of most callers, long enough for any answer; of some, not.
func (c *client) patience() (context.Context, context.CancelFunc) {
	if c.rng.chance(0.02) {
		return context.WithTimeout(context.Background(), c.rng.span(time.Millisecond, 50*time.Millisecond))
	}
	return context.WithTimeout(context.Background(), callTimeout)
}

// draw makes a job for a queue.
func (c *client) draw(q string) draft {
	d := draft{job: job{Key: c.key(), Work: c.rng.intn(20)}}
	switch {
	case q == qFlaky && c.rng.chance(0.1):
		d.job.Fails = always
	case q == qFlaky:
		d.job.Fails = c.rng.intn(4)
	case q == pipeName && c.rng.chance(0.02):
		d.job.Fails = always // one of its parts
	}
	if c.rng.chance(0.2) {
		d.delay = c.rng.span(0, 3*time.Second)
		d.opts = append(d.opts, mongoq.Delay(d.delay))
	}
	if c.rng.chance(0.3) {
		d.opts = append(d.opts, mongoq.Priority(1+c.rng.intn(4)))
	}
	if specOf(q).mortal {
		d.ttl = d.delay/2 + c.rng.span(200*time.Millisecond, 4*time.Second)
		d.opts = append(d.opts, mongoq.TTL(d.ttl))
	}
	return d
}

// pushSome makes one call that pushes, of some kind.
func (c *client) pushSome(pipe *mongoq.Pipeline) {
	specs := queueSpecs()
	q := specs[c.rng.intn(len(specs))]
	for q.fed {
		q = specs[c.rng.intn(len(specs))]
	}
	switch n := c.rng.float(); {
	case c.spec.Calm:
		c.pushOne(qWork)
	case n < 0.15:
		c.pushPipe(pipe)
	case n < 0.25:
		c.pushMany(q.name)
	case n < 0.35:
		c.pushInTransaction(q.name)
	case n < 0.6 && q.keeps:
		c.pushWithID(q.name)
	default:
		c.pushOne(q.name)
	}
}

func (c *client) pushOne(q string) {
	ctx, cancel := c.patience()
	defer cancel()
	d := c.draw(q)
	p := c.pushes(q, d, bson.NilObjectID)
	p.told(c.queues[q].Push(ctx, d.job, d.opts...))
}

func (c *client) pushPipe(pipe *mongoq.Pipeline) {
	ctx, cancel := c.patience()
	defer cancel()
	d := c.draw(pipeName)
	p := c.pushes(pipeName, d, bson.NilObjectID)
	p.told(pipe.Push(ctx, d.job, d.opts...))
}

// pushWithID repeats a push until its outcome is known. What is kept in a history is not forgotten, so that this makes no
// second one.
func (c *client) pushWithID(q string) {
	d := c.draw(q)
	id := bson.NewObjectID()
	d.opts = append(d.opts, mongoq.ID(id))
	p := c.pushes(q, d, id)
	var err error
	unknown := false
	for range 5 {
		ctx, cancel := c.patience()
		_, err = c.queues[q].Push(ctx, d.job, d.opts...)
		cancel()
		if err == nil {
			break
		}
		unknown = unknown || errors.Is(err, mongoq.ErrOutcomeUnknown)
	}
	if err != nil && unknown { // a refusal of the last says nothing of the first
		p.toldAs(id, resultUnknown, err.Error())
		return
	}
	p.told(id, err)
}

func (c *client) pushMany(q string) {
	ctx, cancel := c.patience()
	defer cancel()
	n := 2 + c.rng.intn(40)
	payloads := make([]any, n)
	ps := make([]pushed, n)
	for i := range payloads {
		d := c.draw(q)
		payloads[i] = mongoq.With(d.job, d.opts...)
		ps[i] = c.pushes(q, d, bson.NilObjectID)
	}
	ids, err := c.queues[q].PushMany(ctx, payloads)
	for i, err := range singly(err, n) {
		var id bson.ObjectID
		if err == nil {
			id = ids[i]
		}
		ps[i].told(id, err)
	}
}

// singly gives each of n members of a batch its error.
func singly(err error, n int) []error {
	errs := make([]error, n)
	if be, ok := errors.AsType[*mongoq.BatchError](err); ok {
		for _, f := range be.Failed {
			errs[f.Index] = f.Err
		}
		return errs
	}
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// pushInTransaction pushes together with an order of the user's: both are there then, or neither.
func (c *client) pushInTransaction(q string) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	d := c.draw(q)
	abort := c.rng.chance(0.2)
	p := c.pushes(q, d, bson.NilObjectID)
	var id bson.ObjectID
	err := c.transaction(ctx, func(ctx context.Context) error {
		if _, err := c.db.Collection(ordersName).InsertOne(ctx, bson.D{{Key: "_id", Value: d.job.Key}}); err != nil {
			return err
		}
		var err error
		if id, err = c.queues[q].Push(ctx, d.job, d.opts...); err != nil {
			return err
		}
		if abort {
			return errOnPurpose
		}
		return nil
	})
	switch {
	case errors.Is(err, errOnPurpose):
		p.toldAs(bson.NilObjectID, resultRefused, err.Error())
	case err != nil:
		p.toldAs(bson.NilObjectID, resultUnknown, err.Error())
	default:
		p.told(id, nil)
	}
}

// transaction runs f in a transaction, which the driver repeats where that may help. Any error but one of f's own leaves
// open what happened.
func (c *client) transaction(ctx context.Context, f func(context.Context) error) error {
	session, err := c.db.Client().StartSession()
	if err != nil {
		return err
	}
	defer session.EndSession(context.WithoutCancel(ctx))
	_, err = session.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, f(ctx) })
	if err != nil && !mongo.IsTimeout(err) {
		slog.Debug("transaction", "error", err)
	}
	return err
}
