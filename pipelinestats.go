package mongoq

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// rateWindow is over how many seconds a stage's rate is taken.
const rateWindow = 10

// StageStats are the figures of one stage. In, Out, Retries and Rate count what this process has done since the pipeline
// was built; the rest is read from the store, and is of all processes.
type StageStats struct {
	Stage string

	In      int64   // envelopes handled for the first time in this stage
	Out     int64   // envelopes that left it: moved, forked, done or dropped
	Retries int64   // deliveries that failed, and are tried again
	Dropped int64   // of Out: dropped with a reason
	Rate    float64 // Out a second, over the last 10 s

	Waiting int64         // envelopes that wait, for now or for later, or for their parts
	Working int64         // envelopes under a lease
	Dead    int64         // dead letters that came from this stage
	Oldest  time.Duration // for how long the oldest ready one has been due
	Paused  bool
	Capped  bool // a count of the store's stopped at 10,000: there are more

	To map[string]int64 // envelopes that went on from here, by the stage that they went to
}

// PipelineStats are the figures of all stages, in the order of the flow.
type PipelineStats struct {
	Pipeline string
	Stages   []StageStats
}

// Live is how many envelopes are in the pipeline: waiting or worked on. Capped as the stages' counts are.
func (s PipelineStats) Live() (n int64) {
	for _, st := range s.Stages {
		n += st.Waiting + st.Working
	}
	return n
}

// Stats gives the figures of every stage. It costs what Queue.Stats costs, for each stage; Exact counts to the end.
// While an envelope moves it may be counted in two stages or in none.
func (p *Pipeline) Stats(ctx context.Context, opts ...StatsOption) (PipelineStats, error) {
	all := PipelineStats{Pipeline: p.name}
	for _, st := range p.stages {
		q, err := st.queue.Stats(ctx, opts...)
		if err != nil {
			return PipelineStats{}, err
		}
		one, to := st.counts.read()
		one.Stage = st.Name
		for name, link := range st.links {
			if n := to[link.to]; n > 0 {
				one.To[name] = n
			}
		}
		one.Waiting, one.Working, one.Dead = q.Ready+q.Scheduled, q.Reserved, q.Dead
		one.Oldest, one.Paused, one.Capped = q.OldestReady, q.Paused, q.Capped
		all.Stages = append(all.Stages, one)
	}
	return all, nil
}

// Empty tells whether nothing is left to do: no envelope is in any stage, waiting or worked on; dead letters and the
// history do not count. On a replica set it is as of one moment, also while envelopes move back and forth; on a
// standalone server one that goes back while it looks may be overlooked.
func (p *Pipeline) Empty(ctx context.Context) (bool, error) {
	if err := p.s.open(); err != nil {
		return false, err
	}
	queues := make(bson.A, len(p.stages))
	for i, st := range p.stages {
		queues[i] = st.queue.name
	}
	c := p.s.envs
	if p.s.transactions {
		c = p.s.snapshot
	}
	err := c.FindOne(outside(ctx), bson.D{field("q", op("$in", queues)), field("processed", nil), undivided},
		options.FindOne().SetHint(p.s.ready).SetProjection(bson.D{field("_id", 1)})).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return true, nil
	}
	return false, err
}

// counts are what a stage's worker has told.
type counts struct {
	in, out, retries, dropped atomic.Int64

	mu      sync.Mutex
	seconds [rateWindow + 1]int64 // out, by second
	last    int64                 // the second that was counted last
	to      map[string]int64
}

// note counts an event of the stage's worker, and passes it on.
func (st *stage) note(e Event) {
	c := &st.counts
	switch e.Kind {
	case EventMoved, EventForked, EventCommitted, EventDropped:
		if e.Retries == 0 {
			c.in.Add(1)
		}
		c.out.Add(1)
		if e.Kind == EventDropped {
			c.dropped.Add(1)
		}
		c.left(time.Now().Unix(), e.To)
	case EventFailed, EventDeadLettered:
		if e.Retries == 0 {
			c.in.Add(1)
		}
		if e.Kind == EventFailed {
			c.retries.Add(1)
		}
	}
	if st.Worker.OnEvent != nil {
		st.Worker.OnEvent(e)
	}
}

func (c *counts) left(second int64, to []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(second)
	c.seconds[second%int64(len(c.seconds))]++
	for _, q := range to {
		if c.to == nil {
			c.to = map[string]int64{}
		}
		c.to[q]++
	}
}

// forget clears the seconds that have passed since the last count; the lock is held.
func (c *counts) forget(second int64) {
	for s := max(c.last+1, second-int64(len(c.seconds))+1); s <= second; s++ {
		c.seconds[s%int64(len(c.seconds))] = 0
	}
	c.last = max(c.last, second)
}

func (c *counts) read() (st StageStats, to map[string]int64) {
	st = StageStats{
		In: c.in.Load(), Out: c.out.Load(), Retries: c.retries.Load(), Dropped: c.dropped.Load(), To: map[string]int64{},
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	second := time.Now().Unix()
	c.forget(second)
	var n int64
	for s, out := range c.seconds {
		if int64(s) != second%int64(len(c.seconds)) { // the one under way is not whole
			n += out
		}
	}
	st.Rate = float64(n) / rateWindow
	return st, maps.Clone(c.to)
}
