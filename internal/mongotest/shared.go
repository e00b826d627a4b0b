package mongotest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// A Kind is a kind of server.
type Kind int

const (
	// ReplicaSet has transactions and change streams. A sharded cluster that
	// MONGODB_URI names counts as one.
	ReplicaSet Kind = iota
	// Standalone has neither, nor retryable writes.
	Standalone
)

// String is the kind's name in the names of subtests.
func (k Kind) String() string {
	if k == Standalone {
		return "standalone"
	}
	return "replicaset"
}

// options are those of the servers that tests share.
func (k Kind) options() Options {
	o := Options{TestCommands: true, Progress: announce}
	if k == ReplicaSet {
		o.ReplicaSet = 1
	}
	return o
}

// announce says what takes long, since a test that fetches looks like one that hangs.
func announce(what string) {
	if what != progressStart {
		fmt.Fprintln(os.Stderr, "mongotest:", what)
	}
}

// A share is a server that all tests of the binary use.
type share struct {
	kind Kind
	own  bool // whether it must be one that is started here

	mu     sync.Mutex
	begun  bool
	err    error   // why there is none
	server *Server // nil if MONGODB_URI is used
	uri    string
	client *mongo.Client
}

var shares = [...]*share{{kind: ReplicaSet}, {kind: Standalone}}

// Shared is the client that the tests of this binary share, for a server of the given
// kind, which is started when it is first asked for and ends with the process. The test
// fails if there is none. Don't disconnect it.
func Shared(t testing.TB, kind Kind) *mongo.Client {
	t.Helper()
	return shares[kind].get(t).client
}

// URI is the connection string of the server that the tests of this binary share.
func URI(t testing.TB, kind Kind) string {
	t.Helper()
	return shares[kind].get(t).uri
}

// Shutdown stops the shared servers and disconnects their clients. Only a TestMain that
// looks for leaked goroutines needs it.
func Shutdown() {
	for _, s := range shares {
		s.shutdown()
	}
	for _, s := range faultyShares {
		s.shutdown()
	}
}

func (s *share) get(t testing.TB) *share {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.begun = true
		s.err = s.begin(context.Background(), os.Getenv(uriVariable))
	}
	if s.err != nil {
		t.Fatalf("no %v server: %v", s.kind, s.err)
	}
	if s.server != nil {
		if err := s.server.died(); err != nil {
			t.Fatalf("the shared %v server died: %v", s.kind, err)
		}
	}
	return s
}

// begin connects to the server behind uri, if given and of the kind, else starts one.
func (s *share) begin(ctx context.Context, uri string) error {
	if uri != "" && !s.own {
		kind, err := kindOf(ctx, uri)
		if err != nil {
			return err
		}
		if kind == s.kind {
			s.uri = uri
		}
	}
	if s.uri == "" {
		server, err := Start(ctx, s.kind.options())
		if err != nil {
			return err
		}
		s.server, s.uri = server, server.URI()
	}
	var err error
	s.client, err = mongo.Connect(options.Client().ApplyURI(s.uri))
	return err
}

func (s *share) shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client != nil {
		disconnect(s.client)
	}
	if s.server != nil {
		s.server.Stop()
	}
	s.begun, s.err, s.server, s.uri, s.client = false, nil, nil, "", nil
}

// kindOf asks the server behind uri what it is.
func kindOf(ctx context.Context, uri string) (Kind, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("no answer in 10 s"))
	defer cancel()
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", uriVariable, err)
	}
	defer disconnect(client)
	var h hello
	if err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&h); err != nil {
		return 0, fmt.Errorf("%s names a server that cannot be used; correct or unset it: %w", uriVariable, err)
	}
	if h.Set == "" && h.Msg != "isdbgrid" {
		return Standalone, nil
	}
	return ReplicaSet, nil
}
