package main

import (
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-de459a48/mongoq"
)

// The queues. Each kind of work has one of its own.
const (
	qWork   = "work"   // a pool; a commit deletes
	qKept   = "kept"   // a pool; a commit goes into the history
	qFlaky  = "flaky"  // a pool; jobs fail, some for ever
	qBatch  = "batch"  // ReserveMany, CommitMany
	qHop1   = "hop1"   // moved on to hop2
	qHop2   = "hop2"   // and to hop3
	qHop3   = "hop3"   // where it is committed into the history
	qSlow   = "slow"   // short leases, which are overslept or extended
	qTx     = "tx"     // committed in a transaction with a document of the user
	qFenced = "fenced" // DurableClaims
	qPop    = "pop"    // popped: at most once
	qBrief  = "brief"  // has deadlines, and dead-letters what is past its own
	qFleet  = "fleet"  // has deadlines, and discards
	qAgain  = "again"  // what is replayed from the history of kept
)

const (
	pipeName = "pipe"
	// The collections that stand for what a user writes in the same transaction: effects beside a commit, orders beside a
	// push.
	effectsName = "effects"
	ordersName  = "orders"
)

// A queueSpec is a queue as all processes open it.
type queueSpec struct {
	name    string
	keeps   bool // a commit goes into the history
	durable bool
	fed     bool // by other queues: nobody pushes to it
	mortal  bool // what is pushed to it has a deadline
	cfg     mongoq.QueueConfig
}

// queueSpecs are the queues that are pushed to or moved to. Leases are long enough for a commit to go in a batch where
// commits should, and short elsewhere, so that they run out.
func queueSpecs() []queueSpec {
	specs := []queueSpec{
		{name: qWork, cfg: mongoq.QueueConfig{Lease: 10 * time.Second}},
		{name: qKept, keeps: true, cfg: mongoq.QueueConfig{Lease: 4 * time.Second}},
		{name: qFlaky, keeps: true, cfg: mongoq.QueueConfig{Lease: 4 * time.Second, Retry: retries(4)}},
		{name: qBatch, cfg: mongoq.QueueConfig{Lease: 10 * time.Second}},
		{name: qHop1, cfg: mongoq.QueueConfig{Lease: 3 * time.Second}},
		{name: qHop2, fed: true, cfg: mongoq.QueueConfig{Lease: 3 * time.Second}},
		{name: qHop3, fed: true, keeps: true, cfg: mongoq.QueueConfig{Lease: 3 * time.Second}},
		{name: qSlow, cfg: mongoq.QueueConfig{Lease: time.Second}},
		{name: qTx, cfg: mongoq.QueueConfig{Lease: 8 * time.Second}},
		{name: qFenced, keeps: true, durable: true, cfg: mongoq.QueueConfig{Lease: 3 * time.Second, DurableClaims: true}},
		{name: qPop, cfg: mongoq.QueueConfig{Lease: 3 * time.Second}},
		{name: qBrief, mortal: true, cfg: mongoq.QueueConfig{Lease: 2 * time.Second, OnExpire: mongoq.ToDeadLetter}},
		{name: qFleet, mortal: true, cfg: mongoq.QueueConfig{Lease: 2 * time.Second, OnExpire: mongoq.Discard}},
		{name: qAgain, fed: true, keeps: true, cfg: mongoq.QueueConfig{Lease: 4 * time.Second}},
	}
	for i := range specs {
		s := &specs[i]
		if s.keeps {
			s.cfg.Retention = mongoq.KeepForever
		}
		if s.cfg.Retry == nil {
			s.cfg.Retry = retries(100)
		}
	}
	return specs
}

// retries is a quick policy: what is to fail should do so often.
func retries(n uint64) func() backoff.BackOff {
	return func() backoff.BackOff {
		b := backoff.NewExponentialBackOff(
			backoff.WithInitialInterval(50*time.Millisecond), backoff.WithMaxInterval(time.Second), backoff.WithMaxElapsedTime(0))
		return backoff.WithMaxRetries(b, n)
	}
}

// keeps tells whether what is committed in a queue goes into the history.
func keeps(q string) bool {
	if q == pipeName+"."+stageOut {
		return true
	}
	return specOf(q).keeps
}

// specOf is a queue's, if it is one of queueSpecs.
func specOf(q string) queueSpec {
	for _, s := range queueSpecs() {
		if s.name == q {
			return s
		}
	}
	return queueSpec{}
}

// durable tells whether a queue's claims wait for a majority.
func durable(q string) bool { return specOf(q).durable }

// A job is a payload.
type job struct {
	Key   string `bson:"k"`
	Fails int    `bson:"fails"` // how often it fails before it succeeds; always: without end
	Work  int    `bson:"work"`  // how long it takes, in ms
}

const always = -1
