package mongoq

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// A process that is killed in the middle of a transaction leaves it open, and the server holds what it has written for a
// minute and a half: claims of those envelopes wait, and with them those behind. So a transaction of forks, or of commits
// into partitions, is noted in <Collection>.transactions while it runs, by its session, and whoever runs a stage that
// forks, or has a store with partitions, ends those that last too long.

const (
	// noteLasts is for how long a note holds: such a transaction takes milliseconds. Who lives renews it each renewEvery;
	// when it does not hold any more anybody may end the transaction. If its process was only held up, the driver then
	// begins it again.
	noteLasts  = 5 * time.Second
	renewEvery = time.Second
	// tendEvery is how often one looks for those that lasted too long.
	tendEvery = 2 * time.Second
)

// noteTransaction notes that a session has a transaction open, and gives what takes the note away, and ends the transaction
// if it may still be open: neither its commit nor its end may have come to the server. clean: the session may be used for
// something else; whoever finds a note that was left would end that. A note that fails costs the server's minute and a half,
// should this process be killed.
func (s *Store) noteTransaction(ctx context.Context, session *mongo.Session) (done func(error) (clean bool)) {
	id := session.ID()
	_, noted := s.noted.UpdateOne(ctx, bson.D{field("_id", id)}, set(field("until", later(noteLasts))), options.UpdateOne().SetUpsert(true))
	if noted != nil {
		s.log.Debug("mongoq: a transaction could not be noted", "error", noted)
	}
	over := make(chan struct{})
	renewing := make(chan struct{})
	go func() {
		defer close(renewing)
		s.renewNote(ctx, id, over)
	}()
	return func(err error) bool {
		close(over)
		<-renewing
		ctx, cancel := detached(ctx, claimTimeout)
		defer cancel()
		if err != nil && s.db.RunCommand(ctx, bson.D{field("killSessions", bson.A{id})}).Err() != nil {
			return false // somebody ends it by the note
		}
		_, err = s.noted.DeleteOne(ctx, bson.D{field("_id", id)})
		return err == nil && noted == nil // a note that seemed to fail may come yet
	}
}

// renewNote renews a note until the transaction is over.
func (s *Store) renewNote(ctx context.Context, id bson.Raw, over <-chan struct{}) {
	t := time.NewTicker(renewEvery)
	defer t.Stop()
	for {
		select {
		case <-over:
			return
		case <-t.C:
		}
		renewal, cancel := detached(ctx, renewEvery)
		_, err := s.noted.UpdateOne(renewal, bson.D{field("_id", id)}, set(field("until", later(noteLasts))))
		cancel()
		if err != nil {
			s.log.Debug("mongoq: the note of a transaction could not be renewed", "error", err)
		}
	}
}

// tendTransactions ends the transactions that killed processes left, until ctx ends.
func (s *Store) tendTransactions(ctx context.Context) {
	for {
		if err := s.endLeft(ctx); err != nil && ctx.Err() == nil {
			s.log.Debug("mongoq: transactions that were left open could not be ended; the server does so in time", "error", err)
		}
		if sleep(ctx, jittered(tendEvery)) != nil {
			return
		}
	}
}

// endLeft ends those whose notes hold no more.
func (s *Store) endLeft(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	cur, err := s.noted.Find(ctx, bson.D{field("$expr", op("$lt", bson.A{"$until", now}))})
	if err != nil {
		return err
	}
	var left []struct {
		ID    bson.Raw `bson:"_id"`
		Until time.Time
	}
	if err := cur.All(ctx, &left); err != nil || len(left) == 0 {
		return err
	}
	sessions := make(bson.A, len(left))
	for i, l := range left {
		sessions[i] = l.ID
	}
	if err := s.db.RunCommand(ctx, bson.D{field("killSessions", sessions)}).Err(); err != nil {
		return err
	}
	for _, l := range left {
		if _, err := s.noted.DeleteOne(ctx, bson.D{field("_id", l.ID), field("until", l.Until)}); err != nil {
			return err
		}
	}
	s.log.Info("mongoq: ended transactions that were left open, by a process that was killed", "sessions", len(left))
	return nil
}
