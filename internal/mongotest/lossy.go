package mongotest

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
)

// Lossy is a network that loses what a test tells it to. Give it to a client by
//
//	lossy := mongotest.NewLossy()
//	opts := options.Client().SetDialer(lossy)
//
// The faults planned for a command name befall the next commands of that name, in the
// order in which they were planned, one each, on any connection of the clients that use
// it. Names are those of the wire protocol: "insert", "update", "delete",
// "findAndModify", "find", "getMore", "aggregate", "commitTransaction" and so on. A retry
// by the driver is a command too. Heartbeats and handshakes are never touched; compressed
// and unacknowledged commands pass, and TLS does not work.
//
// It is safe for concurrent use. Its connections end with their client.
type Lossy struct {
	dialer net.Dialer
	links  sync.WaitGroup // counts the goroutines

	mu    sync.Mutex
	plans map[string][]*fate
	spare []string // endings of collections' names
}

type fateKind int

const (
	loseRequest fateKind = iota
	loseReply
	holdRequest
	holdReply
)

// A fate is what befalls one command.
type fate struct {
	kind     fateKind
	held     *Held         // nil unless it is held
	answered chan struct{} // closed when the server's reply has come, or never will
}

// NewLossy returns a network that loses nothing yet.
func NewLossy() *Lossy { return &Lossy{plans: make(map[string][]*fate)} }

// LoseReply plans for n commands: the server runs the command, its reply is read and
// thrown away, and the connection closes. The client sees a network error of a write
// that has happened.
func (l *Lossy) LoseReply(command string, n int) {
	l.plan(loseReply, command, n)
}

// LoseRequest plans for n commands: the connection closes before the server sees the
// command. The client sees the same error as by [Lossy.LoseReply].
func (l *Lossy) LoseRequest(command string, n int) {
	l.plan(loseRequest, command, n)
}

// HoldReply plans for one command: the server runs it, and the client gets the reply when
// it is released.
func (l *Lossy) HoldReply(command string) *Held {
	return l.plan(holdReply, command, 1).held
}

// HoldRequest plans for one command: the server gets it when it is released, even if the
// client has given up and closed the connection by then.
func (l *Lossy) HoldRequest(command string) *Held {
	return l.plan(holdRequest, command, 1).held
}

// Left is how many planned faults no command of that name has met yet.
func (l *Lossy) Left(command string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.plans[command])
}

// DialContext is what the driver calls.
func (l *Lossy) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	server, err := l.dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	// A pipe keeps deadlines and Close as the driver expects them, whatever happens here.
	theirs, ours := net.Pipe()
	k := &link{lossy: l, client: ours, server: server, awaited: make(map[int32]*fate)}
	l.links.Go(k.up)
	l.links.Go(k.down)
	return &lossyConn{Conn: theirs, server: server}, nil
}

// plan adds n fates and returns the last. It panics on what it can't do, since a fault that
// never happens makes a test that proves nothing.
func (l *Lossy) plan(kind fateKind, command string, n int) *fate {
	if slices.Contains([]string{"", "hello", "isMaster", "ismaster"}, command) {
		panic(fmt.Sprintf("mongotest: the command %q can't be lost", command))
	}
	if n < 1 {
		panic(fmt.Sprintf("mongotest: the number of commands must be at least 1, got %d", n))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var f *fate
	for range n {
		f = &fate{kind: kind, answered: make(chan struct{})}
		if kind == holdRequest || kind == holdReply {
			f.held = &Held{reached: make(chan struct{}), released: make(chan struct{}), answered: f.answered}
		}
		l.plans[command] = append(l.plans[command], f)
	}
	return f
}

// Spare lets commands pass that are about collections whose names end so.
func (l *Lossy) Spare(suffix string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.spare = append(l.spare, suffix)
}

// next takes what is planned for a command, or nil.
func (l *Lossy) next(m message) *fate {
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.ContainsFunc(l.spare, func(suffix string) bool { return strings.HasSuffix(m.target(), suffix) }) {
		return nil
	}
	command := m.command()
	plan := l.plans[command]
	if len(plan) == 0 {
		return nil
	}
	l.plans[command] = plan[1:]
	return plan[0]
}

// A Held is one command that was planned to be held. Release it before the test ends, or
// its connection stays open.
type Held struct {
	reached  chan struct{} // closed when the command is held
	released chan struct{}
	answered chan struct{} // the fate's
	once     sync.Once     // guards the closing of released
}

// Reached is closed when the command is held: the client has sent it and, by
// [Lossy.HoldReply], the server has run it.
func (h *Held) Reached() <-chan struct{} { return h.reached }

// Release lets the command go on. If it is held, Release returns when the server has run
// it or the connection to the server has ended. Releasing twice is fine.
func (h *Held) Release() {
	h.once.Do(func() { close(h.released) })
	select {
	case <-h.reached:
		<-h.answered
	default:
	}
}

// lossyConn is the driver's end of a link, with the addresses of the real connection.
type lossyConn struct {
	net.Conn
	server net.Conn
}

func (c *lossyConn) LocalAddr() net.Addr  { return c.server.LocalAddr() }
func (c *lossyConn) RemoteAddr() net.Addr { return c.server.RemoteAddr() }
