package mongotest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// bootTimeout bounds a start whose context has no earlier end. Fetching mongod
// does not count.
const bootTimeout = 60 * time.Second

// recoverTimeout bounds a restart: a node that was killed first does again what its journal and its oplog tell, which
// takes minutes on a machine that has much else to do.
const recoverTimeout = 5 * time.Minute

// progressStart is what Options.Progress is told before each start.
const progressStart = "starting mongod"

// Options says what [Start] starts. The zero value is a standalone server.
type Options struct {
	// ReplicaSet is the number of nodes of a replica set; 0 is a standalone
	// server, without transactions and change streams. At most 7.
	ReplicaSet int

	// CacheMB is the size of each node's WiredTiger cache in MiB. Defaults to 256,
	// which is also the least that MongoDB takes.
	CacheMB int

	// TestCommands enables fail points (see [Fail]) and other test commands.
	TestCommands bool

	// Args are more arguments for each mongod; they come last.
	Args []string

	// Client adds to the options of the clients by which this package looks at the nodes: where
	// Args have them demand TLS.
	Client *options.ClientOptions

	// Log receives what the nodes log, as they write it, a little later. A node's log is
	// also kept in its folder, and its end is part of the errors here.
	Log io.Writer

	// Progress, if set, is told what takes long, such as "fetching MongoDB ...".
	Progress func(string)
}

func (o *Options) check() error {
	switch {
	case o.ReplicaSet < 0 || o.ReplicaSet > 7:
		return fmt.Errorf("mongotest: ReplicaSet must be 0 to 7 nodes, got %d", o.ReplicaSet)
	case o.CacheMB == 0:
		o.CacheMB = 256
	case o.CacheMB < 256:
		return fmt.Errorf("mongotest: CacheMB must be at least 256, got %d", o.CacheMB)
	}
	return nil
}

// A Server is a standalone mongod or a replica set, on free ports of the
// loopback address, with its data in a temporary folder. It ends by
// [Server.Stop], or else with this process.
type Server struct {
	opts   Options
	binary string
	set    string // name of the replica set; empty for a standalone server
	dir    string
	dog    *watchdog
	nodes  []*Node

	stop sync.Once
}

// Start starts a server and returns when it takes writes and, in a replica set,
// all its nodes are in sync. ctx bounds the start only. The environment variable
// MONGODB_URI does not matter here: the server is always a new one.
func Start(ctx context.Context, opts Options) (*Server, error) {
	return launcher{finder: newFinder(opts.Progress), port: freePort}.start(ctx, opts)
}

// A launcher is what Start depends on, for tests to replace.
type launcher struct {
	finder finder
	port   func() (int, error)
}

func (l launcher) start(ctx context.Context, opts Options) (*Server, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	if err := supported(); err != nil {
		return nil, err
	}
	binary, err := l.finder.find(ctx)
	if err != nil {
		return nil, err
	}
	if opts.Progress != nil {
		opts.Progress(progressStart)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, bootTimeout, fmt.Errorf("no server after %v", bootTimeout))
	defer cancel()
	// Between choosing a port and binding it someone else may take it, and the
	// nodes of a set must know each other's ports: so all of them are tried anew.
	for try := 1; ; try++ {
		s, err := l.boot(ctx, binary, opts)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, errPortTaken) || try == 5 {
			return nil, fmt.Errorf("mongotest: %w", err)
		}
	}
}

// boot starts all nodes, or none.
func (l launcher) boot(ctx context.Context, binary string, opts Options) (_ *Server, err error) {
	// The watchdog comes before the folder that it is to remove.
	id := fmt.Sprintf("%08x", rand.Uint32())
	s := &Server{opts: opts, binary: binary, dir: filepath.Join(os.TempDir(), "mongotest-"+id)}
	if s.dog, err = watch(s.dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Stop()
		}
	}()
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("folder for the data: %w", err)
	}
	if opts.ReplicaSet > 0 {
		s.set = "rs" + id
	}
	if opts.Log != nil {
		s.opts.Log = &lockedWriter{w: opts.Log}
	}
	for i := range max(1, opts.ReplicaSet) {
		port, err := l.port()
		if err != nil {
			return nil, err
		}
		s.nodes = append(s.nodes, &Node{
			server: s, port: port,
			data: filepath.Join(s.dir, fmt.Sprintf("node%d", i)),
			log:  filepath.Join(s.dir, fmt.Sprintf("node%d.log", i)),
		})
	}
	if err := eachNode(s.nodes, func(n *Node) error { return n.start(ctx) }); err != nil {
		return nil, err
	}
	if s.set != "" {
		if err := s.initiate(ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// URI is the connection string of the server, which names all nodes of a replica set.
func (s *Server) URI() string {
	addrs := make([]string, len(s.nodes))
	for i, n := range s.nodes {
		addrs[i] = n.Addr()
	}
	uri := "mongodb://" + strings.Join(addrs, ",") + "/"
	if s.set != "" {
		uri += "?replicaSet=" + s.set
	}
	return uri
}

// Node is the i-th node, from 0. Which node is the primary changes.
func (s *Server) Node(i int) *Node { return s.nodes[i] }

// Nodes are all nodes.
func (s *Server) Nodes() []*Node { return append([]*Node(nil), s.nodes...) }

// Stop kills the server and removes its data. Stopping twice is fine.
func (s *Server) Stop() {
	s.stop.Do(func() {
		for _, n := range s.nodes {
			n.Kill()
		}
		s.dog.close() // it removes the folder
	})
}

// eachNode runs f for all nodes at once and joins the errors.
func eachNode(nodes []*Node, f func(*Node) error) error {
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { errs[i] = f(n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// lockedWriter lets several nodes write to one log.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// died says how a node ended that nobody stopped, or nil.
func (s *Server) died() error {
	for _, n := range s.nodes {
		n.mu.Lock()
		p := n.proc
		n.mu.Unlock()
		if p != nil && !p.alive() {
			return p.startError()
		}
	}
	return nil
}
