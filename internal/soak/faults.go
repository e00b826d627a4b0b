package main

import (
	"context"
	"fmt"
	"math"
	"sync"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// respite is what a node has at least between two faults of its own.
const respite = 5 * time.Second

// torment lets the faults happen, each kind of track by itself, and heals everything at the end.
func (c *conductor) torment(ctx context.Context, faults []fault) {
	ofTrack := map[string]int{}
	for i, t := range tracks {
		for _, k := range t.kinds {
			ofTrack[k] = i
		}
	}
	var all sync.WaitGroup
	end := c.began.Add(c.cfg.length)
	for i := range tracks {
		all.Go(func() {
			var healed time.Time
			for _, f := range faults {
				if ofTrack[f.Kind] != i {
					continue
				}
				// A node that takes long to come back must not be killed again at once, for ever.
				begin := c.began.Add(f.At)
				if rest := healed.Add(respite); i == nodesTrack && begin.Before(rest) {
					begin = rest
				}
				if begin.After(end) || pause(ctx, time.Until(begin)) != nil {
					return
				}
				c.inflict(ctx, f)
				healed = time.Now()
			}
		})
	}
	all.Wait()
	_ = pause(ctx, time.Until(end))
}

// inflict makes one fault happen, from its beginning to its end.
func (c *conductor) inflict(ctx context.Context, f fault) {
	var target, what string
	node := f.Target
	switch f.Kind {
	case faultKill, faultPause, faultClock:
		target = c.slots[f.Target].name()
	default:
		if node == primaryNode {
			var err error
			if node, err = c.primary(ctx, 5*time.Second); err != nil {
				c.ledger.write(entry{What: noteHealed, N: f.N, Verb: f.Kind, Text: "skipped: " + err.Error()})
				return
			}
		}
		target = fmt.Sprintf("node %d", node)
	}
	if f.On != "" {
		what = fmt.Sprintf("%s %d %d", f.On, f.Code, f.Amount)
	}
	c.ledger.write(entry{What: noteFault, N: f.N, Verb: f.Kind, To: target, Text: what})
	err := c.do(ctx, f, node)
	healed := entry{What: noteHealed, N: f.N, Verb: f.Kind, To: target}
	if err != nil {
		healed.Err = err.Error()
	}
	c.ledger.write(healed)
}

func (c *conductor) do(ctx context.Context, f fault, node int) error {
	switch f.Kind {
	case faultKill:
		s := c.slots[f.Target]
		s.kill()
		_ = pause(ctx, f.For)
		if err := c.spawn(s, clientSpec{}); err != nil {
			c.trouble("no client in the place of one that was killed: %v", err)
		}
	case faultPause:
		s := c.slots[f.Target]
		s.signal(syscall.SIGSTOP)
		_ = pause(ctx, f.For)
		s.signal(syscall.SIGCONT)
	case faultClock:
		c.slots[f.Target].tell(fmt.Sprintf("clock %d", time.Duration(f.Amount)*time.Minute))
	case faultCrash:
		n := c.server.Node(node)
		n.Kill()
		_ = pause(ctx, f.For)
		if err := n.Restart(context.WithoutCancel(ctx)); err != nil {
			c.trouble("a node that was killed could not be restarted: %v", err)
		}
	case faultFreeze:
		n := c.server.Node(node)
		if err := n.Pause(); err != nil {
			return err
		}
		_ = pause(ctx, f.For)
		return n.Resume()
	case faultStepDown:
		secs := int(math.Ceil(f.For.Seconds()))
		return c.admin(ctx, node, bson.D{
			{Key: "replSetStepDown", Value: secs}, {Key: "secondaryCatchUpPeriodSecs", Value: min(1, secs)}, {Key: "force", Value: true},
		})
	case faultCut:
		c.net.cut(node)
		_ = pause(ctx, f.For)
		return c.mend(node)
	case faultReset, faultDelay, faultMute, faultDeaf:
		if err := c.net.poison(node, toxicOf(f)); err != nil {
			return err
		}
		_ = pause(ctx, f.For)
		c.net.cure(node)
	case faultError, faultHangUp, faultConcern, faultBlock:
		return c.failPoint(ctx, f, node)
	}
	return nil
}

// mend tries until the port, which somebody else may have had for a moment, is ours again.
func (c *conductor) mend(node int) (err error) {
	for range 100 {
		if err = c.net.mend(node); err == nil {
			return nil
		}
		_ = pause(context.Background(), 50*time.Millisecond)
	}
	c.trouble("a proxy that was stopped could not be started: %v", err)
	return err
}

func toxicOf(f fault) toxic {
	t := toxic{Name: f.Kind, Toxicity: float32(f.Share), Stream: "downstream", Attributes: map[string]int{}}
	switch f.Kind {
	case faultReset:
		t.Type, t.Attributes["timeout"] = "reset_peer", 0
	case faultDelay:
		t.Type, t.Toxicity, t.Attributes["latency"], t.Attributes["jitter"] = "latency", 1, f.Amount, f.Amount/2
	case faultDeaf:
		t.Type, t.Stream, t.Attributes["timeout"] = "timeout", "upstream", 0
	case faultMute:
		t.Type, t.Attributes["timeout"] = "timeout", 0
	}
	return t
}

// failPoint has commands of the clients fail on a node for a time.
func (c *conductor) failPoint(ctx context.Context, f fault, node int) error {
	data := bson.D{{Key: "failCommands", Value: bson.A{f.On}}, {Key: "appName", Value: appName}}
	switch f.Kind {
	case faultError:
		data = append(data, bson.E{Key: "errorCode", Value: f.Code})
	case faultHangUp:
		data = append(data, bson.E{Key: "closeConnection", Value: true})
	case faultConcern:
		data = append(data, bson.E{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 64}, {Key: "errmsg", Value: "by the soak"}}})
	case faultBlock:
		data = append(data, bson.E{Key: "blockConnection", Value: true}, bson.E{Key: "blockTimeMS", Value: f.Amount})
	}
	on := bson.D{
		{Key: "configureFailPoint", Value: "failCommand"},
		{Key: "mode", Value: bson.D{{Key: "activationProbability", Value: f.Share}}}, {Key: "data", Value: data},
	}
	if err := c.admin(ctx, node, on); err != nil {
		return err
	}
	_ = pause(ctx, f.For)
	// One that was killed meanwhile has forgotten it.
	return c.admin(ctx, node, bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}})
}

// calm undoes what may have been left, on every node.
func (c *conductor) calm(ctx context.Context) {
	for i := range c.nodes {
		c.net.cure(i)
		for range 20 {
			if c.admin(ctx, i, bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}}) == nil {
				break
			}
			_ = pause(ctx, 200*time.Millisecond)
		}
	}
}

// admin runs a command on one node.
func (c *conductor) admin(ctx context.Context, node int, cmd bson.D) error {
	return c.nodes[node].Database("admin").RunCommand(ctx, cmd).Err()
}

// primary is the node that takes writes now; it is waited for, for a time.
func (c *conductor) primary(ctx context.Context, limit time.Duration) (int, error) {
	for end := time.Now().Add(limit); time.Now().Before(end) && ctx.Err() == nil; {
		if i, ok := c.primaryNow(ctx); ok {
			return i, nil
		}
		_ = pause(ctx, 20*time.Millisecond)
	}
	return 0, errNoPrimary
}

// primaryNow asks all nodes at once.
func (c *conductor) primaryNow(ctx context.Context) (int, bool) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	found := make(chan int, len(c.nodes))
	for i, n := range c.nodes {
		go func() {
			var h struct {
				Primary bool `bson:"isWritablePrimary"`
			}
			if err := n.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&h); err != nil || !h.Primary {
				i = -1
			}
			found <- i
		}()
	}
	for range c.nodes {
		if i := <-found; i >= 0 {
			return i, true
		}
	}
	return 0, false
}
