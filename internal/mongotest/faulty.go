package mongotest

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Always is the mode of a fail point that stays on until it is healed.
const Always = "alwaysOn"

// Times is the mode of a fail point that fails the next n commands.
func Times(n int) bson.D { return bson.D{{Key: "times", Value: n}} }

// Skip is the mode of a fail point that lets n commands pass, then fails all.
func Skip(n int) bson.D { return bson.D{{Key: "skip", Value: n}} }

var faultyShares = [...]*share{{kind: ReplicaSet, own: true}, {kind: Standalone, own: true}}

// A faultyClient is the client of a database that Faulty gave.
type faultyClient struct {
	share   *share
	appName string
}

var (
	faultyMu      sync.Mutex
	faultyClients = map[*mongo.Client]faultyClient{}
	faultyOn      = map[*share]string{} // the app name whose commands fail now
)

// Faulty is a fresh database whose commands [Fail] can make fail. It is on a server that
// this test has for itself until it ends: a server has only one such fail point, so other
// tests that want one wait meanwhile. Take it late and keep the test short. A test may call it
// again for another client and database on the same server; of a test that wants both
// kinds, the replica set comes first.
//
// The client's heartbeats are 500 ms apart unless opts say otherwise: after an error that
// means "not primary" or "shutting down", which the fail point makes up, the driver takes
// the server for gone until the next heartbeat, by default 10 s later.
func Faulty(t testing.TB, kind Kind, opts ...*options.ClientOptions) *mongo.Database {
	t.Helper()
	turns.take(t, map[Kind]resource{ReplicaSet: faultyReplicaSet, Standalone: faultyStandalone}[kind])
	s := faultyShares[kind].get(t)

	appName := databaseName(t.Name())
	all := slices.Concat(
		[]*options.ClientOptions{options.Client().SetHeartbeatInterval(500 * time.Millisecond)},
		opts,
		[]*options.ClientOptions{options.Client().SetAppName(appName)},
	)
	db := freshDatabase(t, s.client, s.uri, all)
	faultyMu.Lock()
	faultyClients[db.Client()] = faultyClient{share: s, appName: appName}
	faultyMu.Unlock()
	t.Cleanup(func() {
		faultyMu.Lock()
		delete(faultyClients, db.Client())
		faultyMu.Unlock()
	})
	return db
}

// Fail makes commands of db's client fail, db being one that [Faulty] gave, until the test
// ends or heal is called. mode is [Times], [Skip] or [Always]. data is that of MongoDB's
// fail point failCommand, without its appName:
//
//	failCommands     bson.A of command names, such as "update"
//	errorCode        the command is not run and answers with this code
//	errorLabels      bson.A of labels for that answer
//	closeConnection  true: the command is not run, and the connection ends
//	writeConcernError  bson.D: the command is run, and answers with this beside its result
//	blockConnection, blockTimeMS  true and for how long: the command runs later
//
// It replaces what an earlier Fail said for the same client. heal says how many commands
// have failed since.
func Fail(t testing.TB, db *mongo.Database, mode any, data bson.D) (heal func() int) {
	t.Helper()
	faultyMu.Lock()
	defer faultyMu.Unlock()
	c, ok := faultyClients[db.Client()]
	if !ok {
		t.Fatalf("Fail: the database %s is not one that Faulty gave", db.Name())
	}
	if on := faultyOn[c.share]; on != "" && on != c.appName {
		t.Fatalf("Fail: commands of another client of this test fail already, and a server has only one fail point")
	}
	data = append(slices.Clone(data), bson.E{Key: "appName", Value: c.appName})
	before := c.failPoint(t, bson.D{{Key: "mode", Value: mode}, {Key: "data", Value: data}})
	faultyOn[c.share] = c.appName

	var once sync.Once
	var failed int
	heal = func() int {
		t.Helper()
		once.Do(func() {
			faultyMu.Lock()
			defer faultyMu.Unlock()
			failed = c.failPoint(t, bson.D{{Key: "mode", Value: "off"}}) - before
			delete(faultyOn, c.share)
		})
		return failed
	}
	t.Cleanup(func() { heal() })
	return heal
}

// failPoint configures failCommand and returns how often it has made a command fail so far.
func (c faultyClient) failPoint(t testing.TB, what bson.D) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	cmd := append(bson.D{{Key: "configureFailPoint", Value: "failCommand"}}, what...)
	var answer struct{ Count int }
	if err := c.share.client.Database("admin").RunCommand(ctx, cmd).Decode(&answer); err != nil {
		t.Fatalf("setting the fail point: %v", err)
	}
	return answer.Count
}
