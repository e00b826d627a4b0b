package mongoq

import (
	"strings"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Options belong to one call. An option in the wrong place does not compile. One that breaks its rule is an error that wraps
// ErrInvalidOption, and nothing is stored; in PushMany only the element that has it fails.
type (
	// PushOption is an option of Push, PushMany and Replay.
	PushOption interface{ applyPush(*pushSettings) error }
	// ReserveOption is an option of Reserve, TryReserve and ReserveMany.
	ReserveOption interface{ applyReserve(*reserveSettings) error }
	// CommitOption is an option of Commit.
	CommitOption interface{ applyCommit(*commitSettings) error }
	// RollbackOption is an option of Rollback.
	RollbackOption interface{ applyRollback(*rollbackSettings) error }
	// ReleaseOption is an option of Release.
	ReleaseOption interface{ applyRelease(*releaseSettings) error }
	// MoveOption is an option of MoveToQ.
	MoveOption interface{ applyMove(*moveSettings) error }
	// StatsOption is an option of Stats.
	StatsOption interface{ applyStats(*statsSettings) error }
	// RedriveOption is an option of DeadLetters.Redrive.
	RedriveOption interface{ applyRedrive(*redriveSettings) error }
)

// start says when an envelope may be taken: after a delay, or at a time.
type start struct {
	delay time.Duration
	at    time.Time // when set, it wins
	place bool      // where it was before it was claimed
}

// patch replaces what the user put into an envelope.
type patch struct {
	payload *bson.RawValue
	headers map[string]string
	merge   bool // headers are added to those there
	set     bool // headers are given
}

type pushSettings struct {
	start   *start
	prio    int
	headers map[string]string
	ttl     *time.Duration
	id      *bson.ObjectID

	replayOf *bson.RawValue // set by a replay
}

type reserveSettings struct{ lease time.Duration }

type commitSettings struct {
	result *bson.RawValue
	retain *time.Duration
}

type rollbackSettings struct {
	after *time.Duration
	patch patch
}

type releaseSettings struct{ start start }

type moveSettings struct {
	start start
	prio  int
	ttl   *time.Duration
	patch patch
	more  bson.D // further fields that a pipeline sets
}

// moveSettingsOf reads the options of a move.
func moveSettingsOf(opts []MoveOption) (moveSettings, error) {
	var set moveSettings
	for _, o := range opts {
		if err := o.applyMove(&set); err != nil {
			return set, err
		}
	}
	return set, nil
}

// plain is true of a move that changes nothing but the queue.
func (s *moveSettings) plain() bool {
	return s.start == start{} && s.prio == 0 && s.ttl == nil && s.patch.payload == nil && !s.patch.set && s.more == nil
}

type statsSettings struct{ exact bool }

type delayOption time.Duration

// Delay makes the envelope takeable only after d, by the server's clock. It overrides the queue's own delay.
// The rule: d >= 0.
func Delay(d time.Duration) interface {
	PushOption
	ReleaseOption
	MoveOption
	ReplayOption
} {
	return delayOption(d)
}

func (o delayOption) check() (start, error) {
	if o < 0 {
		return start{}, invalid("Delay must be >= 0, got %v", time.Duration(o))
	}
	return start{delay: time.Duration(o)}, nil
}

func (o delayOption) applyPush(s *pushSettings) error {
	v, err := o.check()
	s.start = &v
	return err
}

func (o delayOption) applyRelease(s *releaseSettings) (err error) {
	s.start, err = o.check()
	return err
}

func (o delayOption) applyMove(s *moveSettings) (err error) {
	s.start, err = o.check()
	return err
}

type atOption time.Time

// At makes the envelope takeable only from t on, by the server's clock; a time that has passed means at once.
// The rule: t lies in the years 1970 to 9999.
func At(t time.Time) interface {
	PushOption
	ReleaseOption
	MoveOption
	ReplayOption
} {
	return atOption(t)
}

func (o atOption) check() (start, error) {
	t, err := moment("At", time.Time(o)) // never early
	if err != nil {
		return start{}, err
	}
	return start{at: t}, nil
}

func (o atOption) applyPush(s *pushSettings) error {
	v, err := o.check()
	s.start = &v
	return err
}

func (o atOption) applyRelease(s *releaseSettings) (err error) {
	s.start, err = o.check()
	return err
}

func (o atOption) applyMove(s *moveSettings) (err error) {
	s.start, err = o.check()
	return err
}

type priorityOption int

// Priority says which of the due envelopes is taken first: 1 before 2 before 3 before 4. Defaults to 2; a move keeps
// the priority it finds unless told otherwise. The rule: 1 <= n <= 4.
func Priority(n int) interface {
	PushOption
	MoveOption
	ReplayOption
} {
	return priorityOption(n)
}

func (o priorityOption) check() (int, error) {
	if o < firstPriority || o > lastPriority {
		return 0, invalid("Priority must be %d to %d, got %d", firstPriority, lastPriority, int(o))
	}
	return int(o), nil
}

func (o priorityOption) applyPush(s *pushSettings) (err error) {
	s.prio, err = o.check()
	return err
}

func (o priorityOption) applyMove(s *moveSettings) (err error) {
	s.prio, err = o.check()
	return err
}

type headersOption struct {
	m     map[string]string
	merge bool
}

// Headers sets the envelope's headers; with Rollback, MoveToQ and Redrive it replaces those there.
// The rule: keys are not empty, keys and values are valid UTF-8, keys hold no NUL.
func Headers(m map[string]string) interface {
	PushOption
	RollbackOption
	MoveOption
	RedriveOption
} {
	return headersOption{m: m}
}

// AddHeaders adds to the headers that are there; a key given again gets the new value. The rule is that of Headers.
func AddHeaders(m map[string]string) interface {
	RollbackOption
	MoveOption
	RedriveOption
} {
	return headersOption{m: m, merge: true}
}

func (o headersOption) check() error {
	for k, v := range o.m {
		switch {
		case k == "":
			return invalid("a header's key must not be empty")
		case strings.ContainsRune(k, 0):
			return invalid("a header's key must not hold NUL, got %q", k)
		case !utf8.ValidString(k):
			return invalid("a header's key must be valid UTF-8, got %q", k)
		case !utf8.ValidString(v):
			return invalid("the value of header %q must be valid UTF-8", k)
		}
	}
	return nil
}

func (o headersOption) applyPush(s *pushSettings) error {
	s.headers = o.m
	return o.check()
}

func (o headersOption) applyPatch(p *patch) error {
	p.headers, p.merge, p.set = o.m, o.merge, true
	return o.check()
}

func (o headersOption) applyRollback(s *rollbackSettings) error { return o.applyPatch(&s.patch) }
func (o headersOption) applyMove(s *moveSettings) error         { return o.applyPatch(&s.patch) }

type ttlOption time.Duration

// TTL ends the life of an envelope that nobody took within d of the push (or of the move): it is then never
// delivered, and the queue's OnExpire says whether it vanishes or is dead-lettered. It counts from the push, not from when
// the envelope falls due: one that is delayed for longer is never delivered. It overrides the queue's TTL.
// Zero means no end. The rule: d is 0 or >= 1 ms.
func TTL(d time.Duration) interface {
	PushOption
	MoveOption
	ReplayOption
} {
	return ttlOption(d)
}

func (o ttlOption) check() (*time.Duration, error) {
	d := time.Duration(o)
	if d != 0 && d < time.Millisecond {
		return nil, invalid("TTL must be 0 (none) or >= 1ms, got %v", d)
	}
	return &d, nil
}

func (o ttlOption) applyPush(s *pushSettings) (err error) {
	s.ttl, err = o.check()
	return err
}

func (o ttlOption) applyMove(s *moveSettings) (err error) {
	s.ttl, err = o.check()
	return err
}

type idOption bson.ObjectID

// ID gives the envelope its id and makes the push repeatable: the same push again succeeds and changes nothing while
// the first one is in the store, live, dead or in the history; another envelope under that id is ErrDuplicate.
// What was committed without a history is forgotten, so that repeating its push pushes it anew.
// Ids are unique over all queues of the store. The rule: id is not the nil ObjectID.
func ID(id bson.ObjectID) PushOption { return idOption(id) }

func (o idOption) applyPush(s *pushSettings) error {
	id := bson.ObjectID(o)
	if id.IsZero() {
		return invalid("ID must not be the nil ObjectID")
	}
	s.id = &id
	return nil
}

type leaseForOption time.Duration

// LeaseFor sets how long this reservation is held, in place of the queue's Lease. The rule: d >= 1 ms.
func LeaseFor(d time.Duration) ReserveOption { return leaseForOption(d) }

func (o leaseForOption) applyReserve(s *reserveSettings) error {
	s.lease = time.Duration(o)
	return checkLease("LeaseFor", s.lease)
}

type payloadOption struct{ v any }

// Payload replaces the envelope's payload in the same write. The rule: v can be encoded as BSON.
func Payload(v any) interface {
	RollbackOption
	MoveOption
	RedriveOption
} {
	return payloadOption{v}
}

func (o payloadOption) applyPatch(p *patch) error {
	v, err := encode("Payload", o.v)
	p.payload = &v
	return err
}

func (o payloadOption) applyRollback(s *rollbackSettings) error { return o.applyPatch(&s.patch) }
func (o payloadOption) applyMove(s *moveSettings) error         { return o.applyPatch(&s.patch) }

type resultOption struct{ v any }

// Result keeps what the work came to with the committed envelope, in the history; a queue without Retention keeps
// nothing. The rule: v can be encoded as BSON.
func Result(v any) CommitOption { return resultOption{v} }

func (o resultOption) applyCommit(s *commitSettings) error {
	v, err := encode("Result", o.v)
	s.result = &v
	return err
}

type retainOption time.Duration

// Retain says how long this envelope stays in the history, in place of the queue's Retention: 0 deletes it, KeepForever
// keeps it. The queue's RetentionSpread is added all the same. The rule: KeepForever, 0 or >= 1 ms.
func Retain(d time.Duration) CommitOption { return retainOption(d) }

func (o retainOption) applyCommit(s *commitSettings) error {
	d := time.Duration(o)
	s.retain = &d
	if d != KeepForever && d != 0 && d < time.Millisecond {
		return invalid("Retain must be KeepForever, 0 (none) or >= 1ms, got %v", d)
	}
	return nil
}

type afterOption time.Duration

// After makes this rollback wait d in place of what the queue's policy says. The failure counts as any other: where the
// policy stops, the envelope is dead-lettered all the same. The rule: d >= 0.
func After(d time.Duration) RollbackOption { return afterOption(d) }

func (o afterOption) applyRollback(s *rollbackSettings) error {
	d := time.Duration(o)
	if d < 0 {
		return invalid("After must be >= 0, got %v", d)
	}
	s.after = &d
	return nil
}

type exactOption struct{}

// Exact makes Stats count to the end, however many there are: one to two seconds for each million envelopes.
func Exact() StatsOption { return exactOption{} }

func (exactOption) applyStats(s *statsSettings) error {
	s.exact = true
	return nil
}

func checkLease(what string, d time.Duration) error {
	if d < time.Millisecond {
		return invalid("%s must be >= 1ms, got %v", what, d)
	}
	return nil
}
