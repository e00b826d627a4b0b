package mongoq

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// attemptTimeout bounds every attempt of an operation on the server, by maxTimeMS and on the client.
const attemptTimeout = 10 * time.Second

// Config is what belongs to a Store. The zero value works.
type Config struct {
	// Collection is the name of the collection that holds every queue of the store. Further collections begin with it:
	// <Collection>.queues holds what is stored about queues (that one is paused), <Collection>.signals wakes consumers
	// in other processes, <Collection>.turns tells which of them claims next where several claim at once,
	// <Collection>.aside holds what was too large to be kept otherwise, <Collection>.transactions tells which transactions of
	// pipelines and of commits are open, and <Collection>.history.* are the partitions of a history that has them.
	// The rule: a collection's name of at most 120 bytes, without "$".
	//
	// Defaults to "mongoq".
	Collection string

	// PartitionHistory keeps what is done in collections of its own, <Collection>.history.*, one for each hour or day of
	// commits and each time until which they are kept. Forgetting drops such a collection whole, which costs the server
	// next to nothing; commits cost more. An envelope stays as long as its Retention says, and up to an hour or a day, and an
	// hour, longer. Give every process of the store the same. What was done before stays where it is. docs/history.md
	// compares both.
	//
	// Defaults to PartitionNone: the history is in the collection of the queues, under a TTL index.
	PartitionHistory Partitioning

	// OnForgetting is told about once a minute, in one process of the store at a time, how far the forgetting of what is
	// finished has come; Undated is counted once an hour. It must not call Close. See also Store.Forgetting.
	OnForgetting func(Forgetting)

	// Logger gets what an operator should know: an envelope set aside, an index that is not as it should be. Never a
	// payload.
	//
	// Defaults to slog.Default().
	Logger *slog.Logger

	// Clock is this process's clock. It need not be right: due times and leases follow the server's clock, which is
	// measured against this one when the store opens, each minute, and after a failover.
	//
	// Defaults to time.Now.
	Clock func() time.Time
}

// Store is a set of queues that share a collection. It is safe for use by many goroutines.
type Store struct {
	db       *mongo.Database
	envs     *mongo.Collection // majority writes, primary reads
	quick    *mongo.Collection // the same with w:1, for extensions of a lease
	sure     *mongo.Collection // majority reads: what an answer that was lost came to
	queues   *mongo.Collection
	aside    *mongo.Collection
	snapshot *mongo.Collection          // reads as of one moment
	noted    *mongo.Collection          // which sessions have a transaction open
	lasts    *writeconcern.WriteConcern // of a transaction
	log      *slog.Logger
	clock    *serverClock

	ready, history, dead, parts, ttl string // the indexes' names, for hints

	transactions bool // the server has them: it is no standalone

	onForgetting func(Forgetting)
	durable      *options.CollectionOptionsBuilder
	partitioning Partitioning
	partitioned  atomic.Bool     // the history has partitions, or will
	known        map[string]bool // partitions that stand; by mu

	numberings numberings

	clientTimeout bool // the client has a Timeout of its own: the driver then writes maxTimeMS into every command

	bell    *bell
	pauses  pauses
	settles *batcher[*settlement]
	extends *batcher[*extension]
	pushes  *batcher[*parcel]
	forks   *batcher[*forked]
	joins   *batcher[*Reservation]
	looks   *batcher[*search]
	filings *batcher[finished]

	mu         sync.Mutex
	closed     bool
	claimers   map[string]*claimer
	policies   map[string]ExpirePolicy // of the queues that this process has a handle of
	serving    atomic.Int32            // claimers that serve anybody
	forksAlone chan struct{}           // forks in transactions of their own
	behind     chan struct{}           // commits on their way behind the handlers of this process's workers
	wg         sync.WaitGroup

	life context.Context // ends with Close
	end  context.CancelFunc
}

// Open makes a store of a collection in db, with its indexes and its validator, and measures the server's clock. Many
// processes may open the same one at once.
//
// Whatever the client's defaults say, the store writes with majority, journaled, and reads from the primary.
// Errors: ErrUnsupportedServer below MongoDB 5.0, ErrUnauthorized, ErrInvalidOption, ErrInTransaction, an index that stands in the way, by its
// name, or what the server said. A user who may find and not write may open a store, to look at it.
func Open(ctx context.Context, db *mongo.Database, cfg Config) (*Store, error) {
	if db == nil {
		return nil, invalid("Open needs a database, got nil")
	}
	if cfg.Collection == "" {
		cfg.Collection = "mongoq"
	}
	if strings.ContainsAny(cfg.Collection, "$\x00") || strings.HasPrefix(cfg.Collection, "system.") || strings.Contains(cfg.Collection, ".system.") || strings.HasPrefix(cfg.Collection, ".") || len(cfg.Collection) > 120 {
		return nil, invalid("Collection must be a collection's name of at most 120 bytes, without '$' and NUL, without '.system.', not beginning with 'system.' or '.', got %q", cfg.Collection)
	}
	if err := cfg.PartitionHistory.check(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if mongo.SessionFromContext(ctx) != nil {
		return nil, ErrInTransaction
	}
	journaled := writeconcern.Majority()
	yes := true
	journaled.Journal = &yes
	durable := options.Collection().SetWriteConcern(journaled).SetReadPreference(readpref.Primary()).SetReadConcern(readconcern.Local())
	s := &Store{
		db:           db,
		envs:         db.Collection(cfg.Collection, durable),
		quick:        db.Collection(cfg.Collection, options.Collection().SetWriteConcern(writeconcern.W1()).SetReadPreference(readpref.Primary())),
		sure:         db.Collection(cfg.Collection, options.Collection().SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary())),
		queues:       db.Collection(cfg.Collection+".queues", durable),
		aside:        db.Collection(cfg.Collection+".aside", durable),
		noted:        db.Collection(cfg.Collection+".transactions", options.Collection().SetWriteConcern(writeconcern.W1()).SetReadPreference(readpref.Primary())),
		lasts:        journaled,
		snapshot:     db.Collection(cfg.Collection, options.Collection().SetReadConcern(readconcern.Snapshot()).SetReadPreference(readpref.Primary())),
		log:          cfg.Logger,
		clock:        &serverClock{now: cfg.Clock, hello: sayHello(db), turn: make(chan struct{}, 1)},
		onForgetting: cfg.OnForgetting,
		durable:      durable, partitioning: cfg.PartitionHistory, known: map[string]bool{},
		claimers:   map[string]*claimer{},
		policies:   map[string]ExpirePolicy{},
		behind:     make(chan struct{}, commitsBehind),
		forksAlone: make(chan struct{}, forksAlone),
	}
	s.bell = newBell(s, cfg.Collection+".signals")
	s.settles = newBatcher(s, settleRound, settleFlights, s.settleRound)
	s.extends = newBatcher(s, settleRound, settleFlights, s.extendRound)
	s.pushes = s.newPushes(pushBatch)
	s.forks = newBatcher(s, forkRound, forkFlights, s.forkRound)
	s.joins = newBatcher(s, joinRound, joinFlights, s.joinRound)
	s.looks = newBatcher(s, lookLimit, lookFlights, s.lookRound)
	s.filings = newBatcher(s, settleRound, filingFlights, s.filingRound)
	s.life, s.end = context.WithCancel(context.Background())
	var err error
	if s.transactions, err = checkServer(ctx, db); err != nil {
		return nil, err
	}
	if err := s.checkRights(ctx); err != nil {
		return nil, err
	}
	if err := s.prepare(ctx); err != nil {
		return nil, err
	}
	s.partitioned.Store(s.partitioning != PartitionNone)
	// Who may not list collections, and makes no partitions, has a history without.
	if _, err := s.listPartitions(ctx); err != nil && (s.partitioning != PartitionNone || !hasCode(err, codeUnauthorized)) {
		return nil, err
	}
	if _, _, err := s.clock.bounds(ctx); err != nil {
		return nil, err
	}
	s.clientTimeout = hasClientTimeout(ctx, db)
	s.bell.open(ctx)
	if err := ctx.Err(); err != nil {
		return s, err
	}
	if s.begin() {
		go s.keep()
	}
	if s.partitioning != PartitionNone && s.transactions && s.begin() {
		go func() {
			defer s.wg.Done()
			s.tendTransactions(s.life)
		}()
	}
	return s, nil
}

// Close ends the store: those who wait in Reserve or Pop get ErrClosed, and what was claimed for them is released. It
// waits for that until ctx ends, and returns ctx's error then. Reservations held by others can still be settled as
// long as the client is connected. A second Close does nothing.
func (s *Store) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	claimers := s.claimers
	s.claimers = map[string]*claimer{}
	s.mu.Unlock()
	s.end()
	for _, c := range claimers {
		c.close()
	}
	done := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		s.endNumbered(ctx)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// begin counts a goroutine that Close waits for; false: the store is closed.
func (s *Store) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.wg.Add(1)
	}
	return !s.closed
}

func (s *Store) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	return nil
}

// Get finds an envelope by its id, in whatever queue it is now, live, dead or in the history; else ErrNotFound.
func (s *Store) Get(ctx context.Context, id bson.ObjectID) (*Envelope, error) {
	return s.find(ctx, id, nil)
}

// find finds an envelope by its id, if it is as said.
func (s *Store) find(ctx context.Context, id bson.ObjectID, as bson.D) (*Envelope, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	filter := append(bson.D{field("_id", id)}, as...)
	raw, err := s.envs.FindOne(ctx, filter).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		if raw, err = s.findFiled(ctx, filter); err == nil && raw == nil {
			return nil, ErrNotFound
		}
	}
	if err != nil {
		return nil, err
	}
	e := read(raw).Envelope
	return &e, nil
}

// detached is a context for work that must not end with its caller's, nor join its caller's transaction.
func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(outside(context.WithoutCancel(ctx)), d)
}

// outside takes the caller's session out of the context.
func outside(ctx context.Context) context.Context {
	if mongo.SessionFromContext(ctx) == nil {
		return ctx
	}
	return mongo.NewSessionContext(ctx, nil)
}

func inSession(ctx context.Context) bool { return mongo.SessionFromContext(ctx) != nil }
