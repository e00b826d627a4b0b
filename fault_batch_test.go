package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// batched are the transitions that go in rounds. A push with an id need not: it may wait for an open transaction.
var batched = append(slices.DeleteFunc(slices.Clone(transitions), func(tr transition) bool {
	return tr.claim || tr.pop || tr.batch || tr.push && tr.name != "push"
}), extending("extend of a durable claim", mongoq.QueueConfig{DurableClaims: true}), settling("plain commit into the history", "update", mongoq.QueueConfig{Retention: time.Hour}, func(ctx context.Context, r *mongoq.Reservation) error {
	return r.Commit(ctx)
}, isDone(time.Hour)))

// lossyStage is a stage of db whose network loses and holds what a test tells it to.
func lossyStage(t testing.TB, db *mongo.Database, retries bool) (*stage, *mongotest.Lossy) {
	t.Helper()
	lossy, met := newLossy(), newMet()
	own := anotherClient(t, db, faultClient(retries, met), options.Client().SetDialer(lossy))
	return &stage{kind: kindOf(t, db), retries: retries, db: own, store: openStore(t, own), met: met}, lossy
}

// gathering is a round to come: its callers stand in line, behind two lone calls whose answers are held.
type gathering struct {
	first, members []*underway
	held           []*mongotest.Held
}

// gather makes a gathering of n callers of a transition.
func gather(t testing.TB, s *stage, lossy *mongotest.Lossy, tr transition, f fault, n int) *gathering {
	t.Helper()
	c := &gathering{}
	var trials []*trial
	for range n + 2 {
		trials = append(trials, tr.prepare(t, s))
	}
	for i := range 2 {
		h := lossy.HoldReply(tr.command)
		c.held = append(c.held, h)
		c.first = append(c.first, start(t, s, tr, trials[i], f))
		awaitHeld(t, h)
	}
	for i := range n {
		c.members = append(c.members, start(t, s, tr, trials[2+i], f))
	}
	awaitLine(t, s.store, n)
	return c
}

func awaitHeld(t testing.TB, h *mongotest.Held) {
	t.Helper()
	t.Cleanup(h.Release)
	select {
	case <-h.Reached():
	case <-time.After(soon):
		require.FailNow(t, "no command came to be held")
	}
}

// awaitLine returns when that many calls stand in line.
func awaitLine(t testing.TB, store *mongoq.Store, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		pushes, verbs, _ := mongoq.InLine(store)
		return pushes+verbs == n
	}, soon, time.Millisecond)
}

// requireNoPlaceTaken waits until every call has given its place back.
func requireNoPlaceTaken(t testing.TB, store *mongoq.Store) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, _, places := mongoq.InLine(store)
		return places == 0
	}, soon, time.Millisecond)
}

// goOn has the lone calls end, and the round begin. Pushes are given up: they would ring, by an insert of their own.
func (c *gathering) goOn(t testing.TB) {
	t.Helper()
	for i, h := range c.held {
		if c.first[i].tr.push {
			c.first[i].call.cancel()
			require.ErrorIs(t, errors.Join(c.first[i].outcomes(t)...), mongoq.ErrOutcomeUnknown)
		} else {
			h.Release()
			require.NoError(t, errors.Join(c.first[i].outcomes(t)...))
		}
	}
}

// inRound is the outcome of each member of a round whose command meets the fault once.
func (f fault) inRound(tr transition, s *stage) verdict {
	if f.refused {
		return succeeds // each goes by itself then
	}
	if tr.push { // pushes that go together have a number
		tr.numbered = true
	}
	return f.once(tr, s)
}

// Every member of a round whose command meets a fault gets its own outcome.
func TestAFaultOnARound(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		first := faultyStage(t, kind, true)
		type scene struct {
			*stage
			lossy *mongotest.Lossy
		}
		var scenes []scene
		for i := range 2 * len(batched) {
			lossy := newLossy()
			scenes = append(scenes, scene{first.beside(t, i < len(batched), options.Client().SetDialer(lossy)), lossy})
		}
		faults := []fault{
			failing(codeNotPrimary).asElsewhere().labelled(), failing(codeUnauthorized).asRefusal(),
			unacknowledged(codeWCFailed), failing(codeShuttingDown), closedConnection,
		}
		var all []*gathering
		for _, f := range faults {
			f.name = "round of " + f.name
			var row []*gathering
			for i, s := range scenes {
				tr := batched[i%len(batched)]
				c := gather(t, s.stage, s.lossy, tr, f, 4)
				drain(s.met)
				heal := mongotest.Fail(t, s.db, mongotest.Times(1), f.on(s.db, tr.command))
				row = append(row, c)
				c.goOn(t)
				if tr.push { // those who gave up have failed, too: how often that is told depends on what they were at
					for _, u := range c.members {
						u.outcomes(t)
					}
				} else {
					awaitFailed(t, s.met, tr.command)
				}
				require.Equal(t, 1, heal())
			}
			for i, c := range row {
				if f.inRound(batched[i%len(batched)], scenes[i].stage) == isUnknown {
					all = append(all, c) // these look for what they did
					continue
				}
				c.judge(t, f)
			}
		}
		for _, c := range all {
			c.judge(t, c.members[0].f)
		}
		for _, s := range scenes {
			requireNoPlaceTaken(t, s.store)
		}
	})
}

func (c *gathering) judge(t testing.TB, f fault) {
	t.Helper()
	for _, u := range c.members {
		got := u.judge(t)
		require.Equal(t, f.inRound(u.tr, u.s), got, "%s: %v", u.msg, u.call.got)
		if got != succeeds {
			u.requireTruth(t)
		}
	}
}

// A round whose request or answer is lost: those who pushed are told soon, however many they are.
func TestALostMessageOfARound(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		openStore(t, db) // it makes the indexes
		var all []*gathering
		for _, tr := range batched {
			for _, retries := range []bool{true, false} {
				for _, reply := range []bool{true, false} {
					s, lossy := lossyStage(t, db, retries)
					f := fault{name: fmt.Sprintf("message of a round lost, its reply: %v", reply), code: codeOfNetwork, label: true, ran: reply}
					n := 6
					if tr.push {
						n = 50
					}
					c := gather(t, s, lossy, tr, f, n)
					lose(lossy, tr.command, reply)
					c.goOn(t)
					all = append(all, c)
				}
			}
		}
		for _, c := range all {
			c.judge(t, c.members[0].f)
			requireNoPlaceTaken(t, c.members[0].s.store)
		}
	})
}

// A round of updates is two commands, of one envelope each and of many. What the second is refused for does not hold
// for the first.
func TestARoundOfWhichTheSecondCommandIsRefused(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		first := faultyStage(t, kind, false)
		rollback := batched[slices.IndexFunc(batched, func(tr transition) bool { return tr.name == "rollback" })]
		commit := batched[slices.IndexFunc(batched, func(tr transition) bool { return tr.name == "plain commit into the history" })]
		for _, f := range []fault{failing(codeNotPrimary).asElsewhere(), failing(codeUnauthorized).asRefusal()} {
			f.name = "second command: " + f.name
			lossy := newLossy()
			s := first.beside(t, false, options.Client().SetDialer(lossy))
			var more []*trial
			for range 3 {
				more = append(more, commit.prepare(t, s))
			}
			c := gather(t, s, lossy, rollback, f, 3)
			for _, trial := range more {
				c.members = append(c.members, start(t, s, commit, trial, f))
			}
			awaitLine(t, s.store, 6)
			drain(s.met)
			heal := mongotest.Fail(t, s.db, mongotest.Skip(1), f.on(s.db, "update"))
			c.goOn(t)
			awaitFailed(t, s.met, "update")
			heal()
			for _, u := range c.members {
				if u.judge(t) != succeeds {
					u.requireTruth(t)
				}
			}
		}
	})
}

// replyLost stands for a fault of the network, not of the server.
var replyLost = fault{name: "reply lost", code: codeOfNetwork, label: true, ran: true}

// roundVerb is a verb whose rounds are tested: hold names the transition that takes its flights, command is what it sends.
type roundVerb struct {
	name, hold, command string
	cfg                 mongoq.QueueConfig
	run                 func(context.Context, *mongoq.Reservation) error
	happened            func(bson.Raw) bool
}

// A round of one claim's envelopes is one statement of many: whatever befalls it, each gets its own outcome.
func TestAFaultOnARoundOfOneClaim(t *testing.T) {
	t.Parallel()
	const n = 5
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		first := faultyStage(t, kind, true)
		verbs := []roundVerb{
			{"commit", "commit", "delete", mongoq.QueueConfig{}, commit, isDone(0)},
			{"commit into the history", "release", "update", mongoq.QueueConfig{Retention: time.Hour}, commit, isDone(time.Hour)},
			{"plain move", "release", "update", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.MoveToQ(ctx, "elsewhere")
			}, func(now bson.Raw) bool { return numberOf(now, "moves") == 1 && lengthOf(now, "hops") == 1 }},
			{"extend", "extend", "update", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Extend(ctx, 24*time.Hour)
			}, isExtended},
			{"durable extend", "extend", "update", mongoq.QueueConfig{DurableClaims: true}, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Extend(ctx, 24*time.Hour)
			}, isExtended},
		}
		for _, verb := range verbs {
			lossy := newLossy()
			s := first.beside(t, true, options.Client().SetDialer(lossy))
			for _, f := range []fault{
				failing(codeNotPrimary).asElsewhere().labelled(), failing(codeUnauthorized).asRefusal(),
				unacknowledged(codeWCFailed), failing(codeShuttingDown), closedConnection, replyLost,
			} {
				msg := verb.name + ": " + f.name
				rs := reserveAll(t, s.queue(t, verb.cfg), n)
				before := make([]bson.Raw, n)
				for i, r := range rs {
					before[i] = storedBytes(t, s.db, r.ID)
				}
				c := holdFlights(t, s, lossy, named(verb.hold))
				calls := lineUp(t, s, rs, verb.run)
				drain(s.met)
				met := func() int { return 1 - lossy.Left(verb.command) }
				if f.name == replyLost.name {
					lossy.LoseReply(verb.command, 1)
				} else {
					met = mongotest.Fail(t, s.db, mongotest.Times(1), f.on(s.db, verb.command))
				}
				c.goOn(t)
				for i, call := range calls {
					_, err := call.ended(t)
					require.NoError(t, err, "%s: %d", msg, i)
					require.True(t, changed(t, before[i], storedNow(t, s.db, rs[i].ID), verb.happened), "%s: %d", msg, i)
				}
				require.Equal(t, 1, met(), msg)
			}
			requireNoPlaceTaken(t, s.store)
		}
	})
}

// What a round whose message is lost leaves open is found out together: sent singly, many would take longer than their leases.
func TestARoundThatFailedGoesOnceMore(t *testing.T) {
	t.Parallel()
	const n = 200
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		verbs := []roundVerb{
			{"commit", "commit", "delete", mongoq.QueueConfig{}, commit, isDone(0)},
			{"commit into the history", "release", "update", mongoq.QueueConfig{Retention: time.Hour}, commit, isDone(time.Hour)},
			{"rollback", "release", "update", mongoq.QueueConfig{}, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Rollback(ctx, errFailed, mongoq.After(time.Hour))
			}, func(now bson.Raw) bool { return numberOf(now, "retries") == 1 && !has(now, "lease") }},
		}
		sends := func(i int, reply bool) (sent int) {
			verb, lossy := verbs[i], newLossy()
			msg := fmt.Sprintf("%s, the reply lost: %v", verb.name, reply)
			own, wire := watched(t, db, options.Client().SetRetryWrites(false).SetDialer(lossy))
			s := &stage{kind: kindOf(t, db), db: own, store: openStore(t, own), met: newMet()}
			rs := reserveAll(t, s.queue(t, verb.cfg), n)
			c := holdFlights(t, s, lossy, named(verb.hold))
			calls := lineUp(t, s, rs, verb.run)
			wire.take()
			lose(lossy, verb.command, reply)
			c.goOn(t)
			for i, call := range calls {
				_, err := call.ended(t)
				require.NoError(t, err, "%s: %d", msg, i)
				require.True(t, verb.happened(storedNow(t, db, rs[i].ID)), "%s: %d", msg, i)
			}
			require.Zero(t, lossy.Left(verb.command), msg)
			requireNoPlaceTaken(t, s.store)
			return len(wire.take(verb.command))
		}
		for i, verb := range verbs {
			for _, reply := range []bool{false, true} {
				sent := 0
				for range 3 { // a machine that is busy for two seconds does not tell
					if sent = sends(i, reply); sent == 2 {
						break
					}
				}
				require.Equal(t, 2, sent, "%s, the reply lost: %v", verb.name, reply)
			}
		}
	})
}

// What a round that goes once more has deleted is known, though a failover lies between: each was held until then. Where it
// was the first that deleted them, nobody can tell.
func TestARoundThatGoesOnceMoreAfterAFailover(t *testing.T) {
	t.Parallel()
	const n = 50
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		unknown := func(reply bool) (times int) {
			s, lossy := lossyStage(t, db, false)
			rs := reserveAll(t, s.queue(t), n)
			c := holdFlights(t, s, lossy, named("commit"))
			calls := lineUp(t, s, rs, commit)
			mongoq.AnotherTerm(s.store)
			lose(lossy, "delete", reply)
			c.goOn(t)
			for i, call := range calls {
				_, err := call.ended(t)
				require.Nil(t, storedNow(t, db, rs[i].ID), i)
				if err != nil {
					require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown, i)
					times++
				}
			}
			requireNoPlaceTaken(t, s.store)
			return times
		}
		require.Equal(t, n, unknown(true))
		times := n
		for range 3 { // a machine that is busy for two seconds does not tell
			if times = unknown(false); times == 0 {
				break
			}
		}
		require.Zero(t, times)
	})
}

// Commits into a partitioned history whose transaction fails go once more in one.
func TestARoundOfFilingsThatFailedGoesOnceMore(t *testing.T) {
	t.Parallel()
	const n = 50
	db := mongotest.Database(t, mongotest.ReplicaSet)
	sends := func(command string, reply bool) (updates int) {
		lossy := newLossy()
		own, wire := watched(t, db, options.Client().SetRetryWrites(false).SetDialer(lossy))
		store := openStore(t, own, mongoq.Config{PartitionHistory: mongoq.PartitionByDay})
		s := &stage{kind: mongotest.ReplicaSet, db: own, store: store, met: newMet()}
		q := s.queue(t, mongoq.QueueConfig{Retention: time.Hour})
		rs := reserveAll(t, q, n+1)
		require.NoError(t, rs[n].Commit(t.Context())) // it makes the partition
		require.Eventually(t, func() bool { return storedNow(t, db, rs[n].ID) == nil }, late, time.Millisecond, "it is not filed")
		c := holdFlights(t, s, lossy, named("commit"))
		calls := lineUp(t, s, rs[:n], commit)
		wire.take()
		lose(lossy, command, reply)
		c.goOn(t)
		for i, call := range calls {
			_, err := call.ended(t)
			require.NoError(t, err, i)
			e, err := q.Get(t.Context(), rs[i].ID)
			require.NoError(t, err)
			require.False(t, e.Processed.IsZero())
		}
		requireNoPlaceTaken(t, s.store)
		return len(wire.take("update"))
	}
	for _, command := range []string{"insert", "delete", "commitTransaction"} {
		for _, reply := range []bool{false, true} {
			updates := n
			for range 3 { // a machine that is busy for two seconds does not tell
				if updates = sends(command, reply); updates < n {
					break
				}
			}
			require.Less(t, updates, n, "they went singly: of %s, the reply lost: %v", command, reply)
		}
	}
}

// A round that goes once more does nothing for those that somebody else has taken meanwhile, and says so.
func TestARoundThatGoesOnceMoreLeavesWhatOthersHave(t *testing.T) {
	t.Parallel()
	const n, bad = 50, 17
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for _, retention := range []time.Duration{0, time.Hour} {
			s, lossy := lossyStage(t, db, false)
			rs := reserveAll(t, s.queue(t, mongoq.QueueConfig{Retention: retention}), n)
			hold, command := "commit", "delete"
			if retention > 0 {
				hold, command = "release", "update"
			}
			c := holdFlights(t, s, lossy, named(hold))
			calls := lineUp(t, s, rs, commit)
			steal(t, db, rs[bad].ID)
			before := storedBytes(t, db, rs[bad].ID)
			lossy.LoseReply(command, 1)
			c.goOn(t)
			for i, call := range calls {
				_, err := call.ended(t)
				if i == bad {
					require.ErrorIs(t, err, mongoq.ErrLeaseLost)
					requireSameDoc(t, before, storedNow(t, db, rs[i].ID), "it is another's")
					continue
				}
				require.NoError(t, err, i)
				require.True(t, isDone(retention)(storedNow(t, db, rs[i].ID)), i)
			}
			requireNoPlaceTaken(t, s.store)
		}
	})
}

// lineUp begins a verb of each of some reservations, while the flights are held, and returns when all stand in line.
func lineUp(t testing.TB, s *stage, rs []*mongoq.Reservation, verb func(context.Context, *mongoq.Reservation) error) (calls []*pending[struct{}]) {
	t.Helper()
	for _, r := range rs {
		calls = append(calls, begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, verb(ctx, r) }))
	}
	awaitLine(t, s.store, len(rs))
	return calls
}

func commit(ctx context.Context, r *mongoq.Reservation) error { return r.Commit(ctx) }

// lose has a network lose the next reply to a command, or the next request.
func lose(l *mongotest.Lossy, command string, reply bool) {
	if reply {
		l.LoseReply(command, 1)
	} else {
		l.LoseRequest(command, 1)
	}
}

// holdFlights takes both flights of a store's verbs, or of its pushes, by calls whose answers are held.
func holdFlights(t testing.TB, s *stage, lossy *mongotest.Lossy, tr transition) *gathering {
	t.Helper()
	return gather(t, s, lossy, tr, closedConnection, 0)
}

func named(name string) transition {
	return transitions[slices.IndexFunc(transitions, func(tr transition) bool { return tr.name == name })]
}

// One member of a round that is somebody else's now, or ended, takes no other down.
func TestAStaleMemberOfARound(t *testing.T) {
	t.Parallel()
	const n, bad = 50, 17
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, true)
		verbs := []struct {
			name, command string
			retention     time.Duration
			run           func(context.Context, *mongoq.Reservation) error
			done          func(bson.Raw) bool
		}{
			{"commit", "delete", 0, func(ctx context.Context, r *mongoq.Reservation) error { return r.Commit(ctx) }, isDone(0)},
			{"commit into the history", "update", time.Hour, func(ctx context.Context, r *mongoq.Reservation) error { return r.Commit(ctx) }, isDone(time.Hour)},
			{"commit with a result", "update", time.Hour, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Commit(ctx, mongoq.Result(1))
			}, isDone(time.Hour)},
			{"rollback", "update", 0, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Rollback(ctx, errFailed, mongoq.After(time.Hour))
			}, func(now bson.Raw) bool { return numberOf(now, "retries") == 1 && !has(now, "lease") }},
			{"release", "update", 0, func(ctx context.Context, r *mongoq.Reservation) error {
				return r.Release(ctx, mongoq.Delay(time.Hour))
			}, func(now bson.Raw) bool { return !has(now, "lease") }},
			{"move", "update", 0, func(ctx context.Context, r *mongoq.Reservation) error { return r.MoveToQ(ctx, "elsewhere") },
				func(now bson.Raw) bool { return numberOf(now, "moves") == 1 }},
			{"dead-letter", "update", 0, func(ctx context.Context, r *mongoq.Reservation) error { return r.DeadLetter(ctx, errFailed) },
				func(now bson.Raw) bool { return has(now, "dead") }},
			{"extend", "update", 0, func(ctx context.Context, r *mongoq.Reservation) error { return r.Extend(ctx, 24*time.Hour) }, isExtended},
		}
		envelopes := db.Collection("mongoq")
		for _, verb := range verbs {
			for _, gone := range []bool{false, true} {
				msg := fmt.Sprintf("%s, gone: %v", verb.name, gone)
				q := s.queue(t, mongoq.QueueConfig{Retention: verb.retention})
				rs := append(reserveAll(t, q, n/2), reserveAll(t, q, n/2)...)
				hold := named("release")
				switch {
				case verb.command == "delete":
					hold = named("commit")
				case verb.name == "extend":
					hold = named("extend")
				}
				c := holdFlights(t, s, lossy, hold)
				calls := lineUp(t, s, rs, verb.run)
				var before bson.Raw
				if gone { // the claim was undone in a failover, and another holder has committed
					_, err := envelopes.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: rs[bad].ID}})
					require.NoError(t, err)
				} else {
					_, err := envelopes.UpdateByID(t.Context(), rs[bad].ID, bson.D{
						{Key: "$set", Value: bson.D{{Key: "lease", Value: bson.NewObjectID()}}}, {Key: "$inc", Value: bson.D{{Key: "deliveries", Value: 1}}},
					})
					require.NoError(t, err)
					before = storedBytes(t, db, rs[bad].ID)
				}
				c.goOn(t)
				for i, call := range calls {
					_, err := call.ended(t)
					now := storedNow(t, db, rs[i].ID)
					switch {
					case i == bad && !gone:
						require.ErrorIs(t, err, mongoq.ErrLeaseLost, msg)
						requireSameDoc(t, before, now, msg)
					case i == bad && verb.command == "delete":
						require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown, msg)
						require.Nil(t, now, msg)
					case i == bad:
						require.ErrorIs(t, err, mongoq.ErrLeaseLost, msg)
						require.Nil(t, now, msg)
					case gone && verb.command == "delete" && err != nil: // nothing tells whose the missing one was
						require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown, msg)
						require.True(t, verb.done(now), msg)
					default:
						require.NoError(t, err, "%s: %d", msg, i)
						require.True(t, verb.done(now), "%s: %v", msg, now)
					}
				}
			}
		}
	})
}

// Pushes under an id that is there already, with the same payload or another, take no other down.
func TestPushesUnderTheSameIDBesideARound(t *testing.T) {
	t.Parallel()
	const n = 50
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, true)
		q := s.queue(t)
		id := push(t, newQueue(t, openStore(t, db), q.Name()), "first", mongoq.ID(bson.NewObjectID()))
		other := bson.NewObjectID()
		c := holdFlights(t, s, lossy, named("push"))
		var calls []*pending[bson.ObjectID]
		for i := range n {
			calls = append(calls, begin(t, func(ctx context.Context) (bson.ObjectID, error) {
				switch i {
				case 7:
					return q.Push(ctx, "first", mongoq.ID(id)) // again
				case 17:
					return q.Push(ctx, "second", mongoq.ID(id)) // another one
				case 27, 28:
					return q.Push(ctx, "twice", mongoq.ID(other)) // twice in this round
				}
				return q.Push(ctx, i)
			}))
		}
		require.Eventually(t, func() bool {
			pushes, _, _ := mongoq.InLine(s.store)
			return pushes >= n-4
		}, soon, time.Millisecond)
		c.goOn(t)
		for i, call := range calls {
			got, err := call.ended(t)
			if i == 17 {
				require.ErrorIs(t, err, mongoq.ErrDuplicate)
				continue
			}
			require.NoError(t, err, i)
			require.NotNil(t, storedNow(t, db, got), i)
		}
		require.Equal(t, n-2, storedIn(t, db, q.Name()))
		require.Equal(t, "first", payloadOf[string](t, mustHave(q.Get(t.Context(), id))))
	})
}

func mustHave[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// What outgrows the server's limit by a verb is refused, and takes no other down.
func TestATooLargeMemberOfARound(t *testing.T) {
	t.Parallel()
	const n, bad = 20, 7
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, true)
		q := s.queue(t)
		rs := reserveAll(t, q, n)
		// Somebody has made one of them as large as can be.
		more := make([]byte, 16<<20-len(storedBytes(t, db, rs[bad].ID))-100)
		require.Eventually(t, func() bool { // the server refuses it while its cache is full
			_, err := db.Collection("mongoq").UpdateByID(t.Context(), rs[bad].ID, bson.D{{Key: "$set", Value: bson.D{{Key: "more", Value: more}}}})
			return err == nil
		}, soon, 50*time.Millisecond)
		c := holdFlights(t, s, lossy, named("release"))
		cause := errors.New(strings.Repeat("x", 1000))
		var calls []*pending[struct{}]
		for _, r := range rs {
			calls = append(calls, begin(t, func(ctx context.Context) (struct{}, error) {
				return struct{}{}, r.Rollback(ctx, cause, mongoq.After(time.Hour))
			}))
		}
		awaitLine(t, s.store, n)
		c.goOn(t)
		for i, call := range calls {
			_, err := call.ended(t)
			if i != bad {
				require.NoError(t, err)
				require.EqualValues(t, 1, numberOf(storedNow(t, db, rs[i].ID), "retries"))
				continue
			}
			require.Error(t, err)
			require.NotErrorIs(t, err, mongoq.ErrLeaseLost)
			require.NotErrorIs(t, err, mongoq.ErrOutcomeUnknown)
			require.True(t, has(storedNow(t, db, rs[bad].ID), "lease"), "it is still held")
		}
		require.NoError(t, rs[bad].Commit(t.Context()), "nor is its reservation settled")
	})
}

// A caller that gives up while it stands in line is told so at once, and nothing is sent for it.
func TestAContextThatEndsInLine(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for _, tr := range batched {
			s, lossy := lossyStage(t, db, true)
			c := gather(t, s, lossy, tr, closedConnection, 3)
			for _, u := range c.members[1:] {
				u.call.cancel()
				err := errors.Join(u.outcomes(t)...)
				require.ErrorIs(t, err, context.Canceled, u.msg)
				require.NotErrorIs(t, err, mongoq.ErrOutcomeUnknown, u.msg)
			}
			awaitLine(t, s.store, 1)
			c.goOn(t)
			require.NoError(t, errors.Join(c.members[0].outcomes(t)...))
			requireNoPlaceTaken(t, s.store)
			for _, u := range c.members[1:] {
				require.NotContains(t, u.effect(t), true, u.msg)
				u.requireTruth(t) // the reservation is not settled
			}
		}
	})
}

// A caller that gives up while its call is on the way, alone or in a round, is told at once that the outcome is unknown.
func TestAContextThatEndsInFlight(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		givesUp := func(u *underway) {
			u.call.cancel()
			err := errors.Join(u.outcomes(t)...)
			if u.tr.harmless && err == nil {
				return // the machine was slow: an extension that takes five seconds is sent again
			}
			require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown, u.msg)
			require.ErrorIs(t, err, context.Canceled, u.msg)
		}
		for _, tr := range batched {
			s, lossy := lossyStage(t, db, true)
			c := gather(t, s, lossy, tr, closedConnection, 3)
			round := lossy.HoldReply(tr.command)
			lone := c.first[1]
			givesUp(lone)
			awaitHeld(t, round) // its flight has gone to the others
			for _, u := range c.members[1:] {
				givesUp(u)
			}
			round.Release()
			require.NoError(t, errors.Join(c.members[0].outcomes(t)...), "the round goes on")
			for _, h := range c.held {
				h.Release()
			}
			requireNoPlaceTaken(t, s.store)
			for _, u := range append(c.members[1:], lone) {
				require.NotContains(t, u.effect(t), false, "it happened: %s", u.msg)
				u.requireTruth(t)
			}
		}
	})
}

// Those of a CommitMany whose outcome is known when its context ends are told it.
func TestCommitManyTellsWhatItKnowsWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, true)
		gone, kept := s.queue(t), s.queue(t, mongoq.QueueConfig{Retention: time.Hour})
		slow, quick := reserveAll(t, kept, 5), reserveAll(t, gone, 20)
		held := lossy.HoldReply("update") // the deletes go first
		ctx, cancel := context.WithCancel(t.Context())
		call := begin(t, func(context.Context) (struct{}, error) {
			return struct{}{}, gone.CommitMany(ctx, slices.Concat(slow, quick))
		})
		awaitHeld(t, held)
		cancel()
		_, err := call.ended(t)
		for i, err := range singly(err, 25) {
			if i < len(slow) {
				require.ErrorIs(t, err, mongoq.ErrOutcomeUnknown)
				require.ErrorIs(t, err, context.Canceled)
			} else {
				require.NoError(t, err, i)
			}
		}
		held.Release()
		require.NoError(t, kept.CommitMany(t.Context(), slow), "a second call tells")
	})
}

// More calls than there are places go through, whatever befalls them, and every place is given back.
func TestPlacesAreGivenBack(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 400
		s, lossy := lossyStage(t, db, true)
		mongoq.Narrow(s.store, 4)
		q := s.queue(t)
		rs := reserveAll(t, q, n)
		for range 2 {
			lossy.LoseReply("insert", 1)
			lossy.LoseRequest("insert", 1)
			lossy.LoseReply("delete", 1)
			lossy.LoseRequest("delete", 1)
			lossy.LoseReply("update", 1)
		}
		pushed := make([]bson.ObjectID, n)
		pushErrs, verbErrs := make([]error, n), make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			timeout := time.Hour
			if i%3 == 0 {
				timeout = rand.N(20 * time.Millisecond)
			}
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				pushed[i], pushErrs[i] = q.Push(ctx, i)
			})
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				if i%2 == 0 {
					verbErrs[i] = rs[i].Commit(ctx)
				} else {
					verbErrs[i] = rs[i].Release(ctx, mongoq.Delay(time.Hour))
				}
			})
		}
		finished := make(chan struct{})
		go func() { wg.Wait(); close(finished) }()
		select {
		case <-finished:
		case <-time.After(3 * soon):
			require.FailNow(t, "calls that never end")
		}
		requireNoPlaceTaken(t, s.store)
		for i := range n {
			if pushErrs[i] == nil {
				require.NotNil(t, storedNow(t, db, pushed[i]))
			}
			require.NotErrorIs(t, verbErrs[i], mongoq.ErrLeaseLost)
			if verbErrs[i] == nil {
				now := storedNow(t, db, rs[i].ID)
				require.True(t, i%2 == 0 && now == nil || i%2 == 1 && !has(now, "lease"))
			}
		}
		push(t, q, "they can be used again")
	})
}

// Close while much is under way: every call ends, and what was acknowledged is stored.
func TestCloseWhileRoundsAreUnderWay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 100
		own := anotherClient(t, db)
		lossy := newLossy()
		s := &stage{kind: kindOf(t, db), retries: true, db: anotherClient(t, own, options.Client().SetDialer(lossy))}
		s.store = openStore(t, s.db)
		q := s.queue(t)
		rs := reserveAll(t, q, n)
		hold := []*mongotest.Held{lossy.HoldRequest("insert"), lossy.HoldRequest("insert"), lossy.HoldRequest("delete"), lossy.HoldRequest("delete")}
		var pushes []*pending[bson.ObjectID]
		var commits []*pending[struct{}]
		for i := range n {
			pushes = append(pushes, begin(t, func(ctx context.Context) (bson.ObjectID, error) { return q.Push(ctx, i) }))
			commits = append(commits, begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, rs[i].Commit(ctx) }))
		}
		for _, h := range hold {
			awaitHeld(t, h)
		}
		awaitLine(t, s.store, 2*n-4)
		closed := begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.store.Close(ctx) })
		for _, h := range hold {
			h.Release()
		}
		closed.result(t)
		for i := range n {
			id, err := pushes[i].ended(t)
			require.True(t, err == nil || errors.Is(err, mongoq.ErrClosed), "%v", err)
			if err == nil {
				require.NotNil(t, storedNow(t, db, id))
			}
			commits[i].result(t) // what is held may be settled after Close
			require.Nil(t, storedNow(t, db, rs[i].ID))
		}
		_, err := q.Push(t.Context(), "late")
		require.ErrorIs(t, err, mongoq.ErrClosed)
		requireNoPlaceTaken(t, s.store)
	})
}
