package mongoq

import (
	"context"
	"errors"
	"iter"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// History is what a queue has done, as long as its Retention keeps it.
type History struct{ q *Queue }

// History gives the committed envelopes of this queue.
func (q *Queue) History() *History { return &History{q: q} }

// List gives the committed envelopes, the latest first. It reads while the caller goes on, and ends with an error as
// its last element if the server fails.
func (h *History) List(ctx context.Context) iter.Seq2[*Envelope, error] {
	return h.q.s.list(ctx, bson.D{field("q", h.q.name), field("processed", op("$type", "date"))},
		options.Find().SetHint(h.q.s.history).SetSort(bson.D{field("processed", -1), field("_id", -1)}))
}

// Replay pushes a committed envelope's payload and headers into the queue again, as a new envelope, and gives its id.
// The finished one is not touched. Options are those of Push. ErrNotFound: the history has no such envelope.
func (h *History) Replay(ctx context.Context, id bson.ObjectID, opts ...PushOption) (bson.ObjectID, error) {
	if err := h.q.s.open(); err != nil {
		return bson.NilObjectID, err
	}
	raw, err := h.q.s.envs.FindOne(ctx, bson.D{
		field("_id", id), field("q", h.q.name), field("processed", op("$type", "date")),
	}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return bson.NilObjectID, ErrNotFound
	}
	if err != nil {
		return bson.NilObjectID, err
	}
	e := read(raw)
	own := []PushOption{Headers(e.Headers), Priority(e.Priority)}
	return h.q.Push(ctx, e.Payload, append(own, opts...)...)
}
