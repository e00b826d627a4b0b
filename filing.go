package mongoq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
)

// How what is finished comes into its partition.
//
// Commits that go in a round are filed by one transaction: the envelopes leave the queues and are in their partitions at
// one moment. A commit that goes by itself, or in the caller's transaction, and every one on a server without
// transactions, finishes the envelope where it is, as without partitions; it is filed behind that. Either way the
// envelope is in the history from its commit on, in one place or the other, and lists read both. What a killed process
// has not filed the keeper files.

const (
	// filingBytes is how much one transaction files.
	filingBytes = 12 << 20
	// filingFlights is how many rounds of what is filed behind its commit are under way at once.
	filingFlights = 1
	// commitSize is what the fields of a commit take, in bytes, at the most.
	commitSize = 64
)

// finished names an envelope that is to be filed.
type finished struct {
	id   bson.ObjectID
	size int
}

// filing takes finished envelopes out of a collection and puts each into its partition.
type filing struct {
	from   *mongo.Collection
	stages bson.A // reads them, as they are to be stored but for what finish adds
	finish func(raw bson.Raw) (doc bson.Raw, to partition, ok bool)
	leave  func(ids []bson.ObjectID) bson.A // the filters of the statements that delete them
	anew   bool                             // one may be in its partition already
}

// filedBatch is what goes into one partition.
type filedBatch struct {
	partition
	docs bson.A
}

var errNotMade = errors.New("a partition is not there yet")

// file files what it finds, and says what that was: all or nothing. Without transactions what fails may be in both places;
// it is listed once, and may be filed again.
func (s *Store) file(ctx context.Context, f filing) ([]bson.ObjectID, error) {
	for range attempts {
		ids, missing, err := s.fileOnce(ctx, f, s.transactions)
		if f.anew && hasCode(err, codeDuplicateKey) {
			ids, missing, err = s.fileOnce(ctx, f, false)
		}
		if !errors.Is(err, errNotMade) {
			return ids, err
		}
		for _, p := range missing {
			if err := s.ensurePartition(ctx, p); err != nil {
				return nil, err
			}
		}
	}
	return nil, errNotMade
}

// fileOnce gives errNotMade with the partitions that have to be made first.
func (s *Store) fileOnce(ctx context.Context, f filing, atOnce bool) (ids []bson.ObjectID, missing []partition, err error) {
	steps := func(ctx context.Context) (err error) {
		var batches []*filedBatch
		if ids, batches, err = s.readFiling(ctx, f); err != nil || len(ids) == 0 {
			return err
		}
		if missing = s.unmade(batches); len(missing) > 0 {
			return errNotMade
		}
		for _, b := range batches {
			if err := s.insertFiled(ctx, b); err != nil {
				return err
			}
		}
		return s.deleteFiled(ctx, f, ids)
	}
	if !atOnce {
		err := steps(ctx)
		return ids, missing, err
	}
	err = s.transact(ctx, readconcern.Snapshot(), steps)
	return ids, missing, err
}

// readFiling reads what is to be filed, as it is to be stored.
func (s *Store) readFiling(ctx context.Context, f filing) (ids []bson.ObjectID, batches []*filedBatch, err error) {
	cur, err := f.from.Aggregate(ctx, f.stages, options.Aggregate().SetBatchSize(settleRound+1)) // one more: or the server keeps the cursor open
	if err != nil {
		return nil, nil, err
	}
	defer closeCursor(ctx, cur)
	byName := map[string]*filedBatch{}
	for cur.Next(ctx) {
		id, ok := cur.Current.Lookup("_id").ObjectIDOK()
		if !ok {
			continue
		}
		doc, to, ok := f.finish(cur.Current)
		if !ok {
			continue
		}
		b := byName[to.name]
		if b == nil {
			b = &filedBatch{partition: to}
			byName[to.name] = b
			batches = append(batches, b)
		}
		b.docs = append(b.docs, doc)
		ids = append(ids, id)
	}
	return ids, batches, cur.Err()
}

// unmade are those partitions that this process does not know to stand.
func (s *Store) unmade(batches []*filedBatch) (missing []partition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range batches {
		if !s.known[b.name] {
			missing = append(missing, b.partition)
		}
	}
	return missing
}

// insertFiled stores envelopes in their partition. Outside of a transaction one that is there already stays as it is: it was
// filed before, and not deleted.
func (s *Store) insertFiled(ctx context.Context, b *filedBatch) error {
	if inSession(ctx) {
		// By a command of our own: the driver would decode and copy each document that has its _id.
		return s.db.RunCommand(ctx, bson.D{field("insert", b.name), field("documents", b.docs)}).Err()
	}
	_, err := s.collectionOf(b.partition, false).InsertMany(ctx, b.docs, options.InsertMany().SetOrdered(false))
	var be mongo.BulkWriteException
	if errors.As(err, &be) && be.WriteConcernError == nil &&
		!slices.ContainsFunc(be.WriteErrors, func(we mongo.BulkWriteError) bool { return !we.HasErrorCode(codeDuplicateKey) }) {
		return nil
	}
	return err
}

// deleteFiled deletes what has been stored in its partition.
func (s *Store) deleteFiled(ctx context.Context, f filing, ids []bson.ObjectID) error {
	var models []mongo.WriteModel
	for _, filter := range f.leave(ids) {
		models = append(models, mongo.NewDeleteManyModel().SetFilter(filter))
	}
	res, err := f.from.BulkWrite(ctx, models)
	if err == nil && inSession(ctx) && res.DeletedCount != int64(len(ids)) {
		return fmt.Errorf("%w: %d of %d", errNotAll, res.DeletedCount, len(ids))
	}
	return err
}

// settleFilings commits many into their partitions. What comes to nothing is sent singly, into the history where it is.
func (s *Store) settleFilings(ctx context.Context, calls []*call[*settlement]) {
	for len(calls) > 0 {
		n, bytes := 0, 0
		for n < len(calls) && (n == 0 || bytes+calls[n].item.finished().size <= filingBytes) {
			bytes += calls[n].item.finished().size
			n++
		}
		s.fileCommits(ctx, calls[:n])
		calls = calls[n:]
	}
}

// fileCommits sends a round that has failed once more, as other rounds of verbs are.
func (s *Store) fileCommits(ctx context.Context, calls []*call[*settlement]) {
	filed, cause := s.fileRound(ctx, roundTimeout, calls)
	if cause != nil {
		var err error
		if filed, err = s.fileRound(ctx, againTimeout, calls); err != nil {
			retrySingly(calls)
			return
		}
	}
	var rest []*call[*settlement]
	for _, c := range calls {
		if filed[c.item.r.ID] == c.item { // and not another reservation of it in the same round
			c.tell(nil)
		} else {
			rest = append(rest, c)
		}
	}
	if cause == nil || len(rest) == 0 {
		for _, c := range rest {
			singly(c) // somebody else has it
		}
		return
	}
	found, err := s.foundMany(ctx, idsOf(rest), evidenceFields, true)
	if err != nil {
		retrySingly(rest)
		return
	}
	s.judge(ctx, rest, found, cause)
}

// fileRound files what is committed, in one transaction, and gives the commits that it was done for.
func (s *Store) fileRound(ctx context.Context, limit time.Duration, calls []*call[*settlement]) (map[bson.ObjectID]*settlement, error) {
	byID := make(map[bson.ObjectID]*settlement, len(calls))
	for _, c := range calls {
		c.item.sends()
		byID[c.item.r.ID] = c.item
		c.item.r.keepOff.Add(1)
		defer c.item.r.keepOff.Add(-1)
	}
	round, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	filed, err := s.file(round, filing{
		from: s.envs,
		stages: bson.A{
			op("$match", bson.D{field("_id", op("$in", idsOf(calls))), field("$or", guardsOf(slices.Collect(maps.Values(byID))))}),
			op("$unset", bson.A{"expireAt", "result"}),
			op("$set", bson.D{field("processed", now)}),
		},
		finish: func(raw bson.Raw) (bson.Raw, partition, bool) {
			at, ok := raw.Lookup("processed").TimeOK()
			v := byID[raw.Lookup("_id").ObjectID()]
			if !ok || v == nil {
				return nil, partition{}, false
			}
			return v.filed(raw, at), s.partitionOf(at, v.keep.time), true
		},
		leave: func(ids []bson.ObjectID) bson.A {
			vs := make([]*settlement, len(ids))
			for i, id := range ids {
				vs[i] = byID[id]
			}
			return guardsOf(vs)
		},
	})
	done := make(map[bson.ObjectID]*settlement, len(filed))
	for _, id := range filed {
		done[id] = byID[id]
	}
	return done, err
}

// files tells a commit into a partitioned history.
func (v *settlement) files() bool {
	return v.verb == verbCommit && v.update != nil && v.r.s.partitioning != PartitionNone
}

func (v *settlement) finished() finished {
	size := v.r.size + commitSize
	if v.result != nil {
		size += len(v.result.Value)
	}
	return finished{v.r.ID, size}
}

// filed is the finished envelope as its partition keeps it.
func (v *settlement) filed(raw bson.Raw, at time.Time) bson.Raw {
	doc := resumed(raw, v.finished().size-len(raw)+commitSize)
	if v.keep.time != KeepForever {
		doc = doc.date("expireAt", at.Add(v.keep.time))
	}
	if v.result != nil {
		doc = doc.value("result", *v.result)
	}
	return doc.end()
}

// fileBehind files what has been finished where it was, while its holder goes on.
func (s *Store) fileBehind(f finished) {
	if len(s.filings.places) == cap(s.filings.places) || !s.begin() {
		return // the keeper does it
	}
	go func() {
		defer s.wg.Done()
		_, err := s.filings.do(context.Background(), f, nil)
		s.noteUnfiled(err)
	}()
}

func (s *Store) noteUnfiled(err error) {
	if err != nil {
		s.log.Debug("mongoq: what is finished could not be put into its partition; the keeper does it", "error", err)
	}
}

func (s *Store) filingRound(calls []*call[finished]) {
	ctx, cancel := context.WithTimeout(context.Background(), attemptTimeout)
	defer cancel()
	answer(calls, s.fileFinished(ctx, items(calls)))
}

// fileFinished files those that are finished and still among the queues.
func (s *Store) fileFinished(ctx context.Context, all []finished) error {
	return filingRounds(all, func(ids []bson.ObjectID) error {
		_, err := s.file(ctx, filing{
			from:   s.envs,
			stages: bson.A{op("$match", finishedFilter(ids))},
			finish: func(raw bson.Raw) (bson.Raw, partition, bool) {
				e := read(raw)
				keep, ok := e.kept()
				return slices.Clone(raw), s.partitionOf(e.Processed, keep), ok
			},
			leave: func(ids []bson.ObjectID) bson.A { return bson.A{finishedFilter(ids)} },
			anew:  true,
		})
		return err
	})
}

// filingRounds cuts what is to be filed into rounds that are not too large.
func filingRounds(all []finished, round func(ids []bson.ObjectID) error) error {
	for len(all) > 0 {
		var ids []bson.ObjectID
		bytes := 0
		for len(ids) < len(all) && len(ids) < settleRound && (len(ids) == 0 || bytes+all[len(ids)].size <= filingBytes) {
			bytes += all[len(ids)].size
			ids = append(ids, all[len(ids)].id)
		}
		if err := round(ids); err != nil {
			return err
		}
		all = all[len(ids):]
	}
	return nil
}

// fileAll files what a question to the history finds among the queues.
func (s *Store) fileAll(ctx context.Context, query historyQuery) error {
	for ids, err := range s.batches(ctx, s.among(), query, query.limit) {
		if err != nil {
			return err
		}
		all, err := s.sized(ctx, s.envs, ids)
		if err != nil {
			return err
		}
		if err := s.fileFinished(ctx, all); err != nil {
			return err
		}
	}
	return nil
}

// sized reads how large envelopes are.
func (s *Store) sized(ctx context.Context, coll *mongo.Collection, ids []bson.ObjectID) ([]finished, error) {
	cur, err := coll.Find(ctx, bson.D{field("_id", op("$in", ids))}, options.Find().
		SetProjection(bson.D{field("size", op("$bsonSize", "$$ROOT"))}).SetBatchSize(sweepBatch+1))
	if err != nil {
		return nil, err
	}
	defer closeCursor(ctx, cur)
	var all []finished
	for cur.Next(ctx) {
		size, _ := number(cur.Current.Lookup("size"))
		if id, ok := cur.Current.Lookup("_id").ObjectIDOK(); ok {
			all = append(all, finished{id, size})
		}
	}
	return all, cur.Err()
}

// refile puts finished envelopes of one partition into that which keeps them for so long, and says how many.
func (s *Store) refile(ctx context.Context, p partition, ids []bson.ObjectID, keep time.Duration) (total int64, err error) {
	from, to := s.collectionOf(p, false), s.keeping(p, keep)
	all, err := s.sized(ctx, from, ids)
	if err != nil {
		return 0, err
	}
	err = filingRounds(all, func(ids []bson.ObjectID) error {
		those := func(ids []bson.ObjectID) bson.D { return bson.D{field("_id", op("$in", ids))} }
		moved, err := s.file(ctx, filing{
			from:   from,
			stages: bson.A{op("$match", those(ids)), op("$unset", "expireAt")},
			finish: func(raw bson.Raw) (bson.Raw, partition, bool) {
				at, ok := raw.Lookup("processed").TimeOK()
				doc := resumed(raw, commitSize)
				if keep != KeepForever {
					doc = doc.date("expireAt", at.Add(keep))
				}
				return doc.end(), to, ok
			},
			leave: func(ids []bson.ObjectID) bson.A { return bson.A{those(ids)} },
			anew:  true,
		})
		total += int64(len(moved))
		return err
	})
	return total, err
}

// kept is for how long a finished envelope is kept; false: it cannot be told, of one written by hand.
func (s *stored) kept() (time.Duration, bool) {
	odd := slices.ContainsFunc(s.bad, func(el bson.RawElement) bool { return el.Key() == "processed" || el.Key() == "expireAt" })
	switch {
	case odd || s.Processed.IsZero():
		return 0, false
	case s.ExpireAt.IsZero():
		return KeepForever, true
	}
	return max(s.ExpireAt.Sub(s.Processed), 0), true
}
