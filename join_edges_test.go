package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Parts that together would outgrow an envelope: the one that is too much dies, and the whole follows its policy. So it
// does in the last KiB below the server's limit: a whole that large could neither be claimed nor fail.
func TestJoinOfPartsThatOutgrowAnEnvelope(t *testing.T) {
	t.Parallel()
	for name, sizes := range map[string]map[string]int{
		"by far": {"a": 9 << 20, "b": 9 << 20, "c": 1},
		"a bit":  {"a": 7 << 20, "b": 7 << 20, "c": 2<<20 - 32<<10},
	} {
		for _, policy := range []mongoq.JoinPolicy{mongoq.FailWhole, mongoq.GoOn} {
			t.Run(fmt.Sprint(name, policy), func(t *testing.T) {
				t.Parallel()
				db := mongotest.Database(t, mongotest.ReplicaSet)
				store := openStore(t, db)
				var j journal
				stages := joinStages(&j, policy, func(name string, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
					if s != "small" {
						s = strings.Repeat(name, sizes[name])
					}
					return mongoq.Forward(mongoq.Payload(s)), nil
				})
				stages[4].Handler = mongoq.Merge(func(_ context.Context, whole string, parts *mongoq.Joined) (string, error) {
					return fmt.Sprintf("%s: %d and %d", whole, len(parts.Parts), len(parts.Missing)), nil
				})
				p := newPipeline(t, store, stages...)
				id, err := p.Push(t.Context(), "x")
				require.NoError(t, err)
				stop := runPipeline(t, p)
				letters := 1
				if policy == mongoq.GoOn {
					require.Equal(t, []string{"x: 2 and 1"}, j.awaits(t, "end", 1))
				} else {
					letters = 2
				}
				dead := deadOf(t, p, "join", letters)
				require.True(t, slices.ContainsFunc(dead, func(e *mongoq.Envelope) bool {
					return e.Part != nil && e.Dead.Kind == mongoq.DeadPermanent && strings.Contains(e.Dead.Msg, "too large")
				}), "the part, with its payload and the reason")
				require.Equal(t, policy == mongoq.FailWhole, slices.ContainsFunc(dead, func(e *mongoq.Envelope) bool {
					return e.ID == id && e.Dead.Kind == mongoq.DeadPart && len(e.Joined.Parts) == 2
				}), "the whole, with the parts that fit")
				_, err = p.Push(t.Context(), "small")
				require.NoError(t, err)
				require.Contains(t, j.awaits(t, "end", 3-letters), "small: 3 and 0")
				stop()
			})
		}
	}
}

// What a join has gathered goes when it moves on, so that a payload made of its parts may be as large as any.
func TestJoinMakesOneOfLargeParts(t *testing.T) {
	t.Parallel()
	store := openStore(t, mongotest.Database(t, mongotest.ReplicaSet))
	var j journal
	stages := joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, _ string) (mongoq.Route, error) {
		return mongoq.Forward(mongoq.Payload(strings.Repeat(name, 4<<20))), nil
	})
	got := make(chan int, 1)
	stages[5].Handler = mongoq.Sink(func(_ context.Context, s string) error { got <- len(s); return nil })
	p := newPipeline(t, store, stages...)
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, p)
	require.Equal(t, 12<<20+2, await(t, got, "it did not come out"))
}

// A copy that would be too large, with what makes it a part, is no reason to try again and again.
func TestForkOfTheLargestEnvelope(t *testing.T) {
	t.Parallel()
	store := openStore(t, mongotest.Database(t, mongotest.ReplicaSet))
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "split", Handler: forward, Fork: []string{"a", "b"}},
		&mongoq.Stage{Name: "a", Handler: forward}, &mongoq.Stage{Name: "b", Handler: forward})
	_, err := p.Push(t.Context(), strings.Repeat("x", mongoq.MaxEnvelopeSize-200))
	require.NoError(t, err)
	runPipeline(t, p, "split")
	dead := deadOf(t, p, "split", 1)[0]
	require.Equal(t, mongoq.DeadPermanent, dead.Dead.Kind)
	require.Contains(t, dead.Dead.Msg, "a copy of the fork would be too large")
	require.Zero(t, dead.Retries)
}

// A transaction that takes long is ended when its process is dead, not before.
func TestASlowForkIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := mongotest.Faulty(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	kinds := make(chan mongoq.EventKind, 100)
	p := newPipeline(t, store,
		&mongoq.Stage{Name: "split", Handler: forward, Fork: []string{"a", "b"}, Worker: mongoq.WorkerConfig{
			OnEvent: func(e mongoq.Event) { kinds <- e.Kind },
		}},
		&mongoq.Stage{Name: "a", Handler: forward}, &mongoq.Stage{Name: "b", Handler: forward})
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	heal := mongotest.Fail(t, db, mongotest.Times(1), bson.D{
		{Key: "failCommands", Value: bson.A{"insert"}}, {Key: "namespace", Value: db.Name() + ".mongoq"},
		{Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 8500},
	})
	runPipeline(t, p, "split")
	require.Equal(t, mongoq.EventReserved, await(t, kinds, "it was not taken"))
	require.Equal(t, mongoq.EventForked, await(t, kinds, "it was not forked"))
	require.NotZero(t, heal())
}

// A whole that died of something else than its parts is for people to look at: that its parts arrive changes nothing
// until it is redriven.
func TestAWholeThatDiedOfSomethingElseStaysDead(t *testing.T) {
	t.Parallel()
	for _, kind := range []mongoq.DeadKind{mongoq.DeadExpired, mongoq.DeadExplicit} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			db := mongotest.Database(t, mongotest.ReplicaSet)
			store := openStore(t, db)
			var j journal
			gate := make(chan struct{})
			open := sync.OnceFunc(func() { close(gate) })
			defer open()
			stages := joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, _ string) (mongoq.Route, error) {
				if name == "b" {
					<-gate
				}
				return mongoq.Forward(mongoq.Payload(name)), nil
			})
			var opts []mongoq.PushOption
			if kind == mongoq.DeadExpired {
				stages[0].Handler = func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
					return mongoq.Fork(mongoq.TTL(0)), nil // the parts live on
				}
				stages[4].Queue.OnExpire = mongoq.ToDeadLetter
				opts = append(opts, mongoq.TTL(2*time.Second))
			}
			p := newPipeline(t, store, stages...)
			id, err := p.Push(t.Context(), "x", opts...)
			require.NoError(t, err)
			runPipeline(t, p, "split", "a", "b", "c")
			arrived := func(n int64) func() bool {
				return func() bool {
					left, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{{Key: "q", Value: "p.join"}, {Key: "part", Value: bson.D{{Key: "$ne", Value: nil}}}})
					return err == nil && left == n
				}
			}
			require.Eventually(t, arrived(2), late, 5*time.Millisecond) // a and c; nobody gathers them yet
			join := stageQueue(t, p, "join")
			if kind == mongoq.DeadExpired {
				require.Eventually(t, func() bool {
					e, err := store.Get(t.Context(), id)
					return err == nil && time.Now().After(e.Deadline.Add(time.Second))
				}, late, 50*time.Millisecond)
				setDue(t, db, id, -time.Second)
			} else {
				setDue(t, db, id, -time.Hour)
				r := reserve(t, join)
				require.Equal(t, id, r.ID)
				require.NoError(t, r.DeadLetter(t.Context(), errors.New("an operator's decision")))
			}
			runPipeline(t, p, "join", "end")
			require.Equal(t, kind, deadOf(t, p, "join", 1)[0].Dead.Kind)
			open()
			require.Eventually(t, func() bool {
				e, err := store.Get(t.Context(), id)
				return err == nil && len(e.Joined.Parts) == 3
			}, late, 5*time.Millisecond)
			require.Eventually(t, func() bool { return docs(t, db) == 1 }, late, 5*time.Millisecond)
			require.Equal(t, kind, deadOf(t, p, "join", 1)[0].Dead.Kind)
			require.Empty(t, j.of("end"))

			n, err := join.DeadLetters().Redrive(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
			require.Equal(t, []string{"x=abc"}, j.awaits(t, "end", 1))
		})
	}
}

// A part that its stage has ended tells the whole so, and need not be in a history when the join looks.
func TestJoinIsToldOfPartsThatEndIntoAShortHistory(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	store := openStore(t, db)
	var j journal
	stages := joinStages(&j, mongoq.FailWhole, func(name string, _ *mongoq.Reservation, _ string) (mongoq.Route, error) {
		if name == "c" {
			return mongoq.Drop("no use"), nil
		}
		return mongoq.Forward(mongoq.Payload(name)), nil
	})
	stages[3].Queue.Retention = time.Hour
	p := newPipeline(t, store, stages...)
	id, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	stop := runPipeline(t, p, "split", "a", "b", "c")
	history := bson.D{{Key: "processed", Value: bson.D{{Key: "$type", Value: "date"}}}}
	require.Eventually(t, func() bool {
		e, err := store.Get(t.Context(), id)
		return err == nil && e.Joined != nil && len(e.Joined.Missing) == 1
	}, late, 5*time.Millisecond)
	stop()
	res, err := db.Collection("mongoq").DeleteMany(t.Context(), history) // it is forgotten
	require.NoError(t, err)
	require.EqualValues(t, 1, res.DeletedCount)
	runPipeline(t, p, "join", "end")
	require.Equal(t, []string{"x=ab-c(true,,dropped: no use)"}, j.awaits(t, "end", 1))
}

// Whole changes what waits, and not when or for how long.
func TestWholeTakesNoOtherOptions(t *testing.T) {
	t.Parallel()
	store := openStore(t, mongotest.Database(t, mongotest.ReplicaSet))
	var j journal
	stages := joinStages(&j, mongoq.FailWhole, func(string, *mongoq.Reservation, string) (mongoq.Route, error) {
		return mongoq.Forward(), nil
	})
	stages[0].Handler = func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
		return mongoq.Fork().Whole(mongoq.Priority(1)), nil
	}
	p := newPipeline(t, store, stages...)
	_, err := p.Push(t.Context(), "x")
	require.NoError(t, err)
	runPipeline(t, p, "split")
	require.Contains(t, deadOf(t, p, "split", 1)[0].Dead.Msg, "Whole changes the payload and the headers of what waits")
}
