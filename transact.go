package mongoq

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
)

// transact runs steps in a transaction: what met a conflict again, and a commit whose answer was lost, as long as the
// context lasts. The driver's WithTransaction does that for two minutes, whatever the context says of the commit.
func (s *Store) transact(ctx context.Context, reads *readconcern.ReadConcern, steps func(context.Context) error) error {
	session, err := s.db.Client().StartSession()
	if err != nil {
		return err
	}
	done := s.noteTransaction(ctx, session)
	opts := options.Transaction().SetWriteConcern(s.lasts).SetReadConcern(reads).SetReadPreference(readpref.Primary())
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err = runTransaction(ctx, session, opts, steps)
		if !hasLabel(err, "TransientTransactionError") || sleep(ctx, pause) != nil {
			break
		}
	}
	if done(err) { // else it is not given back to the driver, which would use it again
		away, cancel := detached(ctx, claimTimeout)
		defer cancel()
		session.EndSession(away)
	}
	return err
}

func runTransaction(ctx context.Context, session *mongo.Session, opts *options.TransactionOptionsBuilder, steps func(context.Context) error) error {
	if err := session.StartTransaction(opts); err != nil {
		return err
	}
	if err := steps(mongo.NewSessionContext(ctx, session)); err != nil {
		away, cancel := detached(ctx, claimTimeout)
		defer cancel()
		_ = session.AbortTransaction(away) // the note, or the server, ends it
		return err
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := session.CommitTransaction(ctx)
		if err == nil || !hasLabel(err, "UnknownTransactionCommitResult") || sleep(ctx, pause) != nil {
			return err
		}
	}
}
