// Command soak has several processes push and handle jobs of every sort while faults befall them, their network and
// their server, and then holds what they saw against what the library promises.
//
//	go run ./internal/soak -for 10m -seed 1
//	go run ./internal/soak -for 10m -seed 1 -nodes 3
//	go run ./internal/soak -for 10m -seed 1 -partitions
//	go run ./internal/soak -failover 5
//	go run ./internal/soak -load 1000000
//
// The faults follow from the seed. Every process keeps a ledger, outside the queue, of what it asked for and what it was
// told; docs/guarantees.md says what they are checked for. It exits with 1 if a promise was broken. It runs on Linux.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// A config is what the flags say.
type config struct {
	length    time.Duration
	seed      uint64
	nodes     int
	partition bool
	producers int
	workers   int
	rate      float64
	dir       string
	failovers int
	load      int
}

func main() {
	if data := os.Getenv(clientVariable); data != "" {
		if err := runClient(data); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		return
	}
	cfg, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(2)
	}
	if err := run(cfg); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// run does what the flags say. An interrupt ends it, with everything that it has started.
func run(cfg config) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch {
	case cfg.load > 0:
		return load(ctx, cfg, os.Stdout)
	case cfg.failovers > 0:
		return failover(ctx, cfg, os.Stdout)
	}
	return soak(ctx, cfg, os.Stdout)
}

// parse reads the flags.
func parse(args []string) (config, error) {
	var c config
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	f.DurationVar(&c.length, "for", time.Minute, "how long the faults go on")
	f.Uint64Var(&c.seed, "seed", 1, "what the faults follow from")
	f.IntVar(&c.nodes, "nodes", 1, "nodes of the replica set: 1 or 3")
	f.BoolVar(&c.partition, "partitions", false, "keep the history in partitions")
	f.IntVar(&c.producers, "producers", 2, "producer processes")
	f.IntVar(&c.workers, "workers", 3, "worker processes")
	f.Float64Var(&c.rate, "rate", 40, "calls that push, in a second and of one producer")
	f.StringVar(&c.dir, "dir", "", "folder for the ledgers, which is kept; else one that is kept only if a promise was broken")
	f.IntVar(&c.failovers, "failover", 0, "instead: kill the primary of three nodes so many times, and time what follows")
	f.IntVar(&c.load, "load", 0, "instead: put so many jobs through 64 handlers in 4 processes")
	if err := f.Parse(args); err != nil {
		return c, err
	}
	switch {
	case f.NArg() > 0:
		return c, fmt.Errorf("unknown argument %q", f.Arg(0))
	case c.nodes != 1 && c.nodes != 3:
		return c, fmt.Errorf("-nodes must be 1 or 3, got %d", c.nodes)
	case c.producers < 1 || c.workers < 1:
		return c, fmt.Errorf("-producers and -workers must be >= 1, got %d and %d", c.producers, c.workers)
	case c.length <= 0 || c.rate <= 0:
		return c, fmt.Errorf("-for and -rate must be > 0, got %v and %v", c.length, c.rate)
	case c.failovers < 0 || c.load < 0:
		return c, fmt.Errorf("-failover and -load must be >= 0, got %d and %d", c.failovers, c.load)
	}
	return c, nil
}
