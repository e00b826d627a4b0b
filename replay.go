package mongoq

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
)

const (
	// MaxReplayID is the most bytes that the id of a replay may have.
	MaxReplayID = 255

	// replayBatch and replayBatchBytes are how many envelopes, and how many bytes of them, a replay holds at once.
	replayBatch      = pushBatch
	replayBatchBytes = pushBatchBytes / 2
)

// ReplayOption is an option of History.ReplayMany.
type ReplayOption interface{ applyReplay(*replaySettings) error }

type replaySettings struct {
	selection
	to       *Queue       // nil: the queue that each was done in
	push     []PushOption // for each
	progress func(Progress)
}

// Progress tells how far a call has come that works in batches.
type Progress struct {
	Done int64 // envelopes so far
}

// Replay pushes a committed envelope's payload and headers into its queue again, as a new envelope, whose ReplayOf names
// the finished one, and gives its id. The finished one is not touched. Options are those of Push. Each call is another
// envelope, unless ID says which; see also ReplayMany. ErrNotFound: the history has no such envelope.
func (h *History) Replay(ctx context.Context, id bson.ObjectID, opts ...PushOption) (bson.ObjectID, error) {
	if err := h.s.open(); err != nil {
		return bson.NilObjectID, err
	}
	as := bson.D{field("processed", op("$type", "date"))}
	if h.q != nil {
		as = append(as, field("q", h.q.name))
	}
	e, err := h.s.find(ctx, id, as)
	if err != nil {
		return bson.NilObjectID, err
	}
	own := []PushOption{Headers(e.Headers), Priority(e.Priority)}
	return h.queue(e.Q).Push(ctx, e.Payload, append(append(own, opts...), replayOf{of: id})...)
}

// ReplayMany pushes again what is chosen of the history, with its payloads, headers and priorities, into the queues that
// it was done in, or To another, and says how many are there now. The new envelopes name their originals (ReplayOf,
// ReplayID); the finished ones are not touched. It begins with the latest, and takes only what was committed before it
// began.
//
// replayID makes it repeatable: the new ids follow from it and from the originals' ids. Repeated with the same replayID,
// after an error, a kill or by accident, it pushes what is missing, and nothing twice, for as long as the new envelopes
// are in the store: live, dead or in a history. A queue without Retention forgets what it has done, and a repeated
// replay would push that anew.
//
// Without options it is all of the history. Options: Since, Until, IDs, Header, WithOutcome, Limit, To, Delay, At,
// Priority, TTL, OnProgress. It works in batches, and never joins a transaction. When it fails, as many as it says are
// there, or more.
//
// Errors: ErrInvalidOption; ErrDuplicate when the same replayID has pushed another envelope for one of the originals, To
// another queue or with another Priority; ErrOutcomeUnknown when an answer was lost: repeat it.
// The rule: replayID is 1 to 255 bytes of UTF-8.
func (h *History) ReplayMany(ctx context.Context, replayID string, opts ...ReplayOption) (int64, error) {
	if replayID == "" || len(replayID) > MaxReplayID || !utf8.ValidString(replayID) {
		return 0, invalid("the id of a replay must have 1 to %d bytes of UTF-8, got %.300q", MaxReplayID, replayID)
	}
	var set replaySettings
	for _, o := range opts {
		if err := o.applyReplay(&set); err != nil {
			return 0, err
		}
	}
	if err := set.check(); err != nil {
		return 0, err
	}
	if set.to != nil && set.to.s != h.s {
		return 0, invalid("To must be a queue of the history's store, got %q of another", set.to.name)
	}
	if err := h.s.open(); err != nil {
		return 0, err
	}
	ctx = outside(ctx)
	state, err := h.s.clock.hello(ctx)
	if err != nil {
		return 0, err
	}
	query := historyQuery{selection: set.selection}
	if h.q != nil {
		query.q = h.q.name
	}
	began := state.localTime.Add(time.Millisecond)
	if query.until.IsZero() || query.until.After(began) { // what is replayed ends in the history, too
		query.until = began
	}
	run := replayRun{s: h.s, id: replayID, set: set, total: set.limit}
	for e, err := range h.s.finished(ctx, query, 0) {
		if err != nil {
			return run.done, err
		}
		if e.ReplayID == replayID {
			continue // it came of this replay
		}
		if err := run.add(ctx, h, e); err != nil {
			return run.done, err
		}
		if run.full() {
			break
		}
	}
	return run.done, run.flush(ctx)
}

// replayRun is a replay under way.
type replayRun struct {
	s     *Store
	id    string
	set   replaySettings
	total int // how many at the most; 0: all
	taken int
	done  int64

	clock stamp
	to    []*Queue // of each parcel
	batch []*parcel
	of    []bson.ObjectID
	bytes int
}

func (r *replayRun) full() bool { return r.total > 0 && r.taken == r.total }

// add puts an envelope to the batch, and sends that when it is full.
func (r *replayRun) add(ctx context.Context, h *History, e *Envelope) error {
	if len(r.batch) == 0 {
		clock, err := r.s.stamp(ctx)
		if err != nil {
			return err
		}
		r.clock = clock
	}
	to := r.set.to
	if to == nil {
		to = h.queue(e.Q)
	}
	opts := append([]PushOption{Headers(e.Headers), Priority(e.Priority)}, r.set.push...)
	p, err := to.parcel(e.Payload, append(opts, ID(replayedID(r.id, e.ID)), replayOf{of: e.ID, by: r.id}), r.clock)
	if err != nil {
		return fmt.Errorf("mongoq: cannot replay %s: %w", e.ID.Hex(), err)
	}
	r.to, r.batch, r.of = append(r.to, to), append(r.batch, p), append(r.of, e.ID)
	r.taken++
	if r.bytes += len(p.doc); len(r.batch) == replayBatch || r.bytes >= replayBatchBytes {
		return r.flush(ctx)
	}
	return nil
}

// flush pushes the batch: of those that are there already it only makes sure that they are the same.
func (r *replayRun) flush(ctx context.Context) error {
	if len(r.batch) == 0 {
		return nil
	}
	errs := make([]error, len(r.batch))
	which := make([]int, len(r.batch))
	for i := range which {
		which[i] = i
	}
	there, err := r.s.pushed(ctx, r.batch, which)
	if err != nil {
		return err
	}
	var missing []*parcel
	var places []int
	for i, p := range r.batch {
		if raw, ok := there[p.id]; ok {
			errs[i] = p.compare(raw)
			continue
		}
		missing, places = append(missing, p), append(places, i)
	}
	sent := make([]error, len(missing))
	r.s.insertMany(ctx, missing, sent, func(batch []int) {
		of := map[*Queue][]int{}
		for _, k := range batch {
			q := r.to[places[k]]
			of[q] = append(of[q], k)
		}
		for q, some := range of {
			q.tell(missing, some, sent, r.clock)
		}
	})
	for k, i := range places {
		errs[i] = sent[k]
	}
	var failed error
	for i, err := range errs {
		switch {
		case err == nil:
			r.done++
		case failed == nil:
			failed = fmt.Errorf("mongoq: cannot replay %s: %w", r.of[i].Hex(), err)
		}
	}
	r.to, r.batch, r.of, r.bytes = nil, nil, nil, 0
	if failed == nil && r.set.progress != nil {
		r.set.progress(Progress{Done: r.done})
	}
	return failed
}

// replayedID is the id of the envelope that a replay pushes for an original.
func replayedID(replay string, original bson.ObjectID) bson.ObjectID {
	sum := sha256.Sum256(slices.Concat([]byte("replay"), original[:], []byte(replay)))
	return bson.ObjectID(sum[:12])
}

// replayOf is an option of a push: the envelope is a replay.
type replayOf struct {
	of bson.ObjectID
	by string
}

func (o replayOf) applyPush(s *pushSettings) (err error) {
	doc := bson.D{field("id", o.of)}
	if o.by != "" {
		doc = append(doc, field("by", o.by))
	}
	v, err := encode("the original", doc)
	s.replayOf = &v
	return err
}

// readReplay reads of what an envelope is a replay.
func (s *stored) readReplay(v bson.RawValue) bool {
	doc, ok := v.DocumentOK()
	if !ok {
		return false
	}
	s.ReplayOf, ok = doc.Lookup("id").ObjectIDOK()
	s.ReplayID, _ = doc.Lookup("by").StringValueOK()
	return ok
}

type toOption struct{ q *Queue }

// To says into which queue, in place of the one that each envelope was done, or died, in. What is replayed is pushed as
// that handle pushes, with its Delay and TTL. The rule: q is a queue of the same store.
func To(q *Queue) interface {
	ReplayOption
	RedriveOption
} {
	return toOption{q}
}

func (o toOption) check() error {
	if o.q == nil {
		return invalid("To must be a queue, got nil")
	}
	return nil
}

func (o toOption) applyReplay(s *replaySettings) error {
	s.to = o.q
	return o.check()
}

type progressOption func(Progress)

// OnProgress is called after each batch. The rule: f is not nil.
func OnProgress(f func(Progress)) interface {
	ReplayOption
	RedriveOption
	PurgeOption
	RetentionOption
} {
	return progressOption(f)
}

func (o progressOption) check() error {
	if o == nil {
		return invalid("OnProgress must be a function, got nil")
	}
	return nil
}

func (o progressOption) applyReplay(s *replaySettings) error {
	s.progress = o
	return o.check()
}

// with keeps an option of the pushes.
func (s *replaySettings) with(o PushOption) error {
	s.push = append(s.push, o)
	return o.applyPush(&pushSettings{})
}

func (o delayOption) applyReplay(s *replaySettings) error    { return s.with(o) }
func (o atOption) applyReplay(s *replaySettings) error       { return s.with(o) }
func (o priorityOption) applyReplay(s *replaySettings) error { return s.with(o) }
func (o ttlOption) applyReplay(s *replaySettings) error      { return s.with(o) }
