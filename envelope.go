package mongoq

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

const (
	// MaxEnvelopeSize is the most bytes that an envelope may have in all, as BSON: MongoDB's 16 MiB less 64 KiB, which
	// are left for what its failures and moves add.
	MaxEnvelopeSize = 16<<20 - 64<<10

	// KeepForever, as a Retention, keeps what was committed without end.
	KeepForever time.Duration = -1

	firstPriority   = 1
	lastPriority    = 4
	defaultPriority = 2

	keptFailures = 10
	keptHops     = 32
	maxMessage   = 1 << 10
)

// Envelope is a job as it is stored: what the user put in, and its way so far. All times are the server's.
type Envelope struct {
	ID       bson.ObjectID
	Q        string            // the queue it is in
	When     time.Time         // due time while it waits, lease deadline while it is reserved
	Priority int               // 1 (first) to 4
	Headers  map[string]string // nil when there are none
	Payload  bson.RawValue     // see Decode

	Retries    int // deliveries that failed since it came into this queue: 0 at the first delivery
	Deliveries int // claims so far, never reset; with DurableClaims a fencing number for effects outside: else a failover may repeat one
	Moves      int // moves so far, never reset

	Pushed    time.Time // when it was pushed
	Due       time.Time // when it fell due for its last claim; zero before the first
	Reserved  time.Time // when it was last claimed; zero while it waits
	Deadline  time.Time // end of its life if nobody takes it; zero: none
	ExpireAt  time.Time // when the server may delete it; zero: never
	Processed time.Time // when it was committed; zero while it is live

	ReplayOf bson.ObjectID // the finished envelope that this one does again; nil: none
	ReplayID string        // the id of its replay, if it had one

	Result   bson.RawValue // what the commit returned
	Failures []Failure     // the last 10 failures, oldest first
	Hops     []Hop         // the last 32 moves, oldest first
	Dead     *DeadInfo     // set in a dead-letter queue only

	Loops  map[string]int // how often it has gone back over the link "<stage>><stage>" of its pipeline
	Part   *Part          // set if it is a part of a fork
	Joined *Joined        // set at a join: what has become of its parts
	Ways   []JoinedPart   // how the parts came that it was last joined of, without their content
}

// Failure is one failed delivery.
type Failure struct {
	At      time.Time
	Retries int    // the envelope's retries with this failure counted
	Msg     string // the cause, cut at 1 KiB
	Lost    bool   // the consumer was lost: its lease ran out
}

// Hop is one move out of a queue.
type Hop struct {
	From string
	At   time.Time
}

// DeadKind says why an envelope was dead-lettered.
type DeadKind string

// The reasons for a dead letter.
const (
	DeadRetries     DeadKind = "retries"     // failed more often than the policy retries
	DeadPermanent   DeadKind = "permanent"   // failed with a cause wrapped in backoff.Permanent
	DeadLost        DeadKind = "lost"        // lost with its consumers more often than the policy retries
	DeadExpired     DeadKind = "expired"     // not taken before its deadline
	DeadUnroutable  DeadKind = "unroutable"  // nowhere to go
	DeadUndecodable DeadKind = "undecodable" // the stored document cannot be read as an envelope
	DeadHops        DeadKind = "hops"        // went back over a Back of its pipeline more often than its Limit
	DeadExplicit    DeadKind = "explicit"    // by DeadLetter
	DeadPart        DeadKind = "part"        // a part of it died on the way to its join
)

// DeadInfo says where a dead letter came from, and why. Its Retries and Failures are those of the queue it left.
type DeadInfo struct {
	From string
	At   time.Time
	Kind DeadKind
	Msg  string   // the cause, cut at 1 KiB
	Was  bson.Raw // of an undecodable one: the fields that could not be read, as they were
}

// Outcome says how a finished envelope ended.
type Outcome string

// The outcomes.
const (
	OutcomeDone    Outcome = "done"    // its work was done
	OutcomeDropped Outcome = "dropped" // a stage of its pipeline ended it, by Drop: the result says why
)

// Outcome is how the envelope ended; empty while it is live.
func (e *Envelope) Outcome() Outcome {
	if e.Processed.IsZero() {
		return ""
	}
	if _, dropped := droppedFor(e.Result); dropped {
		return OutcomeDropped
	}
	return OutcomeDone
}

// Waited is how long the envelope was due before it was last claimed; 0 if it never was.
func (e *Envelope) Waited() time.Duration {
	if e.Due.IsZero() || e.Reserved.IsZero() {
		return 0
	}
	return max(e.Reserved.Sub(e.Due), 0)
}

// Ran is the time from the last claim of a finished envelope to its commit; 0 while it is live.
func (e *Envelope) Ran() time.Duration {
	if e.Reserved.IsZero() || e.Processed.IsZero() {
		return 0
	}
	return max(e.Processed.Sub(e.Reserved), 0)
}

// Decode decodes the payload into v, a pointer, as bson.Unmarshal does for a field of that type.
func (e *Envelope) Decode(v any) error {
	if err := e.Payload.Unmarshal(v); err != nil {
		return fmt.Errorf("mongoq: cannot decode the payload of %s into %T: %w", e.ID.Hex(), v, unquoted(err))
	}
	return nil
}

// unquotedError is an error of a value that could not be parsed, without the value: errors go into logs and dead letters.
// Its cause, which may quote it, is there for errors.As.
type unquotedError struct {
	text  string
	cause error
}

func (e *unquotedError) Error() string { return e.text }
func (e *unquotedError) Unwrap() error { return e.cause }

// unquoted keeps the value out of the text of an error that the standard library's parsers make of it.
func unquoted(err error) error {
	var (
		moment  *time.ParseError
		address *url.Error
		digits  *strconv.NumError
	)
	if !errors.As(err, &moment) && !errors.As(err, &address) && !errors.As(err, &digits) {
		return err
	}
	text := "a text in it is not of the form that is wanted"
	var at *bson.DecodeError
	if errors.As(err, &at) {
		text = fmt.Sprintf("the text in %s is not of the form that is wanted", strings.Join(at.Keys(), "."))
	}
	return &unquotedError{text: text, cause: err}
}

// stored is an envelope as read from the collection, with what the library keeps for itself.
type stored struct {
	Envelope
	id     bson.RawValue // _id, whatever its type
	lease  bson.ObjectID
	last   lastVerb
	digest []byte
	bad    []bson.RawElement // fields of a wrong type
	rest   bson.D            // fields that the library does not know, or only passes on
	size   int
}

// lastVerb is the holder's latest verb other than a commit: evidence for one whose answer was lost.
type lastVerb struct {
	lease bson.ObjectID
	verb  string
}

// read makes an envelope of a document. What is of a wrong type is left at its zero value and noted in bad: readers
// show what there is, a claim sets the envelope aside.
func read(raw bson.Raw) stored {
	s := stored{size: len(raw)}
	s.Priority = defaultPriority
	s.Payload = bson.RawValue{Type: bson.TypeNull}
	elems, err := raw.Elements()
	if err != nil {
		return s
	}
	for _, el := range elems {
		key, v := el.Key(), el.Value()
		ok := true
		switch key {
		case "_id":
			s.id = v
			s.ID, ok = v.ObjectIDOK()
		case "q":
			s.Q, ok = v.StringValueOK()
		case "when":
			s.When, ok = v.TimeOK()
		case "prio":
			var prio int
			if prio, ok = number(v); ok {
				s.Priority = prio
			}
		case "reserved":
			s.Reserved, ok = v.TimeOK()
		case "due":
			s.Due, ok = v.TimeOK()
		case "lease":
			s.lease, ok = v.ObjectIDOK()
		case "last":
			s.last, ok = readLast(v)
		case "deliveries":
			s.Deliveries, ok = number(v)
		case "retries":
			s.Retries, ok = number(v)
		case "moves":
			s.Moves, ok = number(v)
		case "processed":
			s.Processed, ok = v.TimeOK()
		case "deadline":
			s.Deadline, ok = v.TimeOK()
		case "expireAt":
			s.ExpireAt, ok = v.TimeOK()
		case "pushed":
			s.Pushed, ok = v.TimeOK()
		case "headers":
			s.Headers, ok = readHeaders(v)
		case "payload":
			s.Payload = v
		case "result":
			s.Result = v
		case "errs":
			s.Failures, ok = readEach(v, readFailure)
		case "hops":
			s.Hops, ok = readEach(v, readHop)
		case "dead":
			s.Dead, ok = readDead(v)
		case "loops", "part", "join", "ways":
			ok = s.readPipeline(key, v)
			s.rest = append(s.rest, bson.E{Key: key, Value: v})
		case "replayOf":
			if ok = s.readReplay(v); ok {
				s.rest = append(s.rest, bson.E{Key: key, Value: v})
			}
		case "digest":
			if _, s.digest, ok = v.BinaryOK(); ok {
				s.rest = append(s.rest, bson.E{Key: key, Value: v})
			}
		case "was":
			ok = false // a claim found `when` to be no date, and kept what it was
		default:
			s.rest = append(s.rest, bson.E{Key: key, Value: v})
		}
		if !ok && (v.Type != bson.TypeNull || key == "_id" || key == "was") {
			s.bad = append(s.bad, el)
		}
	}
	return s
}

// badFields names the fields that could not be read.
func (s *stored) badFields() []string {
	var names []string
	for _, el := range s.bad {
		key := el.Key()
		if key == "was" {
			key = "when"
		}
		names = append(names, fmt.Sprintf("%s is %s", key, el.Value().Type))
	}
	return names
}

// number reads a whole number of any of BSON's numeric types.
func number(v bson.RawValue) (int, bool) {
	if n, ok := v.AsInt64OK(); ok {
		return int(n), true
	}
	return 0, false
}

func readHeaders(v bson.RawValue) (map[string]string, bool) {
	doc, ok := v.DocumentOK()
	if !ok {
		return nil, false
	}
	elems, err := doc.Elements()
	if err != nil {
		return nil, false
	}
	if len(elems) == 0 {
		return nil, true
	}
	m := make(map[string]string, len(elems))
	for _, el := range elems {
		s, ok := el.Value().StringValueOK()
		if !ok {
			return nil, false
		}
		m[el.Key()] = s
	}
	return m, true
}

// readEach reads an array of documents.
func readEach[T any](v bson.RawValue, one func(bson.Raw) T) ([]T, bool) {
	arr, ok := v.ArrayOK()
	if !ok {
		return nil, false
	}
	vals, err := arr.Values()
	if err != nil {
		return nil, false
	}
	out := make([]T, 0, len(vals))
	for _, val := range vals {
		doc, ok := val.DocumentOK()
		if !ok {
			return nil, false
		}
		out = append(out, one(doc))
	}
	return out, true
}

func readFailure(doc bson.Raw) (f Failure) {
	f.At, _ = doc.Lookup("at").TimeOK()
	f.Retries, _ = number(doc.Lookup("retries"))
	f.Msg, _ = doc.Lookup("msg").StringValueOK()
	f.Lost, _ = doc.Lookup("lost").BooleanOK()
	return f
}

func readHop(doc bson.Raw) (h Hop) {
	h.From, _ = doc.Lookup("from").StringValueOK()
	h.At, _ = doc.Lookup("at").TimeOK()
	return h
}

func readDead(v bson.RawValue) (*DeadInfo, bool) {
	doc, ok := v.DocumentOK()
	if !ok {
		return nil, false
	}
	var d DeadInfo
	d.From, ok = doc.Lookup("from").StringValueOK()
	d.At, _ = doc.Lookup("at").TimeOK()
	kind, _ := doc.Lookup("kind").StringValueOK()
	d.Kind = DeadKind(kind)
	d.Msg, _ = doc.Lookup("msg").StringValueOK()
	d.Was, _ = doc.Lookup("was").DocumentOK()
	return &d, ok
}

func readLast(v bson.RawValue) (lastVerb, bool) {
	doc, ok := v.DocumentOK()
	if !ok {
		return lastVerb{}, false
	}
	var l lastVerb
	l.lease, ok = doc.Lookup("lease").ObjectIDOK()
	l.verb, _ = doc.Lookup("verb").StringValueOK()
	return l, ok
}
