package mongoq_test

import (
	"slices"
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

// keep has a store of its own, whose server seems to be so far ahead, keep the history.
func keep(t testing.TB, db *mongo.Database, ahead time.Duration, cfg mongoq.Config) {
	t.Helper()
	cfg.PartitionHistory = mongoq.PartitionByHour
	store := openStore(t, db, cfg)
	mongoq.Ahead(store, ahead)
	_, err := db.Collection("mongoq.queues").UpdateMany(t.Context(), bson.D{{Key: "by", Value: bson.D{{Key: "$exists", Value: true}}}},
		bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: time.Unix(0, 0)}}}})
	require.NoError(t, err)
	held, err := mongoq.KeepOnce(t.Context(), store, bson.NewObjectID())
	require.NoError(t, err)
	require.True(t, held)
}

// A partition goes when nothing in it has to be kept any longer, and not before; others stay.
func TestAPartitionIsDroppedWhenAllInItMayBeForgotten(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openParted(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		kept := map[string]bson.ObjectID{}
		for name, d := range map[string]time.Duration{"short": 0, "hours": 3 * time.Hour, "forever": mongoq.KeepForever} {
			kept[name] = push(t, q, name)
			var opts []mongoq.CommitOption
			if d != 0 {
				opts = append(opts, mongoq.Retain(d))
			}
			require.NoError(t, reserve(t, q).Commit(t.Context(), opts...))
		}
		awaitFiled(t, db)
		e, err := store.Get(t.Context(), kept["short"])
		require.NoError(t, err)
		_, err = db.Collection("mongoq.history.notes").InsertOne(t.Context(), bson.D{{Key: "a", Value: 1}})
		require.NoError(t, err)
		there := func() (names []string) {
			for name, id := range kept {
				if _, err := store.Get(t.Context(), id); err == nil {
					names = append(names, name)
				}
			}
			slices.Sort(names)
			return names
		}
		// Its hour may end at once, or in an hour; then it is kept for an hour, and ten minutes.
		untilHourEnds := e.Processed.Truncate(time.Hour).Add(time.Hour).Sub(e.Processed)
		var told []mongoq.Forgetting
		cfg := mongoq.Config{OnForgetting: func(f mongoq.Forgetting) { told = append(told, f) }}
		keep(t, db, 0, cfg)
		keep(t, db, time.Hour+untilHourEnds, cfg)
		require.Equal(t, []string{"forever", "hours", "short"}, there())
		keep(t, db, time.Hour+untilHourEnds+11*time.Minute, cfg)
		require.Equal(t, []string{"forever", "hours"}, there())
		require.Len(t, told, 3)
		require.EqualValues(t, 1, told[2].Dropped)
		require.EqualValues(t, 1, told[2].Forgotten)
		require.Len(t, told[2].Partitions, 2)
		f, err := store.Forgetting(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, f.Dropped)
		require.Zero(t, f.Lag)
		require.Zero(t, f.Overdue)
		require.Zero(t, f.Undated)
		require.False(t, f.Behind())
		require.GreaterOrEqual(t, f.TTLPasses, int64(0))
		keep(t, db, 24*365*time.Hour, cfg)
		require.Equal(t, []string{"forever"}, there())
		n, err := db.Collection("mongoq.history.notes").CountDocuments(t.Context(), bson.D{})
		require.NoError(t, err)
		require.EqualValues(t, 1, n, "somebody else's")
		// What was dropped is made anew.
		id := push(t, q, "late")
		require.NoError(t, reserve(t, q).Commit(t.Context()))
		awaitFiled(t, db)
		_, err = store.Get(t.Context(), id)
		require.NoError(t, err)
	})
}

// One process at a time keeps a store.
func TestOneProcessKeepsTheHistory(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		first, second := openParted(t, db), openStore(t, db)
		me, other := bson.NewObjectID(), bson.NewObjectID()
		holds := func(s *mongoq.Store, who bson.ObjectID) bool {
			held, err := mongoq.KeepOnce(t.Context(), s, who)
			require.NoError(t, err)
			return held
		}
		require.True(t, holds(first, me))
		require.False(t, holds(second, other))
		require.True(t, holds(first, me), "it renews the lease")
		res, err := db.Collection("mongoq.queues").UpdateMany(t.Context(), bson.D{{Key: "by", Value: me}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: time.Now().Add(-time.Second)}}}})
		require.NoError(t, err)
		require.EqualValues(t, 1, res.ModifiedCount)
		require.True(t, holds(second, other), "it was not renewed")
		require.False(t, holds(first, me))

		var all sync.WaitGroup
		held := make([]bool, 8)
		fresh := openStore(t, db, mongoq.Config{Collection: "fresh"})
		for i := range held {
			all.Go(func() {
				var err error
				if held[i], err = mongoq.KeepOnce(t.Context(), fresh, bson.NewObjectID()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		require.Len(t, slices.DeleteFunc(held, func(h bool) bool { return !h }), 1)
		queues, err := second.Queues(t.Context())
		require.NoError(t, err)
		require.Empty(t, queues, "the lease is no queue")
	})
}

// The retention of what is in partitions is changed: it goes to the partition that is kept for so long.
func TestTheRetentionOfWhatIsInPartitionsIsChanged(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const n = 1300
		store := openParted(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: 5 * time.Hour})
		other := newQueue(t, store, "other", mongoq.QueueConfig{Retention: 5 * time.Hour})
		_, old := someHistory(t, db, "q", 50) // before there were partitions
		ids, err := q.PushMany(t.Context(), slices.Repeat([]any{1}, n))
		require.NoError(t, err)
		commitAll(t, q, n)
		beside := push(t, other, 1)
		require.NoError(t, reserve(t, other).Commit(t.Context()))
		awaitFiledSince(t, db, old)
		kept := func(id bson.ObjectID) time.Duration {
			t.Helper()
			e, err := store.Get(t.Context(), id)
			require.NoError(t, err)
			if e.ExpireAt.IsZero() {
				return mongoq.KeepForever
			}
			return e.ExpireAt.Sub(e.Processed)
		}
		for _, d := range []time.Duration{5 * time.Hour, 48 * time.Hour, 2 * time.Hour, mongoq.KeepForever, time.Hour} {
			for range 2 { // done twice is done
				var told int64
				changed, err := q.History().SetRetention(t.Context(), d, mongoq.OnProgress(func(p mongoq.Progress) { told = p.Done }))
				require.NoError(t, err)
				require.EqualValues(t, n+50, changed, d)
				require.EqualValues(t, n+50, told)
			}
			for _, id := range []bson.ObjectID{ids[0], ids[n/2], ids[n-1], old[0], old[49]} {
				require.Equal(t, d, kept(id))
			}
			require.Equal(t, 5*time.Hour, kept(beside))
			count, err := store.History().Count(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, n+51, count)
			require.Len(t, idSet(collect(t, store.History())), n+51)
			for name, in := range partitionsOf(t, db) {
				if slices.Contains(in, ids[0]) {
					e, err := store.Get(t.Context(), ids[0])
					require.NoError(t, err)
					require.Equal(t, mongoq.PartitionOf(store, e.Processed, d), name)
				}
			}
		}
		changed, err := q.History().SetRetention(t.Context(), 7*time.Hour, mongoq.Limit(3))
		require.NoError(t, err)
		require.EqualValues(t, 3, changed)
		changed, err = store.History().SetRetention(t.Context(), 8*time.Hour, mongoq.IDs(ids[4], beside))
		require.NoError(t, err)
		require.EqualValues(t, 2, changed)
		require.Equal(t, 8*time.Hour, kept(beside))
	})
}

// awaitFiledSince waits until nothing that is finished is left among the queues but those.
func awaitFiledSince(t testing.TB, db *mongo.Database, but []bson.ObjectID) {
	t.Helper()
	require.Eventually(t, func() bool {
		n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{
			{Key: "processed", Value: bson.D{{Key: "$type", Value: "date"}}}, {Key: "_id", Value: bson.D{{Key: "$nin", Value: but}}},
		})
		return err == nil && n == 0
	}, soon, 5*time.Millisecond)
}

// Whoever keeps the history says when forgetting falls behind, and when something can never be forgotten.
func TestForgettingIsWatched(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		at := time.Now()
		insertRaw(t, db, []any{
			finishedDoc("q", at, 1, bson.E{Key: "expireAt", Value: "never"}), finishedDoc("q", at, 2, bson.E{Key: "expireAt", Value: nil}),
			finishedDoc("q", at, 3, bson.E{Key: "expireAt", Value: at.Add(30 * time.Minute)}), finishedDoc("q", at, 4),
		})
		f, err := store.Forgetting(t.Context())
		require.NoError(t, err)
		require.Zero(t, f.Lag)
		require.EqualValues(t, 2, f.Undated)
		require.Zero(t, f.Dropped)
		require.Empty(t, f.Partitions)

		var log transcript
		var told []mongoq.Forgetting
		keep(t, db, time.Hour, mongoq.Config{
			Logger: log.logger(), OnForgetting: func(f mongoq.Forgetting) { told = append(told, f) },
		})
		require.Len(t, told, 1)
		require.InDelta(t, 30*time.Minute, told[0].Lag, float64(time.Minute))
		require.True(t, told[0].Behind())
		require.EqualValues(t, 2, told[0].Undated)
		require.Contains(t, log.String(), "forgetting what is finished has fallen behind")
		require.Contains(t, log.String(), "an expireAt that is no date")
		require.Len(t, collect(t, store.History()), 4, "nothing is forgotten that was not to be")
	})
}

// A page of a partitioned history costs as many keys as it has envelopes, and a few, wherever it lies.
func TestAPageOfAPartitionedHistoryIsCheap(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const each = 3000
		own, s := spied(t, db)
		store := openParted(t, own)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		start := time.Now().Truncate(time.Hour)
		for h := range 4 {
			from := start.Add(time.Duration(-h) * time.Hour)
			coll := db.Collection(mongoq.PartitionOf(store, from, 24*time.Hour))
			_, err := coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{
				Keys:    bson.D{{Key: "q", Value: 1}, {Key: "processed", Value: -1}, {Key: "_id", Value: -1}},
				Options: options.Index().SetName("mongoq_history"),
			})
			require.NoError(t, err)
			_, err = coll.InsertMany(t.Context(), rawDocs(t, each, func(i int) bson.D {
				return finishedDoc([]string{"q", "other"}[i%2], from.Add(time.Duration(i)*time.Second), i)
			}))
			require.NoError(t, err)
		}
		next := ""
		for page := range 4 * each / 2 / 50 {
			s.forget()
			p, err := q.History().Page(t.Context(), mongoq.Cursor(next))
			require.NoError(t, err)
			require.Len(t, p.Envelopes, 50)
			next = p.Next
			if page%29 > 1 {
				continue
			}
			keys := int64(0)
			for _, c := range s.commands() {
				// The store also looks for transactions that were left open, in a collection of its own, every two seconds.
				if about, _ := c.Lookup("find").StringValueOK(); about != "" && about != "mongoq.transactions" {
					keys += explain(t, db, c).keys
				}
			}
			require.LessOrEqual(t, keys, int64(60), "page %d", page)
		}
		require.Empty(t, next)
	})
}

// Answers that are lost, on the way there and back, at each step: each is committed once.
func TestAPartitionedCommitWhoseAnswersAreLost(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, kind mongotest.Kind) {
		db := mongotest.Database(t, kind)
		store := openParted(t, db)
		total := 0
		for _, command := range []string{"aggregate", "insert", "update", "delete", "commitTransaction"} {
			for _, c := range []struct{ n, times int }{{1, 1}, {20, 1}, {20, 2}} {
				for _, back := range []bool{false, true} {
					lossy := newLossy()
					own := openParted(t, anotherClient(t, db, options.Client().SetDialer(lossy)))
					q := newQueue(t, own, "q", mongoq.QueueConfig{Retention: time.Hour, Lease: time.Minute})
					for i := range c.n {
						push(t, q, i)
					}
					rs, err := q.ReserveMany(t.Context(), c.n)
					require.NoError(t, err)
					require.Len(t, rs, c.n)
					if back {
						lossy.LoseReply(command, c.times)
					} else {
						lossy.LoseRequest(command, c.times)
					}
					if c.n == 1 {
						err = rs[0].Commit(t.Context())
					} else {
						err = q.CommitMany(t.Context(), rs)
					}
					require.NoError(t, err, "%s %v %v", command, c, back)
					total += c.n
				}
			}
		}
		require.Len(t, idSet(collect(t, store.History())), total)
		count, err := store.History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, total, count)
		_, err = newQueue(t, store, "q").TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}

// Two reservations of one envelope in one round: the one that lost its lease is told so.
func TestAStaleReservationBesideItsSuccessorInOneRound(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openParted(t, db), "q", mongoq.QueueConfig{Retention: time.Hour})
		id := push(t, q, 1)
		stale := reserve(t, q)
		setDue(t, db, id, -time.Second)
		held := reserve(t, q)
		err := q.CommitMany(t.Context(), []*mongoq.Reservation{stale, held})
		var be *mongoq.BatchError
		require.ErrorAs(t, err, &be)
		require.Len(t, be.Failed, 1)
		require.Zero(t, be.Failed[0].Index)
		require.ErrorIs(t, be.Failed[0].Err, mongoq.ErrLeaseLost)
		awaitFiled(t, db)
		require.Len(t, collect(t, q.History()), 1)
	})
}

// A retention that is changed where it is follows the partition, not the queue's spread.
func TestARetentionInAPartitionIsNotSpread(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openParted(t, db), "q", mongoq.QueueConfig{Retention: 2 * time.Hour})
		id := push(t, q, 1)
		require.NoError(t, reserve(t, q).Commit(t.Context()))
		awaitFiled(t, db)
		plain := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{RetentionSpread: 24 * time.Hour})
		n, err := plain.History().SetRetention(t.Context(), 2*time.Hour)
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		e, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, 2*time.Hour, e.ExpireAt.Sub(e.Processed))
	})
}
