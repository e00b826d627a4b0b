package mongoq

import (
	"context"
	"iter"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// DeadLetters are the envelopes that died in a queue, in whatever dead-letter queue they are now.
type DeadLetters struct{ q *Queue }

// DeadLetters gives the dead letters that came from this queue.
func (q *Queue) DeadLetters() *DeadLetters { return &DeadLetters{q: q} }

// deadFilter matches the dead letters of a queue.
func (d *DeadLetters) filter() bson.D {
	return bson.D{field("dead.from", d.q.name), field("dead", op("$exists", true)), field("processed", nil)}
}

// List gives the dead letters, those of one kind together. It reads while the caller goes on, and ends with an error
// as its last element if the server fails.
func (d *DeadLetters) List(ctx context.Context) iter.Seq2[*Envelope, error] {
	return d.q.s.list(ctx, d.filter(), options.Find().SetHint(d.q.s.dead).SetSort(deadIndex.keys))
}

// Redrive puts dead letters back into the queue they came from, due at once, with no retries and no deadline, and says
// how many. All of them, or those of IDs. One that somebody holds a lease of stays. When it fails it has put back as
// many as it says, or more if the error is ErrOutcomeUnknown; it may be repeated, and puts each back once.
func (d *DeadLetters) Redrive(ctx context.Context, opts ...RedriveOption) (int64, error) {
	var set redriveSettings
	for _, o := range opts {
		if err := o.applyRedrive(&set); err != nil {
			return 0, err
		}
	}
	var only []bson.ObjectID
	if set.some {
		if only = set.ids; len(only) == 0 {
			return 0, nil
		}
	}
	s, began := d.q.s, time.Now()
	n, err := s.batches(ctx, append(d.filter(), field("$expr", idle())), "dead.at", s.dead, only,
		func(ctx context.Context, batch bson.D) (int64, error) {
			res, err := s.envs.UpdateMany(ctx, batch, redriveUpdate(bson.NewObjectID()))
			if err != nil {
				return 0, err
			}
			return res.ModifiedCount, nil
		})
	s.ring(d.q.name, -time.Since(began))
	return n, err
}

// Purge deletes the dead letters that nobody holds a lease of, and says how many. When it fails it has deleted as many
// as it says, or more if the error is ErrOutcomeUnknown.
func (d *DeadLetters) Purge(ctx context.Context) (int64, error) {
	return d.q.s.deleteAll(ctx, append(d.filter(), field("$expr", idle())), "dead.at", d.q.s.dead)
}

// closeCursor closes a cursor though its context has ended, and does not wait long for a server that is away.
func closeCursor(ctx context.Context, cur *mongo.Cursor) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTimeout)
	defer cancel()
	_ = cur.Close(ctx)
}

// list reads envelopes one by one.
func (s *Store) list(ctx context.Context, filter bson.D, opts *options.FindOptionsBuilder) iter.Seq2[*Envelope, error] {
	return func(yield func(*Envelope, error) bool) {
		if err := s.open(); err != nil {
			yield(nil, err)
			return
		}
		cur, err := s.envs.Find(ctx, filter, opts)
		if err != nil {
			yield(nil, err)
			return
		}
		defer closeCursor(ctx, cur)
		for cur.Next(ctx) {
			e := read(append(bson.Raw(nil), cur.Current...)).Envelope
			if !yield(&e, nil) {
				return
			}
		}
		if err := cur.Err(); err != nil {
			yield(nil, err)
		}
	}
}
