package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// operatorsVerbs are the writes of those who look after queues. The library sends none of them again: whoever is told that
// the outcome is unknown may repeat it.
var operatorsVerbs = []transition{
	{name: "remove", command: "delete", prepare: func(t testing.TB, s *stage) *trial {
		q := s.queue(t)
		id := push(t, q, "x")
		return &trial{again: true, call: func(ctx context.Context) []error {
			err := q.Remove(ctx, id)
			if errors.Is(err, mongoq.ErrNotFound) && storedNow(t, s.db, id) == nil {
				err = nil // of a second call
			}
			return []error{err}
		}, effect: func(t testing.TB) []bool { return []bool{storedNow(t, s.db, id) == nil} }}
	}},
	operating("purge", "delete", func(ctx context.Context, q *mongoq.Queue) error {
		_, err := q.Purge(ctx)
		return err
	}, waitingOnes, func(doc bson.Raw) bool { return doc == nil }),
	operating("purge of dead letters", "delete", func(ctx context.Context, q *mongoq.Queue) error {
		_, err := q.DeadLetters().Purge(ctx)
		return err
	}, deadOnes, func(doc bson.Raw) bool { return doc == nil }),
	operating("redrive", "update", func(ctx context.Context, q *mongoq.Queue) error {
		_, err := q.DeadLetters().Redrive(ctx)
		return err
	}, deadOnes, isRedriven),
	operating("redrive that rewrites", "update", func(ctx context.Context, q *mongoq.Queue) error {
		_, err := q.DeadLetters().Redrive(ctx, mongoq.Rewrite(func(*mongoq.Envelope) (any, error) { return "mended", nil }))
		return err
	}, deadOnes, func(doc bson.Raw) bool { return isRedriven(doc) && doc.Lookup("payload").StringValue() == "mended" }),
	operating("set retention", "update", func(ctx context.Context, q *mongoq.Queue) error {
		_, err := q.History().SetRetention(ctx, mongoq.KeepForever)
		return err
	}, doneOnes, func(doc bson.Raw) bool { return has(doc, "processed") && !has(doc, "expireAt") }),
	replaying("replay of many", func(ctx context.Context, q *mongoq.Queue) error {
		_, err := q.History().ReplayMany(ctx, "again")
		return err
	}),
	pausing("pause", true),
	pausing("resume", false),
}

func isRedriven(doc bson.Raw) bool {
	return !has(doc, "dead") && numberOf(doc, "retries") == 0 && numberOf(doc, "moves") == 2
}

func waitingOnes(t testing.TB, s *stage, q *mongoq.Queue) []bson.ObjectID {
	t.Helper()
	ids, err := q.PushMany(t.Context(), ints(3))
	require.NoError(t, err)
	return ids
}

func deadOnes(t testing.TB, s *stage, q *mongoq.Queue) (ids []bson.ObjectID) {
	t.Helper()
	for _, r := range reserveAll(t, q, 3) {
		require.NoError(t, r.DeadLetter(t.Context(), errFailed))
		ids = append(ids, r.ID)
	}
	return ids
}

func doneOnes(t testing.TB, s *stage, q *mongoq.Queue) (ids []bson.ObjectID) {
	t.Helper()
	rs := reserveAll(t, q, 3)
	for _, r := range rs {
		ids = append(ids, r.ID)
	}
	require.NoError(t, q.CommitMany(t.Context(), rs))
	return ids
}

// operating is one of them about several envelopes. happened looks at each.
func operating(name, command string, verb func(context.Context, *mongoq.Queue) error,
	some func(testing.TB, *stage, *mongoq.Queue) []bson.ObjectID, happened func(bson.Raw) bool,
) transition {
	return transition{name: name, command: command, prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t, mongoq.QueueConfig{Retention: time.Hour})
		ids := some(t, s, q)
		var before []bson.Raw
		for _, id := range ids {
			before = append(before, storedBytes(t, s.db, id))
		}
		return &trial{
			call: func(ctx context.Context) []error { return singly(verb(ctx, q), len(ids)) },
			effect: func(t testing.TB) (done []bool) {
				for i, id := range ids {
					done = append(done, changed(t, before[i], storedNow(t, s.db, id), happened))
				}
				return done
			},
			again: true,
		}
	}}
}

// replaying is a replay, whose effect is in other envelopes than it is about.
func replaying(name string, verb func(context.Context, *mongoq.Queue) error) transition {
	return transition{name: name, command: "insert", prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t, mongoq.QueueConfig{Retention: time.Hour})
		_, ids := someHistory(t, s.db, q.Name(), 3) // nobody rings for that, by an insert of its own
		return &trial{
			call: func(ctx context.Context) []error { return singly(verb(ctx, q), len(ids)) },
			effect: func(t testing.TB) (done []bool) {
				for _, id := range ids {
					n, err := s.db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "replayOf.id", Value: id}})
					require.NoError(t, err)
					require.LessOrEqual(t, n, int64(1), "it happened more than once")
					done = append(done, n == 1)
				}
				return done
			},
			again: true,
		}
	}}
}

func pausing(name string, pause bool) transition {
	return transition{name: name, command: "update", harmless: true, prepare: func(t testing.TB, s *stage) *trial {
		t.Helper()
		q := s.queue(t)
		set := func(ctx context.Context, to bool) error {
			if to {
				return q.Pause(ctx)
			}
			return q.Resume(ctx)
		}
		require.NoError(t, set(t.Context(), !pause))
		return &trial{
			call: func(ctx context.Context) []error { return []error{set(ctx, pause)} },
			effect: func(t testing.TB) []bool {
				n, err := s.db.Collection("mongoq.queues").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: q.Name()}, {Key: "paused", Value: pause}})
				require.NoError(t, err)
				return []bool{n == 1}
			},
			again: true,
		}
	}}
}

// onStore is the fail point for a verb, that of a pause on the collection that it writes.
func (f fault) onStore(db *mongo.Database, tr transition) bson.D {
	data := f.on(db, tr.command)
	if tr.name == "pause" || tr.name == "resume" {
		data[1].Value = db.Name() + ".mongoq.queues"
	}
	return data
}

// What an operator is told of agrees with what is stored, whatever befalls the write; and repeating it does it, once.
func TestAFaultOnAnOperatorsVerb(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		stages := []*stage{faultyStage(t, kind, true)}
		for range len(operatorsVerbs) - 1 {
			stages = append(stages, stages[0].beside(t, true))
		}
		for _, f := range []fault{
			failing(codeUnauthorized).asRefusal(), failing(codeNotPrimary).asElsewhere(), failing(codeShuttingDown),
			unacknowledged(codeWCFailed), closedConnection,
		} {
			var row []*underway
			for i, s := range stages {
				tr := operatorsVerbs[i]
				trial := tr.prepare(t, s)
				drain(s.met)
				heal := mongotest.Fail(t, s.db, mongotest.Times(1), f.onStore(s.db, tr))
				row = append(row, start(t, s, tr, trial, f))
				awaitFailed(t, s.met, tr.command)
				require.Equal(t, 1, heal())
			}
			for _, u := range row {
				if got := u.judge(t); got != succeeds {
					u.requireTruth(t)
				}
			}
		}
	})
}

// The same of a request or an answer that the network loses.
func TestALostMessageOfAnOperatorsVerb(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		openStore(t, db) // it makes the indexes
		var all []*underway
		for _, tr := range operatorsVerbs {
			for _, reply := range []bool{true, false} {
				s, lossy := lossyStage(t, db, false)
				trial := tr.prepare(t, s)
				lose := lossy.LoseRequest
				if reply {
					lose = lossy.LoseReply
				}
				lose(tr.command, 1)
				f := fault{name: fmt.Sprintf("message lost, its reply: %v", reply), code: codeOfNetwork, ran: reply}
				all = append(all, start(t, s, tr, trial, f))
			}
		}
		for _, u := range all {
			if got := u.judge(t); got != succeeds {
				u.requireTruth(t)
			}
		}
	})
}

// A caller whose deadline passes while the server, or the network, takes its time is told so, and not that it failed or was
// done; and what is stored in the end is what a second call then tells.
func TestASlowAnswerPastTheDeadline(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		openStore(t, db) // it makes the indexes
		type slow struct {
			*underway
			lossy *mongotest.Lossy
			held  *mongotest.Held
			reply bool
		}
		var all []*slow
		for _, tr := range slices.Concat(transitions, operatorsVerbs) {
			if tr.claim || tr.pop { // which go on for whoever waits next: see fault_claim_test.go
				continue
			}
			for _, reply := range []bool{true, false} {
				s, lossy := lossyStage(t, db, false)
				all = append(all, &slow{underway: &underway{trial: tr.prepare(t, s), tr: tr, s: s}, lossy: lossy, reply: reply})
			}
		}
		// Each by itself: what a caller has left goes on, and is tried again after ten seconds without an answer.
		for _, u := range all {
			hold := u.lossy.HoldRequest
			if u.reply {
				hold = u.lossy.HoldReply
			}
			u.held = hold(u.tr.command)
			f := fault{name: fmt.Sprintf("slow, the reply: %v", u.reply), code: codeOfNetwork, ran: u.reply}
			u.underway = start(t, u.s, u.tr, u.trial, f)
			awaitHeld(t, u.held)
			u.call.cancel()
			for _, err := range u.outcomes(t) {
				require.ErrorIs(t, err, context.Canceled, u.msg)
				require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown, u.msg)
			}
			require.Equal(t, u.reply, u.effect(t)[0], u.msg)
			u.held.Release()
			if !u.reply { // it runs now, for nobody
				require.Eventually(t, func() bool { return u.effect(t)[0] }, soon, 5*time.Millisecond, u.msg)
			}
			u.requireTruth(t)
		}
	})
}
