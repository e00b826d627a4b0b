package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
)

// The roles of clients.
const (
	roleProducer = "producer"
	roleWorker   = "worker"
	roleLoad     = "load"
)

// appName is what the clients call themselves, so that the fail points befall them and nobody else.
const appName = "soak"

// A clientSpec is what a client process is told.
type clientSpec struct {
	Role     string            `json:"role"`
	Proc     string            `json:"proc"` // its name: the slot, and how many had it before
	Seed     uint64            `json:"seed"`
	URI      string            `json:"uri"`
	DB       string            `json:"db"`
	Hosts    map[string]string `json:"hosts"`    // see detour; nil: no proxies
	Dir      string            `json:"dir"`      // of the ledgers
	Rate     float64           `json:"rate"`     // pushes in a second
	Calm     bool              `json:"calm"`     // nothing but plain work, as fast as it goes
	Handlers int               `json:"handlers"` // of a worker under load
	// Partitions keeps the history in partitions.
	Partitions bool `json:"partitions"`
}

// clientVariable holds the spec in a client's environment.
const clientVariable = "MONGOQ_SOAK_CLIENT"

// A client is what a client process has.
type client struct {
	spec   clientSpec
	ledger *ledger
	rng    *lockedRand
	skew   atomic.Int64 // of its clock
	tries  atomic.Int64
	settle chan struct{} // closed when nothing new is to begin

	db     *mongo.Database
	store  *mongoq.Store
	queues map[string]*mongoq.Queue
}

// runClient is the main function of a client process. It ends when it is told to, and at once when its parent is gone.
func runClient(data string) error {
	var spec clientSpec
	if err := json.Unmarshal([]byte(data), &spec); err != nil {
		return err
	}
	c := &client{spec: spec, queues: map[string]*mongoq.Queue{}, settle: make(chan struct{})}
	c.rng = newRand(spec.Seed, spec.Proc)
	if err := c.logTo(filepath.Join(spec.Dir, spec.Proc+".log")); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go c.obey(os.Stdin, stop)
	if spec.Role == roleLoad {
		return c.load(ctx)
	}
	var err error
	if c.ledger, err = openLedger(spec.Dir, spec.Proc); err != nil {
		return err
	}
	c.ledger.write(entry{What: noteStart})
	if c.open(ctx) {
		switch spec.Role {
		case roleProducer:
			c.produce(ctx)
		case roleWorker:
			c.consume(ctx)
		}
		c.shut()
	}
	c.ledger.write(entry{What: noteEnd})
	return c.ledger.close()
}

// logTo sends what the library logs to a file of the client's own.
func (c *client) logTo(name string) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(f, nil)))
	return nil
}

// obey does what the conductor says, until it is gone.
func (c *client) obey(r io.Reader, stop func()) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		switch word, arg, _ := strings.Cut(lines.Text(), " "); word {
		case "stop":
			stop()
		case "settle":
			close(c.settle)
		case "clock":
			if n, err := strconv.ParseInt(arg, 10, 64); err == nil {
				c.skew.Store(n)
			}
		}
	}
	os.Exit(3)
}

// open connects and opens the store, and tries again for as long as the faults prevent it; false: it is told to stop.
func (c *client) open(ctx context.Context) bool {
	opts := options.Client().ApplyURI(c.spec.URI).SetAppName(appName)
	if !c.spec.Calm {
		// A fail point that says "not primary" has the driver take the server for gone until its next heartbeat.
		opts.SetHeartbeatInterval(2 * time.Second)
	}
	if c.spec.Hosts != nil {
		opts.SetDialer(&detour{hosts: c.spec.Hosts})
	}
	conn, err := mongo.Connect(opts)
	if err != nil {
		c.trouble("connecting", err)
		return false
	}
	c.db = conn.Database(c.spec.DB)
	for {
		c.store, err = mongoq.Open(ctx, c.db, mongoq.Config{
			Clock:            func() time.Time { return time.Now().Add(time.Duration(c.skew.Load())) },
			PartitionHistory: partitioning(c.spec.Partitions),
		})
		if err == nil {
			break
		}
		slog.Warn("the store could not be opened", "error", err)
		if pause(ctx, 200*time.Millisecond) != nil {
			return false
		}
	}
	for _, s := range queueSpecs() {
		if c.queues[s.name], err = c.store.Queue(s.name, s.cfg); err != nil {
			c.trouble("queue "+s.name, err)
			return false
		}
	}
	return true
}

// partitioning is how the history is kept.
func partitioning(partitions bool) mongoq.Partitioning {
	if partitions {
		return mongoq.PartitionByHour
	}
	return mongoq.PartitionNone
}

func (c *client) shut() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := c.store.Close(ctx); err != nil {
		c.trouble("closing the store", err)
	}
	_ = c.db.Client().Disconnect(ctx)
}

// trouble notes what should not happen whatever the faults.
func (c *client) trouble(what string, err error) {
	c.ledger.write(entry{What: noteTrouble, Text: what, Err: err.Error()})
}

// resultOf sorts the error of a push or a verb.
func resultOf(err error) (result, text string) {
	switch {
	case err == nil:
		return resultOK, ""
	case errors.Is(err, mongoq.ErrOutcomeUnknown):
		return resultUnknown, err.Error()
	case errors.Is(err, mongoq.ErrLeaseLost):
		return resultLost, ""
	}
	return resultRefused, err.Error()
}

// pause waits, for no longer than ctx lasts.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// lockedRand is chance for many goroutines.
type lockedRand struct {
	mu  sync.Mutex
	rng *rand.Rand
}

func newRand(seed uint64, name string) *lockedRand {
	h := uint64(14695981039346656037) // FNV-1a
	for _, b := range []byte(name) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return &lockedRand{rng: rand.New(rand.NewPCG(seed, h))}
}

func (r *lockedRand) float() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rng.Float64()
}

func (r *lockedRand) intn(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rng.IntN(n)
}

// chance is true with a probability.
func (r *lockedRand) chance(p float64) bool { return r.float() < p }

func (r *lockedRand) span(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(r.float()*float64(hi-lo))
}

func (r *lockedRand) error() error { return fmt.Errorf("failed by chance, %d", r.intn(1000)) }
