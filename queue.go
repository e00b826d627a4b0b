package mongoq

import (
	"context"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v4"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

const (
	// NoDeadLetter, as a DeadLetter, has what fails retried for ever, at the policy's longest wait where it stops.
	NoDeadLetter = "$none"

	// MaxQueueName is the most bytes that a queue's name may have.
	MaxQueueName = 255

	defaultLease        = 30 * time.Second
	defaultPollInterval = time.Second
)

// ExpirePolicy says what becomes of an envelope that nobody took before its deadline.
type ExpirePolicy int

const (
	// Discard deletes it; the server's TTL index may do so by itself.
	Discard ExpirePolicy = iota
	// ToDeadLetter moves it to the dead-letter queue when a claim meets it.
	ToDeadLetter
)

// QueueConfig is what belongs to a queue. The zero value works. Nothing of it is stored: every process says for itself
// how it pushes, takes and settles.
type QueueConfig struct {
	// Lease is how long a reservation is held before the envelope is delivered again, unless it is extended. The rule:
	// at least 1 ms.
	//
	// Defaults to 30 s.
	Lease time.Duration

	// Delay is how long a pushed envelope waits before it may be taken, unless the push says otherwise.
	//
	// Defaults to 0.
	Delay time.Duration

	// TTL is how long a pushed envelope may wait to be taken, counted from the push, unless the push says otherwise;
	// past it, it is never delivered, see OnExpire; nor is one that is delayed for longer. Zero means for ever. The rule:
	// 0, or at least 1 ms.
	//
	// Defaults to 0.
	TTL time.Duration

	// Retention is how long a committed envelope stays in the history. Zero deletes it on commit, KeepForever keeps it.
	// It applies to what is committed from now on, by this handle; for what is there see History.SetRetention. Retain says
	// otherwise for one envelope.
	//
	// Defaults to 0.
	Retention time.Duration

	// RetentionSpread is the most that is added to the Retention of each envelope, at random, so that what was done in one
	// burst is not deleted at one time. The rule: 0, or at least 1 ms.
	//
	// Defaults to 0.
	RetentionSpread time.Duration

	// PollInterval is how often one who waits looks for envelopes that nothing rang for: those of other processes. Due
	// times and pushes of this process don't wait for it. While processes signal each other one looks less often: each
	// half lease, or two seconds if that is less, unless PollInterval is longer. The rule: at least 1 ms.
	//
	// Defaults to 1 s.
	PollInterval time.Duration

	// Retry makes the policy of an envelope's retries, new at each call: the n-th failure waits what the n-th
	// NextBackOff says, and backoff.Stop means the dead-letter queue: WithMaxRetries(b, 3) allows three retries. It is
	// asked anew at each failure, so an elapsed time counts nothing: set MaxElapsedTime to 0, which is not its default.
	//
	// Defaults to DefaultRetry.
	Retry func() backoff.BackOff

	// DeadLetter is the name of the dead-letter queue, or NoDeadLetter. It is a queue like any other; several queues
	// may share one.
	//
	// Defaults to the queue's name with ".dead".
	DeadLetter string

	// DeadRetention is how long a dead letter of this queue is kept, counted from its death; then the server deletes it,
	// and nobody is told. Zero keeps it until somebody redrives, handles or purges it. One that a consumer has taken from
	// the dead-letter queue is kept from then on. It applies to what dies from now on. The rule: 0, or at least 1 ms.
	//
	// Defaults to 0: a dead letter is never dropped silently.
	DeadRetention time.Duration

	// OnExpire says what becomes of envelopes past their deadline. ToDeadLetter needs a dead-letter queue.
	//
	// Defaults to Discard.
	OnExpire ExpirePolicy

	// DurableClaims makes a claim wait until a majority holds it: no two consumers hold an envelope at once even across
	// a failover, and Deliveries fences effects outside. Claims then cost a replication round trip.
	//
	// Defaults to false: a claim lost in a failover is a second delivery, of which only one can commit.
	DurableClaims bool
}

// Queue is a handle of a queue. It is safe for use by many goroutines.
type Queue struct {
	s    *Store
	name string
	cfg  QueueConfig
}

// Queue gives a handle of the queue with this name. It costs no round trip, and the queue needs no making: it is where
// envelopes say it is. The rule for names: 1 to 255 bytes of UTF-8, no NUL, not beginning with "$"; the
// dead-letter queue has a name, too, by default five bytes longer.
func (s *Store) Queue(name string, cfg QueueConfig) (*Queue, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	if err := checkName(name); err != nil {
		return nil, err
	}
	if cfg.Lease == 0 {
		cfg.Lease = defaultLease
	}
	if cfg.PollInterval == 0 {
		cfg.PollInterval = defaultPollInterval
	}
	if cfg.Retry == nil {
		cfg.Retry = DefaultRetry
	}
	cfg.DeadLetter = deadLetterOf(name, cfg)
	if err := cfg.check(name); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.policies[name] = cfg.OnExpire
	s.mu.Unlock()
	return &Queue{s: s, name: name, cfg: cfg}, nil
}

func defaultDeadLetter(name string) string { return name + ".dead" }

func deadLetterOf(name string, cfg QueueConfig) string {
	if cfg.DeadLetter == "" {
		return defaultDeadLetter(name)
	}
	return cfg.DeadLetter
}

func (cfg *QueueConfig) check(name string) error {
	if err := checkLease("Lease", cfg.Lease); err != nil {
		return err
	}
	switch {
	case cfg.Delay < 0:
		return invalid("Delay must be >= 0, got %v", cfg.Delay)
	case cfg.TTL != 0 && cfg.TTL < time.Millisecond:
		return invalid("TTL must be 0 (none) or >= 1ms, got %v", cfg.TTL)
	case cfg.Retention != KeepForever && cfg.Retention != 0 && cfg.Retention < time.Millisecond:
		return invalid("Retention must be KeepForever, 0 (none) or >= 1ms, got %v", cfg.Retention)
	case cfg.RetentionSpread != 0 && cfg.RetentionSpread < time.Millisecond:
		return invalid("RetentionSpread must be 0 (none) or >= 1ms, got %v", cfg.RetentionSpread)
	case cfg.DeadRetention != 0 && cfg.DeadRetention < time.Millisecond:
		return invalid("DeadRetention must be 0 (kept) or >= 1ms, got %v", cfg.DeadRetention)
	case cfg.PollInterval < time.Millisecond:
		return invalid("PollInterval must be >= 1ms, got %v", cfg.PollInterval)
	case cfg.OnExpire != Discard && cfg.OnExpire != ToDeadLetter:
		return invalid("OnExpire must be Discard or ToDeadLetter, got %d", cfg.OnExpire)
	case cfg.OnExpire == ToDeadLetter && cfg.DeadLetter == NoDeadLetter:
		return invalid("OnExpire: ToDeadLetter needs a dead-letter queue, got NoDeadLetter")
	case cfg.DeadLetter == name:
		return invalid("DeadLetter must be another queue, got %q itself", name)
	case cfg.Retry() == nil:
		return invalid("Retry must make a policy, got nil")
	}
	if cfg.DeadLetter == NoDeadLetter {
		return nil
	}
	return checkName(cfg.DeadLetter)
}

func checkName(name string) error {
	switch {
	case name == "":
		return invalid("a queue's name must not be empty")
	case len(name) > MaxQueueName:
		return invalid("a queue's name, and its dead-letter queue's, must have at most %d bytes, got %d: %.40q...", MaxQueueName, len(name), name)
	case strings.ContainsRune(name, 0):
		return invalid("a queue's name must not hold NUL, got %q", name)
	case name[0] == '$':
		return invalid("a queue's name must not begin with '$', got %q", name)
	case !utf8.ValidString(name):
		return invalid("a queue's name must be valid UTF-8, got %q", name)
	}
	return nil
}

// policyOf is the expiry policy of a queue as this process knows it. Of a queue that it has no handle of nothing is
// known, and nothing may be lost: its claimers see to what has expired.
func (s *Store) policyOf(queue string) ExpirePolicy {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, ok := s.policies[queue]; ok {
		return p
	}
	return ToDeadLetter
}

// Name is the queue's name.
func (q *Queue) Name() string { return q.name }

// Peek shows up to n envelopes that are due now, in the order in which they would be taken, and takes none.
// The rule: n >= 1.
func (q *Queue) Peek(ctx context.Context, n int) ([]*Envelope, error) {
	if n < 1 {
		return nil, invalid("Peek needs n >= 1, got %d", n)
	}
	if err := q.s.open(); err != nil {
		return nil, err
	}
	filter := bson.D{
		field("q", q.name), field("processed", nil), field("$expr", op("$and", bson.A{due(), op("$not", expired())})),
	}
	cur, err := q.s.envs.Find(ctx, filter, options.Find().
		SetSort(bson.D{field("prio", 1), field("when", 1)}).SetHint(q.s.ready).SetLimit(int64(n)))
	if err != nil {
		return nil, err
	}
	defer cur.Close(ctx)
	var all []*Envelope
	for cur.Next(ctx) {
		e := read(append(bson.Raw(nil), cur.Current...)).Envelope
		all = append(all, &e)
	}
	return all, cur.Err()
}

// Get finds an envelope of this queue by its id, live or in its history; else ErrNotFound.
func (q *Queue) Get(ctx context.Context, id bson.ObjectID) (*Envelope, error) {
	return q.s.find(ctx, id, bson.D{field("q", q.name)})
}

// Remove deletes an envelope that waits. It is ErrReserved while somebody holds it, ErrNotFound when it is not in this
// queue or is done, ErrOutcomeUnknown when the answer was lost: it may be repeated.
func (q *Queue) Remove(ctx context.Context, id bson.ObjectID) error {
	if err := q.s.open(); err != nil {
		return err
	}
	res, err := q.s.envs.DeleteOne(ctx, bson.D{
		field("_id", id), field("q", q.name), field("processed", nil), field("$expr", idle()),
	})
	if mayPass(err) { // an attempt of the driver's before may have been done
		return unknown(err)
	}
	if err != nil || res.DeletedCount == 1 {
		return err
	}
	e, err := q.Get(ctx, id)
	if err != nil {
		return err
	}
	if !e.Processed.IsZero() {
		return ErrNotFound
	}
	return ErrReserved
}

// Purge deletes what waits in the queue, due or not, and says how many. What is reserved, dead or in the history
// stays. When it fails it has deleted as many as it says, or more if the error is ErrOutcomeUnknown; it may be
// repeated.
func (q *Queue) Purge(ctx context.Context) (int64, error) {
	return sweep{
		filter: bson.D{field("q", q.name), field("processed", nil), field("dead", nil), undivided, field("$expr", idle())},
		since:  "pushed", hint: q.s.ready, run: q.s.deleteBatch,
	}.over(ctx, q.s)
}

// Pause stops the queue for every process, within a second: who waits goes on waiting, TryReserve and TryPop are
// ErrQueuePaused. Pushes and the settling of reservations go on. It is stored, and lasts until Resume. It may be repeated,
// also after ErrOutcomeUnknown.
func (q *Queue) Pause(ctx context.Context) error { return q.setPaused(ctx, true) }

// Resume ends a pause. It may be repeated, likewise.
func (q *Queue) Resume(ctx context.Context) error { return q.setPaused(ctx, false) }

func (q *Queue) setPaused(ctx context.Context, paused bool) error {
	if err := q.s.open(); err != nil {
		return err
	}
	_, err := q.s.queues.UpdateOne(outside(ctx), bson.D{field("_id", q.name)},
		op("$set", bson.D{field("paused", paused)}), options.UpdateOne().SetUpsert(true))
	if err != nil {
		if mayPass(err) { // likewise
			return unknown(err)
		}
		return err
	}
	q.s.notePause(q.name, paused)
	q.s.settled(q.name) // a claim of this process that began before
	q.s.ring(q.name, 0, 0)
	return nil
}
