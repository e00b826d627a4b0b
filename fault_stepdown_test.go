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
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// tellNode runs an administrator's command on a node, whatever its state.
func tellNode(t testing.TB, n *mongotest.Node, cmd bson.D) {
	t.Helper()
	direct, err := mongo.Connect(options.Client().ApplyURI("mongodb://" + n.Addr() + "/?directConnection=true"))
	require.NoError(t, err)
	require.NoError(t, direct.Database("admin").RunCommand(t.Context(), cmd).Err())
	require.NoError(t, direct.Disconnect(t.Context()))
}

// stopReplication has secondaries follow the primary no more, though they still see it: what is written is on the primary
// alone, and no majority acknowledges it.
func stopReplication(t testing.TB, db *mongo.Database, secondaries []*mongotest.Node) (resume func()) {
	t.Helper()
	set := func(mode string) {
		for _, n := range secondaries {
			tellNode(t, n, bson.D{{Key: "configureFailPoint", Value: "stopReplProducer"}, {Key: "mode", Value: mode}})
		}
	}
	set("alwaysOn")
	// What they were about to read may still come.
	brief := options.Collection().SetWriteConcern(&writeconcern.WriteConcern{W: 2})
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		_, err := db.Collection("notes", brief).InsertOne(ctx, bson.D{})
		return err != nil
	}, 3*soon, time.Millisecond)
	return func() { set("off") }
}

// A primary steps down between a write and its acknowledgement by a majority: whether the write outlives that or is undone,
// what the caller is told agrees with what is stored when there is a primary again.
func TestAStepDownInBetween(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} { // killed: its write is undone
		t.Run(fmt.Sprintf("killed: %v", killed), func(t *testing.T) {
			t.Parallel()
			server := mongotest.Private(t, mongotest.Options{ReplicaSet: 3, TestCommands: true})
			var all []*underway
			for _, retries := range []bool{true, false} {
				db := clientOf(t, server, options.Client().SetRetryWrites(retries))
				for _, tr := range slices.Concat(transitions, operatorsVerbs) {
					if tr.claim || tr.name == "extend" { // which the primary alone acknowledges
						continue
					}
					s := &stage{kind: mongotest.ReplicaSet, retries: retries, db: db, store: openStore(t, db), met: newMet()}
					f := fault{name: "step-down"}
					all = append(all, &underway{trial: tr.prepare(t, s), tr: tr, s: s, f: f, msg: fmt.Sprintf("%s, retryWrites %v", tr.name, retries)})
				}
			}
			// What was claimed so far is held by all.
			admin := all[0].s.db.Client().Database("admin")
			require.NoError(t, admin.RunCommand(t.Context(), bson.D{
				{Key: "appendOplogNote", Value: 1}, {Key: "data", Value: bson.D{{Key: "x", Value: 1}}}, {Key: "writeConcern", Value: bson.D{{Key: "w", Value: 3}}},
			}).Err())
			var hello struct{ Primary string }
			require.NoError(t, admin.RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&hello))
			var primary *mongotest.Node
			var others []*mongotest.Node
			for _, n := range server.Nodes() {
				if n.Addr() == hello.Primary {
					primary = n
				} else {
					others = append(others, n)
				}
			}
			resume := stopReplication(t, all[0].s.db, others)
			for _, u := range all {
				u.call = begin(t, func(ctx context.Context) ([]error, error) { return u.trial.call(ctx), nil })
			}
			for _, u := range all { // each is done, and not acknowledged
				require.Eventually(t, func() bool { return u.effect(t)[0] || u.ended() }, soon, 5*time.Millisecond, u.msg)
			}
			if killed {
				primary.Kill()
			} else {
				tellNode(t, primary, bson.D{
					{Key: "replSetStepDown", Value: 30}, {Key: "secondaryCatchUpPeriodSecs", Value: 0}, {Key: "force", Value: true},
				})
			}
			resume()
			told, undone := map[string]int{}, 0
			for _, u := range all {
				errs := u.outcomes(t)
				stored := u.effect(t)
				for i, err := range errs {
					if !stored[i] {
						undone++
					}
					require.NotErrorIs(t, err, mongoq.ErrLeaseLost, u.msg)
					switch {
					case err == nil:
						require.True(t, stored[i], "%s: success of what did not happen", u.msg)
						told["success"]++
					case errors.Is(err, mongoq.ErrOutcomeUnknown):
						told["unknown"]++
					default:
						require.True(t, u.tr.harmless || !stored[i], "%s: %v of what happened", u.msg, err)
						told["refused"]++
					}
				}
				if errors.Join(errs...) != nil {
					u.requireTruthAfterElection(t)
				}
			}
			require.NotZero(t, told["success"], told)
			if killed { // what was not sent again is undone, since nobody else had it
				require.NotZero(t, undone)
				require.NotZero(t, told["unknown"], told)
			}
		})
	}
}

// requireTruthAfterElection is requireTruth, but that a delete which happened may stay unknown: who else may have deleted
// is not known across an election.
func (r *underway) requireTruthAfterElection(t testing.TB) {
	t.Helper()
	if !r.again || r.tr.command != "delete" || slices.Contains(r.effect(t), false) {
		r.requireTruth(t)
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
	defer cancel()
	for _, err := range r.trial.call(ctx) {
		require.True(t, err == nil || errors.Is(err, mongoq.ErrOutcomeUnknown), "%s: the second call: %v", r.msg, err)
	}
}
