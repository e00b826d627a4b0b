package mongotest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
)

// A Node is one mongod of a [Server].
type Node struct {
	server *Server
	port   int
	data   string // folder
	log    string // file

	mu   sync.Mutex // guards what follows
	proc *process   // nil before the first start
}

// Addr is the node's host and port; it stays the same over restarts.
func (n *Node) Addr() string { return address(n.port) }

// Kill ends the node by SIGKILL, as a crash would, and returns when it is gone.
// A node that is not running stays so.
func (n *Node) Kill() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.proc != nil {
		n.proc.kill()
	}
}

// Pause makes the node stand still (SIGSTOP): its connections stay open, and nothing
// answers. It returns an error if the node is not running.
func (n *Node) Pause() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.proc == nil || !n.proc.alive() {
		return fmt.Errorf("pausing %s: %w", n.Addr(), os.ErrProcessDone)
	}
	if err := suspend(n.proc.cmd.Process); err != nil {
		return fmt.Errorf("pausing %s: %w", n.Addr(), err)
	}
	n.proc.awaitStopped()
	return nil
}

// Resume undoes [Node.Pause]. It returns an error if the node is not running.
func (n *Node) Resume() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.proc == nil || !n.proc.alive() {
		return fmt.Errorf("resuming %s: %w", n.Addr(), os.ErrProcessDone)
	}
	if err := proceed(n.proc.cmd.Process); err != nil {
		return fmt.Errorf("resuming %s: %w", n.Addr(), err)
	}
	return nil
}

// Restart starts the node again with the data and the port it had; if it runs, it is
// killed first. It returns when the node answers: as a primary if it is alone, as any
// working member of a larger set.
func (n *Node) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, recoverTimeout, fmt.Errorf("no node after %v", recoverTimeout))
	defer cancel()
	n.Kill()
	// An outgoing connection of another program may have the port for a moment.
	err := n.start(ctx)
	for errors.Is(err, errPortTaken) && ctx.Err() == nil {
		err = n.start(ctx)
	}
	if err == nil {
		err = n.await(ctx, func(h hello) bool { return h.Primary || h.Secondary && len(n.server.nodes) > 1 })
	}
	if err != nil {
		return fmt.Errorf("mongotest: restarting %s: %w", n.Addr(), err)
	}
	return nil
}

// Log is the end of what the node logged since it was last started, at most 1 MiB.
func (n *Node) Log() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.proc == nil {
		return ""
	}
	return n.proc.log()
}

// start launches mongod and returns when it listens.
func (n *Node) start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := os.MkdirAll(n.data, 0o700); err != nil {
		return fmt.Errorf("folder for the data: %w", err)
	}
	p, err := launch(n.server.dog, n.server.binary, n.args(), n.log, n.server.opts.Log)
	if err != nil {
		return err
	}
	n.proc = p
	if err := p.awaitListening(ctx); err != nil {
		p.kill()
		return err
	}
	return nil
}

func (n *Node) args() []string {
	o := n.server.opts
	args := []string{
		"--dbpath", n.data,
		"--bind_ip", loopback, "--port", strconv.Itoa(n.port), "--nounixsocket",
		"--wiredTigerCacheSizeGB", strconv.FormatFloat(float64(o.CacheMB)/1024, 'f', -1, 64),
		"--setParameter", "ttlMonitorSleepSecs=1", // the default, a minute, is long for a test
		"--setParameter", "diagnosticDataCollectionEnabled=false",
	}
	if n.server.set != "" {
		args = append(args, "--replSet", n.server.set, "--oplogSize", "256")
	}
	if o.TestCommands {
		args = append(args, "--setParameter", "enableTestCommands=1")
	}
	return append(args, o.Args...)
}
