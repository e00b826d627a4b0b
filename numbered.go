package mongoq

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Inserts of many are commands that are put together here. The driver's InsertMany decodes each document to find its _id,
// and copies it field by field, which takes as long as the server takes to insert it. What goes by RunCommand the driver
// does not send again, so that this is done here, too: a write that comes again in the same session with the same number
// is done once, and answered as the first time.

// numbered is a session in which writes have numbers, each a higher one. The driver counts from 1 in its sessions: this one
// is never given back to it.
type numbered struct {
	session *mongo.Session
	last    int64
}

// numberings are the sessions that wait for their next write. One that got no answer is not used again: its write may be
// under way still.
type numberings struct {
	mu   sync.Mutex
	free []*numbered
}

func (s *Store) takeNumbered() (*numbered, error) {
	s.numberings.mu.Lock()
	defer s.numberings.mu.Unlock()
	if n := len(s.numberings.free); n > 0 {
		taken := s.numberings.free[n-1]
		s.numberings.free = s.numberings.free[:n-1]
		return taken, nil
	}
	session, err := s.db.Client().StartSession(options.Session().SetCausalConsistency(false))
	if err != nil {
		return nil, err
	}
	// The driver may have used it, for fewer writes than there are nanoseconds since 1970.
	return &numbered{session: session, last: time.Now().UnixNano()}, nil
}

func (s *Store) freeNumbered(n *numbered) {
	s.numberings.mu.Lock()
	defer s.numberings.mu.Unlock()
	s.numberings.free = append(s.numberings.free, n)
}

// endNumbered tells the server that the sessions are used no more; else it forgets them after half an hour.
func (s *Store) endNumbered(ctx context.Context) {
	s.numberings.mu.Lock()
	free := s.numberings.free
	s.numberings.free = nil
	s.numberings.mu.Unlock()
	if len(free) == 0 {
		return
	}
	var ids bson.A
	for _, n := range free {
		ids = append(ids, n.session.ID())
	}
	ctx, cancel := context.WithTimeout(ctx, claimTimeout)
	defer cancel()
	if err := s.db.RunCommand(ctx, bson.D{field("endSessions", ids)}).Err(); err != nil {
		s.log.Debug("mongoq: sessions could not be ended; the server does so in time", "error", err)
	}
}

// insertDocs inserts documents, each by itself, and sends them again until it is known what happened, or attempts are over.
// Where the server has no numbers they are sent once.
func (s *Store) insertDocs(ctx context.Context, docs []bson.Raw) error {
	if !s.transactions {
		return s.sendInsert(ctx, insertCommand(s.envs.Name(), docs, 0))
	}
	n, err := s.takeNumbered()
	if err != nil {
		return err
	}
	n.last++
	cmd := insertCommand(s.envs.Name(), docs, n.last)
	var lost error // an attempt that may have been done
	pause := 10 * time.Millisecond
	for i := 0; ; i++ {
		err = s.sendInsert(mongo.NewSessionContext(ctx, n.session), cmd)
		may := mayHaveHappened(err)
		if may {
			lost = err
			s.clock.distrust()
		}
		if !may && !worthRetrying(err) {
			s.freeNumbered(n)
			return withLost(lost, err)
		}
		// Who waits for somebody's transaction waits for nothing else by another attempt.
		if mongo.IsTimeout(err) || i+1 == attempts || sleep(ctx, pause) != nil {
			return withLost(lost, err)
		}
		pause *= 4
	}
}

// withLost is what insertDocs tells when an attempt may have been done: an answer that tells of each document is exact,
// while a refusal of the whole command says nothing of the attempts before.
func withLost(lost, err error) error {
	var we mongo.WriteException
	if err == nil || lost == nil || errors.As(err, &we) && we.WriteConcernError == nil {
		return err
	}
	return errors.Join(lost, err) // the first is asked for codes and labels
}

func (s *Store) sendInsert(ctx context.Context, cmd bson.Raw) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return s.db.RunCommand(ctx, cmd).Err()
}

// insertCommand is the command that inserts documents, unordered; number 0: without one.
func insertCommand(collection string, docs []bson.Raw, number int64) bson.Raw {
	size := 256 + len(collection)
	for _, doc := range docs {
		size += len(doc) + 8
	}
	d := newDocument(size).text("insert", collection).flag("ordered", false).value("writeConcern", majority)
	if number > 0 {
		d = d.long("txnNumber", number)
	}
	return d.array("documents", docs).end()
}

// majority is the write concern of what must last, as a command has it.
var majority = embedded(newDocument(32).text("w", "majority").flag("j", true).end())

func embedded(doc bson.Raw) bson.RawValue {
	return bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: doc}
}
