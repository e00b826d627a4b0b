package mongoq

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// behindAfter is how late the server may be before its forgetting counts as behind: it passes once a minute.
const behindAfter = 5 * time.Minute

// Forgetting tells how far the forgetting of what is finished has come.
type Forgetting struct {
	// Lag is for how long the oldest that may be forgotten has been waiting for it: of the history without partitions, of
	// expired envelopes of a queue with Discard, and of dead letters with a DeadRetention. The server passes once a minute;
	// a lag of more means that it does not keep up, or that its TTL monitor is off. 0: nothing waits.
	Lag time.Duration
	// Overdue is the same of the partitions. They are dropped ten minutes after they are over, at the next look of the
	// process that does it.
	Overdue time.Duration
	// Undated counts the finished envelopes whose expireAt is no date, which only somebody by hand can have given them: they
	// are never forgotten. -1: they were not counted.
	Undated int64

	// TTLPasses and TTLDeleted are what the server's TTL monitor has done since the server started, for all its databases;
	// -1 when the server does not tell, which takes the privilege for serverStatus.
	TTLPasses, TTLDeleted int64

	Dropped    int64           // partitions that were dropped so far
	Forgotten  int64           // envelopes in them
	Partitions []PartitionInfo // those that stand, the latest first
}

// PartitionInfo is a partition of the history.
type PartitionInfo struct {
	Collection string
	From, To   time.Time // it holds what was committed since From, and before To
	Until      time.Time // it may be dropped then; zero: never
	Envelopes  int64     // by the server's count, which a crash may leave wrong
}

// Behind is true when forgetting does not keep up: something has been waiting for it for more than five minutes.
func (f *Forgetting) Behind() bool { return f.Lag > behindAfter || f.Overdue > behindAfter }

// Forgetting tells how far the forgetting of what is finished has come. It reads an index key for the lag, and the whole
// history that is not in partitions to count what can never be forgotten: about a second for each million.
func (s *Store) Forgetting(ctx context.Context) (*Forgetting, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	return s.forgetting(outside(ctx), true)
}

func (s *Store) forgetting(ctx context.Context, countOdd bool) (*Forgetting, error) {
	hello, err := s.clock.hello(ctx)
	if err != nil {
		return nil, err
	}
	f := &Forgetting{Undated: -1, TTLPasses: -1, TTLDeleted: -1}
	if f.Lag, err = s.lag(ctx, hello.localTime); err != nil {
		return nil, err
	}
	if countOdd {
		if f.Undated, err = s.countUndated(ctx); err != nil {
			return nil, err
		}
	}
	raw, err := s.db.RunCommand(ctx, bson.D{field("serverStatus", 1), field("repl", 0), field("locks", 0), field("wiredTiger", 0), field("tcmalloc", 0)}).Raw()
	switch {
	case err == nil:
		f.TTLPasses, _ = raw.Lookup("metrics", "ttl", "passes").AsInt64OK()
		f.TTLDeleted, _ = raw.Lookup("metrics", "ttl", "deletedDocuments").AsInt64OK()
	case !hasCode(err, codeUnauthorized):
		return nil, err
	}
	var state keeperState
	err = s.queues.FindOne(ctx, bson.D{field("_id", keeperID)}).Decode(&state)
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return nil, err
	}
	f.Dropped, f.Forgotten = state.Dropped, state.Forgotten
	ps, err := s.partitions(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range ps {
		n, err := s.collectionOf(p, false).EstimatedDocumentCount(ctx)
		if err != nil {
			return nil, err
		}
		f.Partitions = append(f.Partitions, PartitionInfo{p.name, p.from, p.to, p.until, n})
		if p.over(hello.localTime) {
			f.Overdue = max(f.Overdue, hello.localTime.Sub(p.until.Add(dropAfter)))
		}
	}
	return f, nil
}

// lag reads the oldest key of the TTL index.
func (s *Store) lag(ctx context.Context, at time.Time) (time.Duration, error) {
	raw, err := s.envs.FindOne(ctx, bson.D{field("expireAt", append(op("$type", "date"), field("$lt", at)))},
		options.FindOne().SetSort(ttlIndex.keys).SetHint(s.ttl).SetProjection(bson.D{field("_id", 0), field("expireAt", 1)})).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	oldest, _ := raw.Lookup("expireAt").TimeOK()
	return at.Sub(oldest), nil
}

func (s *Store) countUndated(ctx context.Context) (int64, error) {
	return s.envs.CountDocuments(ctx, bson.D{
		field("q", op("$gt", "")), field("processed", op("$type", "date")),
		field("expireAt", append(op("$exists", true), field("$not", op("$type", "date")))),
	}, options.Count().SetHint(s.history))
}

// watch follows the forgetting from look to look, in the process that keeps the store.
type watch struct {
	s       *Store
	counted time.Time // when what can never be forgotten was last counted
	undated int64
	warned  time.Duration // how far it was behind when that was last said; 0: it was not
}

// count counts what can never be forgotten, unless that takes too long.
func (w *watch) count(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, countOddFor)
	defer cancel()
	n, err := w.s.countUndated(ctx)
	if err != nil {
		n = -1
	}
	if n > max(w.undated, 0) {
		w.s.log.Warn("mongoq: finished envelopes have an expireAt that is no date: they are never forgotten", "envelopes", n)
	}
	w.undated = n
}

func (w *watch) look(ctx context.Context) error {
	f, err := w.s.forgetting(ctx, false)
	if err != nil {
		return err
	}
	if w.counted.IsZero() || time.Since(w.counted) >= countOddEvery {
		w.counted = time.Now()
		w.count(ctx)
	}
	f.Undated = w.undated
	switch late := max(f.Lag, f.Overdue); {
	case f.Behind() && late >= 2*w.warned:
		w.warned = late
		w.s.log.Warn("mongoq: forgetting what is finished has fallen behind", "lag", f.Lag, "overdue", f.Overdue)
	case !f.Behind() && w.warned > 0:
		w.warned = 0
		w.s.log.Info("mongoq: forgetting what is finished has caught up", "lag", f.Lag, "overdue", f.Overdue)
	}
	if w.s.onForgetting != nil {
		w.s.onForgetting(*f)
	}
	return nil
}
