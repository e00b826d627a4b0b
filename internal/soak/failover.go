package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

const (
	// goOn is what the clients may take to go on once a majority takes writes again.
	goOn = 2 * time.Second
	// electionLimit is what an election may take on a machine that does other things, too.
	electionLimit = time.Minute
)

// A killing is one death of a primary, by times in ns since 1970.
type killing struct {
	at      int64 // when it was killed
	elected int64 // when another was seen to be the primary
	writes  int64 // when a majority held what was written to that one, which the other has to follow first
}

// failover kills the primary of three nodes under load, some times, and times how the clients go on.
func failover(ctx context.Context, cfg config, out io.Writer) error {
	cfg.nodes = 3
	fmt.Fprintf(out, "failover: %d times, seed %d, %d producers, %d workers\n", cfg.failovers, cfg.seed, cfg.producers, cfg.workers)
	c, err := conduct(ctx, cfg, out)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.staff(clientSpec{Calm: true}); err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(cfg.seed, 0))
	var killings []killing
	for i := range cfg.failovers {
		if err := pause(ctx, time.Duration((5+3*rng.Float64())*float64(time.Second))); err != nil {
			return err
		}
		k, err := c.failOver(ctx, i+1)
		if err != nil {
			return err
		}
		killings = append(killings, k)
	}
	slow, err := c.pace(killings)
	if err != nil {
		return err
	}
	if err := c.conclude(ctx); err != nil {
		return err
	}
	if len(slow) > 0 {
		return fmt.Errorf("the clients did not go on in %v: %s", goOn, strings.Join(slow, ", "))
	}
	return nil
}

// failOver kills the primary, waits for another, lets the clients go on, and brings the dead one back.
func (c *conductor) failOver(ctx context.Context, n int) (killing, error) {
	var k killing
	old, err := c.primary(ctx, electionLimit)
	if err != nil {
		return k, err
	}
	node := c.server.Node(old)
	f := entry{What: noteFault, N: n, Verb: faultCrash, To: node.Addr()}
	c.ledger.write(f)
	k.at = time.Now().UnixNano()
	node.Kill()
	next, err := c.primary(ctx, electionLimit)
	if err != nil {
		return k, err
	}
	k.elected = time.Now().UnixNano()
	probes := c.nodes[next].Database(dbName).Collection("probes", options.Collection().SetWriteConcern(writeconcern.Majority()))
	for {
		if _, err := probes.InsertOne(ctx, bson.D{}); err == nil {
			break
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return k, err
		}
	}
	k.writes = time.Now().UnixNano()
	if err := pause(ctx, 3*goOn); err != nil {
		return k, err
	}
	if err := node.Restart(ctx); err != nil {
		return k, err
	}
	f.What = noteHealed
	c.ledger.write(f)
	return k, nil
}

// pace tells how soon after each election the clients had a push and a commit acknowledged, and which came too late.
func (c *conductor) pace(killings []killing) (slow []string, err error) {
	entries, err := readLedgers(c.dir)
	if err != nil {
		return nil, err
	}
	for i, k := range killings {
		var push, commit time.Duration // after the election; 0: none yet
		for _, e := range entries {
			after := time.Duration(e.At - k.elected)
			switch {
			case after <= 0 || e.Result != resultOK:
			case e.What == notePushed && push == 0:
				push = after
			case e.What == noteAnswer && e.Verb == verbCommit && commit == 0:
				commit = after
			}
		}
		majority := time.Duration(k.writes - k.elected)
		c.say("failover %d: elected %.2f s after the kill; from then on, a majority writes after %.2f s, the first push is acknowledged after %.2f s, the first commit after %.2f s",
			i+1, time.Duration(k.elected-k.at).Seconds(), majority.Seconds(), push.Seconds(), commit.Seconds())
		if push == 0 || commit == 0 || max(push, commit) > majority+goOn {
			slow = append(slow, fmt.Sprintf("failover %d", i+1))
		}
	}
	return slow, nil
}
