package mongoq_test

import (
	"context"
	"errors"
	"log/slog"
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

// standing are a collection's indexes, by name.
func standing(t *testing.T, db *mongo.Database, collection string) map[string]bson.M {
	t.Helper()
	cur, err := db.Collection(collection).Indexes().List(t.Context())
	require.NoError(t, err)
	var all []bson.M
	require.NoError(t, cur.All(t.Context(), &all))
	byName := map[string]bson.M{}
	for _, ix := range all {
		byName[ix["name"].(string)] = ix
	}
	return byName
}

func createIndex(t *testing.T, db *mongo.Database, spec bson.D) {
	t.Helper()
	require.NoError(t, db.RunCommand(t.Context(), bson.D{
		{Key: "createIndexes", Value: "mongoq"}, {Key: "indexes", Value: bson.A{spec}},
	}).Err())
}

// works sees that a store claims, lists and counts by the indexes that it found.
func works(t *testing.T, store *mongoq.Store) {
	t.Helper()
	q := newQueue(t, store, "works", mongoq.QueueConfig{Retention: time.Hour})
	push(t, q, "done")
	require.NoError(t, tryReserve(t, q).Commit(t.Context()))
	push(t, q, "dead")
	require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New("x")))
	_, err := q.PushMany(t.Context(), []any{1, 2, 3}) // due at one instant
	require.NoError(t, err)
	tryReserve(t, q)
	rs, err := q.ReserveMany(t.Context(), 2)
	require.NoError(t, err)
	require.Len(t, rs, 2)
	require.NoError(t, rs[0].Release(t.Context(), mongoq.Delay(time.Hour)))
	s, err := q.Stats(t.Context())
	require.NoError(t, err)
	s.NextDue = time.Time{}
	require.Equal(t, mongoq.Stats{Q: "works", Total: 3, Scheduled: 1, Reserved: 2, Processed: 1, Dead: 1}, s)
	require.Equal(t, []string{"done"}, listed(t, q))
	n, err := q.DeadLetters().Redrive(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	require.Len(t, peeked(t, q, 10), 1)
	_, err = store.Queues(t.Context())
	require.NoError(t, err)
}

func TestOpenMakesItsIndexes(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		openStore(t, db)
		made := standing(t, db, "mongoq")
		require.Len(t, made, 6)
		for name, want := range map[string]bson.M{
			"mongoq_ready": {"key": bson.D{{Key: "q", Value: int32(1)}, {Key: "prio", Value: int32(1)}, {Key: "when", Value: int32(1)}},
				"partialFilterExpression": bson.D{{Key: "processed", Value: nil}}},
			"mongoq_ttl": {"key": bson.D{{Key: "expireAt", Value: int32(1)}}, "expireAfterSeconds": int32(0),
				"partialFilterExpression": bson.D{{Key: "expireAt", Value: bson.D{{Key: "$type", Value: "date"}}}}},
			"mongoq_history": {"key": bson.D{{Key: "q", Value: int32(1)}, {Key: "processed", Value: int32(-1)}, {Key: "_id", Value: int32(-1)}},
				"partialFilterExpression": bson.D{{Key: "processed", Value: bson.D{{Key: "$type", Value: "date"}}}}},
			"mongoq_died": {"key": bson.D{{Key: "dead.from", Value: int32(1)}, {Key: "dead.kind", Value: int32(1)}, {Key: "dead.at", Value: int32(-1)}, {Key: "_id", Value: int32(-1)}},
				"partialFilterExpression": bson.D{{Key: "dead", Value: bson.D{{Key: "$exists", Value: true}}}}},
			"mongoq_parts": {"key": bson.D{{Key: "part.of", Value: int32(1)}},
				"partialFilterExpression": bson.D{{Key: "part", Value: bson.D{{Key: "$exists", Value: true}}}}},
		} {
			for k, v := range want {
				require.Equal(t, v, made[name][k], "%s: %s", name, k)
			}
		}
		openStore(t, anotherClient(t, db))
		require.Equal(t, made, standing(t, db, "mongoq"), "opened again, nothing changes")
	})
}

func TestOpenTogetherFromManyProcesses(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const processes = 8
		stores := make([]*mongoq.Store, processes)
		errs := make([]error, processes)
		dbs := make([]*mongo.Database, processes)
		for i := range dbs {
			dbs[i] = anotherClient(t, db)
		}
		var wg sync.WaitGroup
		begin := make(chan struct{})
		for i := range processes {
			wg.Go(func() {
				<-begin
				stores[i], errs[i] = mongoq.Open(t.Context(), dbs[i], mongoq.Config{})
			})
		}
		close(begin)
		wg.Wait()
		for i, err := range errs {
			require.NoError(t, err)
			q := newQueue(t, stores[i], "q")
			push(t, q, i)
			require.Equal(t, i, payloadOf[int](t, &tryReserve(t, q).Envelope))
		}
		require.Len(t, standing(t, db, "mongoq"), 6)
		for _, s := range stores {
			require.NoError(t, s.Close(t.Context()))
		}
	})
}

func TestOpenOfAnotherCollectionIsAnotherStore(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		one, other := openStore(t, db), openStore(t, db, mongoq.Config{Collection: "jobs.of-others"})
		id := push(t, newQueue(t, one, "q"), "one")
		push(t, newQueue(t, other, "q"), "other")
		require.NoError(t, newQueue(t, other, "q").Pause(t.Context()))
		require.Equal(t, "one", payloadOf[string](t, &tryReserve(t, newQueue(t, one, "q")).Envelope))
		_, err := other.Get(t.Context(), id)
		require.ErrorIs(t, err, mongoq.ErrNotFound)
		require.Equal(t, "1100", sizes(t, newQueue(t, other, "q")))
		require.NoError(t, newQueue(t, other, "q").Resume(t.Context()))
		works(t, one)
		works(t, other)
		names, err := db.ListCollectionNames(t.Context(), bson.D{})
		require.NoError(t, err)
		for _, name := range []string{"mongoq", "jobs.of-others", "jobs.of-others.queues"} {
			require.Contains(t, names, name)
		}
		require.Len(t, standing(t, db, "jobs.of-others"), 6)

		// Opened again, with another retention.
		again := openStore(t, db, mongoq.Config{Collection: "jobs.of-others"})
		q := newQueue(t, again, "q", mongoq.QueueConfig{Retention: mongoq.KeepForever})
		require.Equal(t, "other", payloadOf[string](t, &tryReserve(t, q).Envelope))
	})
}

var (
	readyKeys   = bson.D{{Key: "q", Value: 1}, {Key: "prio", Value: 1}, {Key: "when", Value: 1}}
	readyPart   = bson.D{{Key: "processed", Value: nil}}
	ttlKeys     = bson.D{{Key: "expireAt", Value: 1}}
	ttlPart     = bson.D{{Key: "expireAt", Value: bson.D{{Key: "$type", Value: "date"}}}}
	historyKeys = bson.D{{Key: "q", Value: 1}, {Key: "processed", Value: -1}, {Key: "_id", Value: -1}}
	historyPart = bson.D{{Key: "processed", Value: bson.D{{Key: "$type", Value: "date"}}}}
	deadKeys    = bson.D{{Key: "dead.from", Value: 1}, {Key: "dead.kind", Value: 1}, {Key: "dead.at", Value: -1}, {Key: "_id", Value: -1}}
	deadPart    = bson.D{{Key: "dead", Value: bson.D{{Key: "$exists", Value: true}}}}
)

func indexSpec(name string, keys, partial bson.D, more ...bson.E) bson.D {
	return append(bson.D{{Key: "name", Value: name}, {Key: "key", Value: keys}, {Key: "partialFilterExpression", Value: partial}}, more...)
}

func TestOpenChangesATTLThatStands(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for _, name := range []string{"mongoq_ttl", "theirs"} {
			require.NoError(t, db.Collection("mongoq").Drop(t.Context()))
			createIndex(t, db, indexSpec(name, ttlKeys, ttlPart, bson.E{Key: "expireAfterSeconds", Value: 3600}))
			works(t, openStore(t, db))
			made := standing(t, db, "mongoq")
			require.EqualValues(t, 0, made[name]["expireAfterSeconds"])
			require.Len(t, made, 6, "none is made beside it")
		}
		// One that is no TTL index yet.
		require.NoError(t, db.Collection("mongoq").Drop(t.Context()))
		createIndex(t, db, indexSpec("mongoq_ttl", ttlKeys, ttlPart))
		works(t, openStore(t, db))
		require.EqualValues(t, 0, standing(t, db, "mongoq")["mongoq_ttl"]["expireAfterSeconds"])
	})
}

func TestOpenNamesAnIndexThatStandsInTheWay(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		for _, spec := range []bson.D{
			indexSpec("mongoq_ready", bson.D{{Key: "q", Value: 1}, {Key: "when", Value: 1}}, readyPart),
			indexSpec("mongoq_history", historyKeys, readyPart),
			{{Key: "name", Value: "mongoq_died"}, {Key: "key", Value: deadKeys}},
			indexSpec("mongoq_ttl", bson.D{{Key: "expireAt", Value: -1}}, ttlPart),
		} {
			require.NoError(t, db.Collection("mongoq").Drop(t.Context()))
			createIndex(t, db, spec)
			_, err := mongoq.Open(t.Context(), db, mongoq.Config{})
			name := spec[0].Value.(string)
			require.ErrorContains(t, err, "index "+name+" of collection mongoq")
			_, there := standing(t, db, "mongoq")[name]
			require.True(t, there, "it is not for the store to drop")
			require.NoError(t, db.Collection("mongoq").Indexes().DropOne(t.Context(), name))
			works(t, openStore(t, db))
		}
	})
}

// An index with the keys and the filter of the store's, but made such that it does not serve, is refused by its name or
// left alone; it is not relied on.
func TestOpenDoesNotRelyOnAnIndexThatCannotServe(t *testing.T) {
	t.Parallel()
	for name, option := range map[string]bson.E{
		"unique":    {Key: "unique", Value: true},
		"hidden":    {Key: "hidden", Value: true},
		"collation": {Key: "collation", Value: bson.D{{Key: "locale", Value: "en"}, {Key: "strength", Value: 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
				for _, index := range []string{"mongoq_ready", "theirs"} {
					require.NoError(t, db.Collection("mongoq").Drop(t.Context()))
					createIndex(t, db, indexSpec(index, readyKeys, readyPart, option))
					store, err := mongoq.Open(t.Context(), db, mongoq.Config{})
					if err != nil {
						require.ErrorContains(t, err, index)
						continue
					}
					works(t, store)
					_, own := standing(t, db, "mongoq")["mongoq_ready"]
					require.True(t, own && index == "theirs", "it was taken for the store's own")
					require.NoError(t, store.Close(t.Context()))
				}
			})
		})
	}
}

func TestOpenUsesAnEqualIndexOfAnotherName(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		asDouble := bson.D{{Key: "q", Value: 1.0}, {Key: "prio", Value: int64(1)}, {Key: "when", Value: 1.0}}
		createIndex(t, db, indexSpec("their ready", asDouble, readyPart))
		createIndex(t, db, indexSpec("their ttl", ttlKeys, ttlPart, bson.E{Key: "expireAfterSeconds", Value: 0}))
		createIndex(t, db, indexSpec("their history", historyKeys, historyPart))
		createIndex(t, db, indexSpec("their dead", deadKeys, deadPart))
		createIndex(t, db, indexSpec("their parts", bson.D{{Key: "part.of", Value: 1}},
			bson.D{{Key: "part", Value: bson.D{{Key: "$exists", Value: true}}}}))
		createIndex(t, db, bson.D{{Key: "name", Value: "one more"}, {Key: "key", Value: bson.D{{Key: "payload.x", Value: 1}}}})
		works(t, openStore(t, db))
		var names []string
		for name := range standing(t, db, "mongoq") {
			names = append(names, name)
		}
		require.ElementsMatch(t, []string{"_id_", "their ready", "their ttl", "their history", "their dead", "their parts", "one more"}, names)
	})
}

// records is a log that a test reads.
type records struct {
	mu   sync.Mutex
	text []string
}

func (r *records) Enabled(context.Context, slog.Level) bool { return true }
func (r *records) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *records) WithGroup(string) slog.Handler            { return r }

func (r *records) Handle(_ context.Context, rec slog.Record) error {
	text := rec.Level.String() + " " + rec.Message
	rec.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		return true
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.text = append(r.text, text)
	return nil
}

func (r *records) matching(parts ...string) (found []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, text := range r.text {
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) }) {
			found = append(found, text)
		}
	}
	return found
}

func validatorOf(t *testing.T, db *mongo.Database) (validator bson.Raw, level string) {
	t.Helper()
	specs, err := db.ListCollectionSpecifications(t.Context(), bson.D{{Key: "name", Value: "mongoq"}})
	require.NoError(t, err)
	require.Len(t, specs, 1)
	validator, _ = specs[0].Options.Lookup("validator").DocumentOK()
	level, _ = specs[0].Options.Lookup("validationLevel").StringValueOK()
	return validator, level
}

func TestOpenSetsAValidator(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		log := &records{}
		coll := db.Collection("mongoq")
		for _, prepare := range []func(){
			func() {},
			func() { require.NoError(t, db.CreateCollection(t.Context(), "mongoq")) },
			func() {
				require.NoError(t, db.CreateCollection(t.Context(), "mongoq"))
				_, err := coll.InsertOne(t.Context(), bson.D{{Key: "q", Value: "old"}, {Key: "when", Value: "no date"}})
				require.NoError(t, err)
			},
		} {
			require.NoError(t, coll.Drop(t.Context()))
			prepare()
			works(t, openStore(t, db, mongoq.Config{Logger: slog.New(log)}))
			got, level := validatorOf(t, db)
			require.Contains(t, got.String(), "when")
			require.Equal(t, "moderate", level)
			for name, when := range map[string]any{
				"no date": "soon", "null": nil, "a number": 1, "an empty array": bson.A{}, "an array": bson.A{1},
				"an array of dates": bson.A{time.Now(), time.Now()}, // this is what it is about: it makes the index multikey
			} {
				_, err := coll.InsertOne(t.Context(), bson.D{{Key: "q", Value: "q"}, {Key: "when", Value: when}, {Key: "prio", Value: 2}})
				var we mongo.WriteException
				require.ErrorAs(t, err, &we, name)
				require.True(t, we.HasErrorCode(121), "%s: %v", name, err)
			}
			_, err := coll.InsertOne(t.Context(), bson.D{{Key: "q", Value: "q"}, {Key: "prio", Value: 2}})
			require.Error(t, err, "no `when` at all")
			_, err = coll.InsertOne(t.Context(), bson.D{{Key: "q", Value: "q"}, {Key: "when", Value: time.Now()}, {Key: "prio", Value: 2}})
			require.NoError(t, err)
		}
		require.Empty(t, log.matching("validator"))
	})
}

func TestOpenLeavesAnotherValidatorAndWarns(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		theirs := bson.D{{Key: "payload", Value: bson.D{{Key: "$exists", Value: true}}}}
		require.NoError(t, db.RunCommand(t.Context(), bson.D{{Key: "create", Value: "mongoq"}, {Key: "validator", Value: theirs}}).Err())
		log := &records{}
		store := openStore(t, db, mongoq.Config{Logger: slog.New(log)})
		want, err := bson.Marshal(theirs)
		require.NoError(t, err)
		got, _ := validatorOf(t, db)
		require.Equal(t, bson.Raw(want), got)
		require.Len(t, log.matching("WARN", "validator", "collection=mongoq"), 1)
		works(t, store)
	})
}

func TestOpenRefusesACollectionThatCannotHoldQueues(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		require.NoError(t, db.CreateCollection(t.Context(), "folded",
			options.CreateCollection().SetCollation(&options.Collation{Locale: "en", Strength: 1})))
		require.NoError(t, db.CreateCollection(t.Context(), "ring", options.CreateCollection().SetCapped(true).SetSizeInBytes(1<<20)))
		require.NoError(t, db.CreateView(t.Context(), "seen", "folded", mongo.Pipeline{}))
		for name, rule := range map[string]string{"folded": "must compare by bytes", "ring": "must not be capped", "seen": "must be an ordinary one"} {
			_, err := mongoq.Open(t.Context(), db, mongoq.Config{Collection: name})
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, name)
			require.ErrorContains(t, err, rule)
			require.ErrorContains(t, err, name)
		}
	})
}

func TestOpenNamesAServerThatIsTooOld(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.4.29", "4.0", "3.6.23", "", "five"} {
		err := mongoq.CheckVersion(version)
		require.ErrorIs(t, err, mongoq.ErrUnsupportedServer)
		require.ErrorContains(t, err, `"`+version+`"`)
		require.ErrorContains(t, err, "5.0")
	}
	for _, version := range []string{"5.0.0", "5.0", "6.0.5", "7.0.12", "8.0.4-rc1", "10.1"} {
		require.NoError(t, mongoq.CheckVersion(version))
	}
}
