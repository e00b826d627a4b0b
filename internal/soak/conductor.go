package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

const dbName = "soak"

// A conductor runs the server, the network and the clients, and knows their faults.
type conductor struct {
	cfg    config
	out    io.Writer
	dir    string
	server *mongotest.Server
	net    *network
	db     *mongo.Database // past the proxies
	nodes  []*mongo.Client // each node by itself, past the proxies
	ledger *ledger
	slots  []*slot
	began  time.Time

	mu       sync.Mutex
	troubles []string
}

// A slot is a place for a client process: one that is killed is replaced.
type slot struct {
	n    int
	role string

	mu      sync.Mutex
	lives   int
	proc    string // the name of the one that runs
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	ended   chan struct{}
	meant   bool // its end is meant
	stopped bool // nothing takes its place any more
}

// conduct starts everything but the clients.
func conduct(ctx context.Context, cfg config, out io.Writer) (_ *conductor, err error) {
	c := &conductor{cfg: cfg, out: out, dir: cfg.dir}
	if c.dir == "" {
		c.dir, err = os.MkdirTemp("", "mongoq-soak-")
	} else {
		err = os.MkdirAll(c.dir, 0o700)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	c.server, err = mongotest.Start(ctx, mongotest.Options{
		ReplicaSet: cfg.nodes, TestCommands: true, Progress: func(s string) { c.say("%s", s) },
		// What a client that was killed has written in an open transaction is locked until the server ends that: after a
		// minute by default.
		Args: []string{"--setParameter", "transactionLifetimeLimitSeconds=10"},
	})
	if err != nil {
		return nil, err
	}
	var addrs []string
	for _, n := range c.server.Nodes() {
		addrs = append(addrs, n.Addr())
		client, err := mongo.Connect(options.Client().ApplyURI("mongodb://" + n.Addr() + "/?directConnection=true").
			SetServerSelectionTimeout(2 * time.Second).SetTimeout(5 * time.Second).SetHeartbeatInterval(500 * time.Millisecond))
		if err != nil {
			return nil, err
		}
		c.nodes = append(c.nodes, client)
	}
	if c.net, err = newNetwork(addrs); err != nil {
		return nil, err
	}
	client, err := mongo.Connect(options.Client().ApplyURI(c.server.URI()))
	if err != nil {
		return nil, err
	}
	c.db = client.Database(dbName)
	if c.ledger, err = openLedger(c.dir, "conductor"); err != nil {
		return nil, err
	}
	c.began = time.Now()
	return c, nil
}

// close ends everything.
func (c *conductor) close() {
	for _, s := range c.slots {
		s.end()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if c.db != nil {
		_ = c.db.Client().Disconnect(ctx)
	}
	for _, n := range c.nodes {
		_ = n.Disconnect(ctx)
	}
	if c.net != nil {
		c.net.stop()
	}
	if c.server != nil {
		c.server.Stop()
	}
	if c.ledger != nil {
		_ = c.ledger.close()
	}
}

func (c *conductor) say(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fmt.Fprintf(c.out, format+"\n", args...)
}

// staff starts the clients.
func (c *conductor) staff(spec clientSpec) error {
	for i := range c.cfg.producers + c.cfg.workers {
		s := &slot{n: i, role: roleWorker}
		if i < c.cfg.producers {
			s.role = roleProducer
		}
		c.slots = append(c.slots, s)
		if err := c.spawn(s, spec); err != nil {
			return err
		}
	}
	return nil
}

// spawn starts a client in a slot, and one after it for as long as they are killed.
func (c *conductor) spawn(s *slot, spec clientSpec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	s.lives++
	s.proc = fmt.Sprintf("%s%d.%d", s.role, s.n, s.lives)
	spec.Role, spec.Proc = s.role, s.proc
	spec.Seed, spec.URI, spec.DB, spec.Dir, spec.Rate = c.cfg.seed, c.server.URI(), dbName, c.dir, c.cfg.rate
	spec.Hosts, spec.Partitions = c.net.hosts, c.cfg.partition
	cmd, stdin, err := start(spec)
	if err != nil {
		return err
	}
	s.cmd, s.stdin, s.meant = cmd, stdin, false
	ended := make(chan struct{})
	s.ended = ended
	go func() {
		err := cmd.Wait()
		s.mu.Lock()
		meant := s.meant
		s.mu.Unlock()
		if !meant || err != nil && cmd.ProcessState.ExitCode() > 0 {
			c.trouble("%s ended by itself: %v; see its log in %s", spec.Proc, err, c.dir)
		}
		close(ended)
	}()
	return nil
}

// start starts this program as a client.
func start(spec clientSpec) (*exec.Cmd, io.WriteCloser, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, nil, err
	}
	errs, err := os.Create(filepath.Join(spec.Dir, spec.Proc+".stderr"))
	if err != nil {
		return nil, nil, err
	}
	defer errs.Close()
	cmd := exec.CommandContext(context.Background(), self) // it ends when it is told to, or killed
	cmd.Env = append(os.Environ(), clientVariable+"="+string(data))
	cmd.Stdout, cmd.Stderr = errs, errs
	// It goes when this process goes, though it may stand still and not see its standard input end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	return cmd, stdin, cmd.Start()
}

func (c *conductor) trouble(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.mu.Lock()
	c.troubles = append(c.troubles, text)
	c.mu.Unlock()
	c.ledger.write(entry{What: noteTrouble, Text: text})
}

// name is that of the client that runs.
func (s *slot) name() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

// tell gives a client a line on its standard input.
func (s *slot) tell(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stdin != nil {
		_, _ = io.WriteString(s.stdin, line+"\n")
	}
}

// kill ends the client by SIGKILL.
func (s *slot) kill() {
	s.mu.Lock()
	s.meant = true
	ended := s.ended
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
	}
	s.mu.Unlock()
	if ended != nil {
		<-ended
	}
}

func (s *slot) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.cmd.Process.Signal(sig)
}

// stop asks the client to end, and nothing to take its place.
func (s *slot) stop() {
	s.mu.Lock()
	s.stopped, s.meant = true, true
	s.mu.Unlock()
	s.tell("stop")
}

// end kills the client, and nothing takes its place.
func (s *slot) end() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.kill()
}

// stopAll asks the clients of a role to end, and waits for it.
func (c *conductor) stopAll(role string, limit time.Duration) {
	for _, s := range c.slots {
		if s.role == role {
			s.stop()
		}
	}
	late := time.After(limit)
	for _, s := range c.slots {
		if s.role != role {
			continue
		}
		select {
		case <-s.ended:
		case <-late:
			c.trouble("%s did not end in %v", s.name(), limit)
			s.signal(syscall.SIGQUIT) // for its stacks
			_ = pause(context.Background(), 500*time.Millisecond)
			c.ledger.write(entry{What: noteFault, Verb: faultKill, To: s.name()})
			s.kill()
		}
	}
}

// soak is the main run.
func soak(ctx context.Context, cfg config, out io.Writer) error {
	faults := schedule(cfg.seed, cfg.length, cfg.nodes, cfg.producers+cfg.workers)
	fmt.Fprintf(out, "soak: %v, seed %d, %d node(s), %d producers, %d workers, %d faults:\n",
		cfg.length, cfg.seed, cfg.nodes, cfg.producers, cfg.workers, len(faults))
	printSchedule(out, faults)
	c, err := conduct(ctx, cfg, out)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.staff(clientSpec{}); err != nil {
		return err
	}
	c.torment(ctx, faults)
	c.calm(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return c.conclude(ctx)
}

// settleTime is how long the jobs may take to be done once nothing is wrong any more.
const settleTime = 3 * time.Minute

// conclude has what is left done, and checks.
func (c *conductor) conclude(ctx context.Context) error {
	c.say("%6.1fs  the faults are over", time.Since(c.began).Seconds())
	c.stopAll(roleProducer, 60*time.Second)
	for _, s := range c.slots {
		if s.role == roleWorker {
			s.tell("settle")
		}
	}
	if err := c.settled(ctx); err != nil {
		return err
	}
	c.stopAll(roleWorker, 60*time.Second)
	c.say("%6.1fs  all clients have ended", time.Since(c.began).Seconds())
	return c.judge(ctx)
}

// settled waits until no envelope is live.
func (c *conductor) settled(ctx context.Context) error {
	live := bson.D{{Key: "processed", Value: nil}, {Key: "dead", Value: nil}, {Key: "divider", Value: nil}}
	began := time.Now()
	zeros := 0
	for said := began; ; {
		n, err := c.db.Collection("mongoq").CountDocuments(ctx, live)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		zeros++
		if err != nil || n > 0 {
			zeros = 0
		}
		switch {
		case zeros == 3: // a redrive that was on its way has arrived
			c.say("%6.1fs  all jobs have settled, after %.1f s", time.Since(c.began).Seconds(), time.Since(began).Seconds())
			return nil
		case time.Since(began) > settleTime:
			c.trouble("%d envelopes have not settled in %v (%v)", n, settleTime, err)
			return nil
		case time.Since(said) > 10*time.Second:
			said = time.Now()
			c.say("%6.1fs  %d jobs are left", time.Since(c.began).Seconds(), n)
		}
		if err := pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
}

// judge reads what there is, checks it, and tells.
func (c *conductor) judge(ctx context.Context) error {
	e, stored, err := c.gather(ctx)
	if err != nil {
		return err
	}
	fig, bad := check(e)
	bad = append(bad, stored...)
	fig.Losses = len(bad)
	report(c.out, fig)
	c.mu.Lock()
	troubles := c.troubles
	c.mu.Unlock()
	if fig.Jobs == 0 || fig.Done+fig.Kept == 0 || fig.Deliveries == 0 {
		troubles = append(troubles, "nothing was done that could have been lost")
	}
	for _, x := range e.entries {
		if x.What == noteTrouble && x.Proc != "conductor" {
			troubles = append(troubles, x.String())
		}
	}
	for _, t := range troubles {
		fmt.Fprintln(c.out, "TROUBLE:", t)
	}
	tell(c.out, e, bad)
	if len(bad)+len(troubles) > 0 {
		fmt.Fprintln(c.out, "the ledgers are in", c.dir)
		return fmt.Errorf("%d promises broken, %d times trouble", len(bad), len(troubles))
	}
	if c.cfg.dir == "" {
		return os.RemoveAll(c.dir)
	}
	return nil
}

// toldViolations is how many violations are told with their stories.
const toldViolations = 20

func tell(out io.Writer, e evidence, bad []violation) {
	for i, v := range bad {
		fmt.Fprintf(out, "\nBROKEN: %s: %s %s: %s\n", v.Rule, v.ID, v.Key, v.Text)
		if i >= toldViolations || v.ID == "" && v.Key == "" {
			continue
		}
		fmt.Fprintln(out, "  "+strings.Join(e.story(v), "\n  "))
	}
}

// errNoPrimary says that no node takes writes.
var errNoPrimary = errors.New("no node is the primary")
