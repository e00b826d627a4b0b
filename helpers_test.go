package mongoq_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// openStore opens a store, with at most one Config, that is closed when the test ends.
func openStore(t testing.TB, db *mongo.Database, cfg ...mongoq.Config) *mongoq.Store {
	t.Helper()
	store, err := mongoq.Open(t.Context(), db, only(cfg))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		require.NoError(t, store.Close(ctx))
	})
	return store
}

// newQueue gives a queue, with at most one QueueConfig.
func newQueue(t testing.TB, store *mongoq.Store, name string, cfg ...mongoq.QueueConfig) *mongoq.Queue {
	t.Helper()
	q, err := store.Queue(name, only(cfg))
	require.NoError(t, err)
	return q
}

func only[T any](given []T) (one T) {
	if len(given) > 0 {
		one = given[0]
	}
	return one
}

func push(t testing.TB, q *mongoq.Queue, payload any, opts ...mongoq.PushOption) bson.ObjectID {
	t.Helper()
	id, err := q.Push(t.Context(), payload, opts...)
	require.NoError(t, err)
	return id
}

// tryReserve takes what must be due now.
func tryReserve(t testing.TB, q *mongoq.Queue, opts ...mongoq.ReserveOption) *mongoq.Reservation {
	t.Helper()
	r, err := q.TryReserve(t.Context(), opts...)
	require.NoError(t, err)
	return r
}

// reserve waits for what will be due soon.
func reserve(t testing.TB, q *mongoq.Queue, opts ...mongoq.ReserveOption) *mongoq.Reservation {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := q.Reserve(ctx, opts...)
	require.NoError(t, err)
	return r
}

// sizes gives a queue's [total ready scheduled reserved] as digits.
func sizes(t testing.TB, q *mongoq.Queue) string {
	t.Helper()
	s, err := q.Stats(t.Context())
	require.NoError(t, err)
	return fmt.Sprintf("%d%d%d%d", s.Total, s.Ready, s.Scheduled, s.Reserved)
}

func payloadOf[T any](t testing.TB, e *mongoq.Envelope) T {
	t.Helper()
	var v T
	require.NoError(t, e.Decode(&v))
	return v
}

// rawDoc is the document under an id in the default collection, as it is stored.
func rawDoc(t testing.TB, db *mongo.Database, id any) bson.M {
	t.Helper()
	var doc bson.M
	require.NoError(t, db.Collection("mongoq").FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&doc))
	return doc
}

// setDue makes an envelope due in a while, by the server's clock, as if that long had been asked for.
func setDue(t testing.TB, db *mongo.Database, id bson.ObjectID, in time.Duration) {
	t.Helper()
	when := bson.D{{Key: "$add", Value: bson.A{"$$NOW", in.Milliseconds()}}}
	res, err := db.Collection("mongoq").UpdateByID(t.Context(), id, bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "when", Value: when}}}}})
	require.NoError(t, err)
	require.EqualValues(t, 1, res.MatchedCount)
}

// kindOf is the kind of server a database is on.
func kindOf(t testing.TB, db *mongo.Database) mongotest.Kind {
	t.Helper()
	var hello struct {
		SetName string `bson:"setName"`
	}
	require.NoError(t, db.RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&hello))
	if hello.SetName == "" {
		return mongotest.Standalone
	}
	return mongotest.ReplicaSet
}

// anotherClient is the same database through a client of its own, with opts.
func anotherClient(t testing.TB, db *mongo.Database, opts ...*options.ClientOptions) *mongo.Database {
	t.Helper()
	all := append([]*options.ClientOptions{options.Client().ApplyURI(mongotest.URI(t, kindOf(t, db)))}, opts...)
	client, err := mongo.Connect(all...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, client.Disconnect(ctx))
	})
	return client.Database(db.Name())
}

// wire notes the commands that a client sends, other than the driver's own, and those about signals, which are hints.
type wire struct {
	mu   sync.Mutex
	sent []sentCommand
}

type sentCommand struct {
	name         string
	writeConcern string // as extended JSON; empty: none given
	readPref     string // its mode; empty: none given, which is the primary
}

// watched is the same database through a client whose commands are noted.
func watched(t testing.TB, db *mongo.Database, opts ...*options.ClientOptions) (*mongo.Database, *wire) {
	t.Helper()
	w := &wire{}
	monitor := &event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		target, _ := e.Command.Lookup(e.CommandName).StringValueOK()
		if e.CommandName == "getMore" {
			target, _ = e.Command.Lookup("collection").StringValueOK()
		}
		if e.DatabaseName != db.Name() || strings.HasSuffix(target, ".signals") {
			return
		}
		c := sentCommand{name: e.CommandName}
		if v, err := e.Command.LookupErr("writeConcern"); err == nil {
			c.writeConcern = v.String()
		}
		c.readPref, _ = e.Command.Lookup("$readPreference", "mode").StringValueOK()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.sent = append(w.sent, c)
	}}
	return anotherClient(t, db, append(opts, options.Client().SetMonitor(monitor))...), w
}

// take gives the commands sent since the last take, of these names or of all.
func (w *wire) take(names ...string) []sentCommand {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.sent
	w.sent = nil
	if len(names) == 0 {
		return all
	}
	return slices.DeleteFunc(all, func(c sentCommand) bool { return !slices.Contains(names, c.name) })
}

// newLossy is a network that loses no signals: they are hints, and tests count what they lose.
func newLossy() *mongotest.Lossy {
	l := mongotest.NewLossy()
	l.Spare(".signals")
	return l
}

var upsert = options.UpdateOne().SetUpsert(true)

var background = context.Background()
