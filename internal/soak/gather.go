package main

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
)

// gather reads the ledgers and the database, and checks that the server's indexes and counts agree.
func (c *conductor) gather(ctx context.Context) (evidence, []violation, error) {
	e := evidence{nodes: len(c.nodes)}
	var err error
	if e.entries, err = readLedgers(c.dir); err != nil {
		return e, nil, err
	}
	if e.effects, err = keysOf(ctx, c.db.Collection(effectsName)); err != nil {
		return e, nil, err
	}
	if e.orders, err = keysOf(ctx, c.db.Collection(ordersName)); err != nil {
		return e, nil, err
	}
	counts := map[string]mongoq.Stats{}
	partitions, err := c.db.ListCollectionNames(ctx, bson.D{{Key: "name", Value: bson.Regex{Pattern: `^mongoq\.history\.`}}})
	if err != nil {
		return e, nil, err
	}
	for _, name := range append(partitions, "mongoq") {
		docs, err := readDocuments(ctx, c.db.Collection(name), counts)
		if err != nil {
			return e, nil, err
		}
		e.docs = append(e.docs, docs...)
	}
	bad, err := c.compare(ctx, counts)
	return e, bad, err
}

// readDocuments reads the envelopes of a collection, and counts them in their queues.
func readDocuments(ctx context.Context, coll *mongo.Collection, counts map[string]mongoq.Stats) (docs []document, err error) {
	cur, err := coll.Find(ctx, bson.D{{Key: "divider", Value: nil}})
	if err != nil {
		return nil, err
	}
	defer cur.Close(ctx)
	for cur.Next(ctx) {
		d, err := readDocument(append(bson.Raw(nil), cur.Current...), counts)
		if err != nil {
			return nil, err
		}
		docs = append(docs, d)
	}
	return docs, cur.Err()
}

func keysOf(ctx context.Context, coll *mongo.Collection) (map[string]bool, error) {
	cur, err := coll.Find(ctx, bson.D{})
	if err != nil {
		return nil, err
	}
	defer cur.Close(ctx)
	keys := map[string]bool{}
	for cur.Next(ctx) {
		keys[cur.Current.Lookup("_id").StringValue()] = true
	}
	return keys, cur.Err()
}

// readDocument reads a stored envelope, and counts it in its queue.
func readDocument(raw bson.Raw, counts map[string]mongoq.Stats) (document, error) {
	var v struct {
		ID        bson.ObjectID `bson:"_id"`
		Q         string        `bson:"q"`
		Processed *time.Time    `bson:"processed"`
		Reserved  *time.Time    `bson:"reserved"`
		Dead      *struct {
			From string    `bson:"from"`
			Kind string    `bson:"kind"`
			At   time.Time `bson:"at"`
		} `bson:"dead"`
		Replay struct {
			Of bson.ObjectID `bson:"id"`
			By string        `bson:"by"`
		} `bson:"replayOf"`
		Part    bson.RawValue `bson:"part"`
		Payload job           `bson:"payload"`
	}
	if err := bson.Unmarshal(raw, &v); err != nil {
		return document{}, fmt.Errorf("%v: %w", raw, err)
	}
	d := document{
		ID: v.ID.Hex(), Key: v.Payload.Key, Q: v.Q, Part: v.Part.Type != 0, Text: raw.String,
		Done: v.Processed != nil, Live: v.Processed == nil && v.Dead == nil, Reserved: v.Processed == nil && v.Reserved != nil,
	}
	if !v.Replay.Of.IsZero() {
		d.Of, d.Replay = v.Replay.Of.Hex(), v.Replay.By
	}
	s := counts[v.Q]
	if d.Done {
		s.Processed++
	} else {
		s.Total++
	}
	counts[v.Q] = s
	if v.Dead != nil {
		d.Dead, d.DeadAt = v.Dead.Kind, v.Dead.At.UnixMilli()
		from := counts[v.Dead.From]
		from.Dead++
		counts[v.Dead.From] = from
	}
	return d, nil
}

// compare holds the counts of a plain scan against those that the library makes by its indexes, and has the server
// validate the collection.
func (c *conductor) compare(ctx context.Context, counts map[string]mongoq.Stats) ([]violation, error) {
	var bad []violation
	store, err := mongoq.Open(ctx, c.db, mongoq.Config{PartitionHistory: partitioning(c.cfg.partition)})
	if err != nil {
		return nil, err
	}
	defer func() { _ = store.Close(context.WithoutCancel(ctx)) }()
	for name, want := range counts {
		q, err := store.Queue(name, mongoq.QueueConfig{})
		if err != nil {
			return nil, err
		}
		got, err := q.Stats(ctx, mongoq.Exact())
		if err != nil {
			return nil, err
		}
		if got.Total != want.Total || got.Processed != want.Processed || got.Dead != want.Dead {
			bad = append(bad, violation{Rule: ruleStored, Text: fmt.Sprintf(
				"queue %s: a scan finds %d live, %d done, %d dead; Stats says %d, %d, %d",
				name, want.Total, want.Processed, want.Dead, got.Total, got.Processed, got.Dead)})
		}
	}
	node, err := c.primary(ctx, 30*time.Second)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Valid bool `bson:"valid"`
	}
	raw, err := c.nodes[node].Database(dbName).RunCommand(ctx, bson.D{{Key: "validate", Value: "mongoq"}, {Key: "full", Value: true}}).Raw()
	if err != nil {
		return nil, err
	}
	if err := bson.Unmarshal(raw, &answer); err != nil {
		return nil, err
	}
	if !answer.Valid {
		bad = append(bad, violation{Rule: ruleStored, Text: raw.String()})
	}
	return bad, nil
}
