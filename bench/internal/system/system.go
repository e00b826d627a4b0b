// Package system lists the queues that the bench compares.
package system

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/seed-de459a48/mongoq/bench/internal/node"
	"github.com/seed-de459a48/mongoq/bench/internal/proc"
	"github.com/seed-de459a48/mongoq/bench/internal/server"
)

// System is a queue with the server that it runs on.
type System struct {
	Name string

	// Durability is what of an answered call is left after a crash.
	Durability string

	// Client is the name that its processes know it by.
	Client string

	// Prepare is the task that makes the schema; "" if opening the system does.
	Prepare string

	// Start starts a new server.
	Start func(ctx context.Context, progress func(string)) (server.Server, error)

	// Missing says what to install before it can run; "" if it can.
	Missing func() string

	script string // of an npm peer
}

// Ours is the name of the library.
const Ours = "mongoq"

const journaled = "majority, journaled"

// All are the systems, ours first.
var All = []System{
	{
		Name: Ours, Client: Ours, Start: server.StartMongo, Missing: nothing,
		Durability: journaled + "; claims w:1: one lost in a failover is a second delivery, never a wrong commit",
	},
	{
		Name: "plain", Client: "plain", Start: server.StartMongo, Missing: nothing,
		Durability: journaled + ", claims too",
	},
	{
		Name: "keuss-mongo", Client: "keuss-mongo", Start: server.StartMongo, Missing: node.Missing, script: "keuss.js",
		Durability: journaled + ", claims too; a commit is guarded by the id only",
	},
	{
		Name: "keuss-bucket", Client: "keuss-bucket", Start: server.StartMongo, Missing: node.Missing, script: "keuss.js",
		Durability: "pushes and commits are answered from memory and written each 500 ms or 1,024 jobs, then " + journaled + ": what was answered before is lost in a crash",
	},
	{
		Name: "keuss-pl", Client: "keuss-pl", Start: server.StartMongo, Missing: node.Missing, script: "keuss.js",
		Durability: journaled + ", claims too; a move is guarded by the id only",
	},
	{
		Name: "mongodb-queue", Client: "mongodb-queue", Start: server.StartMongo, Missing: node.Missing, script: "mongodb-queue.js",
		Durability: journaled + ", claims too; finished jobs stay in the collection",
	},
	{
		Name: "river", Client: "river", Prepare: "prepare", Start: withoutProgress(server.StartPostgres), Missing: missingPostgres,
		Durability: "fsync and synchronous_commit on, claims too; completions are stored in batches behind the workers",
	},
	{
		Name: "asynq-aof", Client: "asynq", Start: startRedis(true), Missing: missingRedis,
		Durability: "append-only file synced each second: a crash of the machine loses up to a second",
	},
	{
		Name: "asynq-noaof", Client: "asynq", Start: startRedis(false), Missing: missingRedis,
		Durability: "none: what is not done is lost with the server's process",
	},
}

func nothing() string { return "" }

func missingPostgres() string {
	if server.FindPostgres() == "" {
		return "apt-get install postgresql"
	}
	return ""
}

func missingRedis() string {
	if server.FindRedis() == "" {
		return "apt-get install redis-server"
	}
	return ""
}

type starter = func(context.Context, func(string)) (server.Server, error)

func withoutProgress(start func(context.Context) (server.Server, error)) starter {
	return func(ctx context.Context, _ func(string)) (server.Server, error) { return start(ctx) }
}

func startRedis(appendOnly bool) starter {
	return withoutProgress(func(ctx context.Context) (server.Server, error) { return server.StartRedis(ctx, appendOnly) })
}

// Command is how the system's processes are started: the bench itself by another name, or node.
func (s System) Command(ctx context.Context, progress func(string)) (proc.Command, error) {
	if s.script != "" {
		command, err := node.Command(ctx, s.script, progress)
		if err != nil {
			err = fmt.Errorf("%w: %w", ErrMissing, err)
		}
		return command, err
	}
	self, err := os.Executable()
	return proc.Command{Path: self, Args: []string{ChildCommand}}, err
}

// ErrMissing is why a system is not measured whose packages cannot be had.
var ErrMissing = errors.New("its packages could not be installed")

// Runtime names the program that its processes run in, if it is not the bench.
func (s System) Runtime() string {
	if s.script == "" {
		return ""
	}
	return node.Version()
}

// ChildCommand is the hidden subcommand of the bench's own processes.
const ChildCommand = "child"

// Choose gives the systems that a list of peers names: "all", "none", or names set apart by commas. Ours is always
// among them.
func Choose(peers string) ([]System, error) {
	var names []string
	switch peers {
	case "all":
		return All, nil
	case "none", "":
	default:
		for name := range strings.SplitSeq(peers, ",") {
			names = append(names, strings.TrimSpace(name))
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(All, func(s System) bool { return s.Name == name }) {
			return nil, fmt.Errorf("there is no peer %q; there are %s, all and none", name, strings.Join(peerNames(), ", "))
		}
	}
	var chosen []System
	for _, s := range All {
		if s.Name == Ours || slices.Contains(names, s.Name) {
			chosen = append(chosen, s)
		}
	}
	return chosen, nil
}

func peerNames() []string {
	var names []string
	for _, s := range All {
		if s.Name != Ours {
			names = append(names, s.Name)
		}
	}
	return names
}
