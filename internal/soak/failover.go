package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"
)

const (
	// goOn is what workers may take to go on once there is a primary again.
	goOn = 2 * time.Second
	// electionLimit is what an election may take on a machine that does other things, too.
	electionLimit = time.Minute
)

// A killing is one death of a primary.
type killing struct {
	at, elected int64 // when it was killed, and when another was seen to be the primary, in ns since 1970
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
		return fmt.Errorf("workers did not go on in %v:\n%s", goOn, strings.Join(slow, "\n"))
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
	if _, err := c.primary(ctx, electionLimit); err != nil {
		return k, err
	}
	k.elected = time.Now().UnixNano()
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

// pace tells how soon after each election each worker had a commit acknowledged, and each producer a push.
func (c *conductor) pace(killings []killing) (slow []string, err error) {
	entries, err := readLedgers(c.dir)
	if err != nil {
		return nil, err
	}
	for i, k := range killings {
		first := map[string]time.Duration{}
		for _, e := range entries {
			acknowledged := e.What == noteAnswer && e.Verb == verbCommit || e.What == notePushed
			if _, met := first[e.Proc]; acknowledged && e.Result == resultOK && e.At > k.elected && !met {
				first[e.Proc] = time.Duration(e.At - k.elected)
			}
		}
		var line strings.Builder
		fmt.Fprintf(&line, "failover %d: elected after %.2f s", i+1, time.Duration(k.elected-k.at).Seconds())
		for _, s := range c.slots {
			proc := s.name()
			d, ok := first[proc]
			if !ok {
				d = time.Hour
			}
			fmt.Fprintf(&line, ", %s %.2f s", proc, d.Seconds())
			if d > goOn {
				slow = append(slow, fmt.Sprintf("failover %d: %s took %v", i+1, proc, d))
			}
		}
		c.say("%s", line.String())
	}
	return slow, nil
}
