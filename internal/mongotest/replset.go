package mongotest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// initiate makes a replica set of the nodes and returns when the first is the primary
// and all others are secondaries that can follow each other.
func (s *Server) initiate(ctx context.Context) error {
	members := make(bson.A, len(s.nodes))
	for i, n := range s.nodes {
		members[i] = bson.D{{Key: "_id", Value: i}, {Key: "host", Value: n.Addr()}}
	}
	config := bson.D{
		{Key: "_id", Value: s.set},
		{Key: "members", Value: members},
		// Failover in about two seconds instead of ten.
		{Key: "settings", Value: bson.D{
			{Key: "electionTimeoutMillis", Value: 2000},
			{Key: "heartbeatIntervalMillis", Value: 500},
			// Follow the primary only. The oplog of a secondary begins where its initial
			// sync ended; another that has not come as far takes it for too far ahead and
			// does not sync from it for a minute, not even when it becomes the primary.
			{Key: "chainingAllowed", Value: false},
		}},
	}
	first := s.nodes[0]
	if err := first.admin(ctx, bson.D{{Key: "replSetInitiate", Value: config}}, nil); err != nil {
		return fmt.Errorf("initiating the replica set: %w%s", err, first.proc.tail())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if len(s.nodes) > 1 {
		go first.standForElection(ctx)
	}
	if err := eachNode(s.nodes, func(n *Node) error {
		return n.await(ctx, func(h hello) bool {
			if n == first {
				return h.Primary
			}
			return h.Secondary
		})
	}); err != nil {
		return err
	}
	if len(s.nodes) == 1 {
		return nil // and where access is controlled, nobody but users may note anything
	}
	return first.noteToAll(ctx, len(s.nodes))
}

// noteToAll returns when an entry of the oplog that the node makes now has reached all
// nodes, so that each of them can follow any other if the first dies.
func (n *Node) noteToAll(ctx context.Context, nodes int) error {
	note := bson.D{
		{Key: "appendOplogNote", Value: 1},
		{Key: "data", Value: bson.D{{Key: "ready", Value: nodes}}},
		{Key: "writeConcern", Value: bson.D{{Key: "w", Value: nodes}}},
	}
	if err := n.admin(ctx, note, nil); err != nil {
		return fmt.Errorf("waiting for all nodes to follow the first: %w", err)
	}
	return nil
}

// standForElection makes the node the primary as soon as the others will vote for it,
// where it would first wait for the election timeout.
func (n *Node) standForElection(ctx context.Context) {
	client, err := n.dial()
	if err != nil {
		return // the timeout does it, only later
	}
	defer disconnect(client)
	tick := time.NewTicker(4 * pollEvery)
	defer tick.Stop()
	for {
		err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "replSetStepUp", Value: 1}}).Err()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// hello is what matters here of a server's answer to the hello command.
type hello struct {
	Primary   bool   `bson:"isWritablePrimary"`
	Secondary bool   `bson:"secondary"`
	Set       string `bson:"setName"`
	Msg       string `bson:"msg"` // "isdbgrid" from a mongos
}

// await polls the node until its hello is ok, it dies or ctx ends.
func (n *Node) await(ctx context.Context, ok func(hello) bool) error {
	client, err := n.dial()
	if err != nil {
		return err
	}
	defer disconnect(client)
	n.mu.Lock()
	p := n.proc
	n.mu.Unlock()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var h hello
	for {
		err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&h)
		if err == nil && ok(h) {
			return nil
		}
		select {
		case <-p.done:
			return p.startError()
		case <-ctx.Done():
			return fmt.Errorf("%s answers %+v: %w%s", n.Addr(), h, errors.Join(context.Cause(ctx), err), p.tail())
		case <-tick.C:
		}
	}
}

// admin runs one command on this very node, whatever its state, and decodes the answer
// into out if not nil.
func (n *Node) admin(ctx context.Context, cmd bson.D, out any) error {
	client, err := n.dial()
	if err != nil {
		return err
	}
	defer disconnect(client)
	res := client.Database("admin").RunCommand(ctx, cmd)
	if out == nil {
		return res.Err()
	}
	return res.Decode(out)
}

func (n *Node) dial() (*mongo.Client, error) {
	opts := []*options.ClientOptions{options.Client().ApplyURI("mongodb://" + n.Addr() + "/?directConnection=true")}
	if n.server.opts.Client != nil {
		opts = append(opts, n.server.opts.Client)
	}
	client, err := mongo.Connect(opts...)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", n.Addr(), err)
	}
	return client, nil
}

// disconnect closes a client without waiting for anyone who still uses it.
func disconnect(client *mongo.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = client.Disconnect(ctx)
}
