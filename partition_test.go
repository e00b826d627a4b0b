package mongoq_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// openParted opens a store whose history has a partition for each hour.
func openParted(t testing.TB, db *mongo.Database) *mongoq.Store {
	t.Helper()
	return openStore(t, db, mongoq.Config{PartitionHistory: mongoq.PartitionByHour})
}

// partitionsOf are the partitions that stand, with the ids in each.
func partitionsOf(t testing.TB, db *mongo.Database) map[string][]bson.ObjectID {
	t.Helper()
	names, err := db.ListCollectionNames(t.Context(), bson.D{{Key: "name", Value: bson.Regex{Pattern: `^mongoq\.history\.`}}})
	require.NoError(t, err)
	all := map[string][]bson.ObjectID{}
	for _, name := range names {
		all[name] = idsIn(t, db.Collection(name))
	}
	return all
}

func idsIn(t testing.TB, coll *mongo.Collection) (ids []bson.ObjectID) {
	t.Helper()
	cur, err := coll.Find(t.Context(), bson.D{}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	require.NoError(t, err)
	var docs []struct {
		ID bson.ObjectID `bson:"_id"`
	}
	require.NoError(t, cur.All(t.Context(), &docs))
	for _, d := range docs {
		ids = append(ids, d.ID)
	}
	return ids
}

// awaitFiled waits until nothing that is finished is left among the queues.
func awaitFiled(t testing.TB, db *mongo.Database) {
	t.Helper()
	awaitFiledSince(t, db, []bson.ObjectID{})
}

// commitAll commits what is in the queue, in rounds.
func commitAll(t testing.TB, q *mongoq.Queue, n int) {
	t.Helper()
	for n > 0 {
		rs, err := q.ReserveMany(t.Context(), n)
		require.NoError(t, err)
		require.NoError(t, q.CommitMany(t.Context(), rs))
		n -= len(rs)
	}
}

// What is committed, alone, in rounds and in a transaction, is in the history at once, and then in its partition, with all
// that it was.
func TestAPartitionedHistory(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openParted(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: 24 * time.Hour, RetentionSpread: time.Hour, Retry: retries(3)})
		other := newQueue(t, store, "other", mongoq.QueueConfig{Retention: mongoq.KeepForever})

		id := push(t, q, bson.D{{Key: "$a.b", Value: 1}}, mongoq.Headers(someHeaders), mongoq.ID(bson.NewObjectID()))
		require.NoError(t, reserve(t, q).Rollback(t.Context(), fmt.Errorf("not yet"), mongoq.After(time.Millisecond)))
		r := reserve(t, q)
		require.NoError(t, r.Commit(t.Context(), mongoq.Result("so it is")))
		e, err := store.Get(t.Context(), id)
		require.NoError(t, err, "from its commit on")
		require.NotZero(t, e.Processed)
		awaitFiled(t, db)
		filed, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, e, filed, "in its partition as it was")
		require.Equal(t, "so it is", filed.Result.StringValue())
		require.Equal(t, someHeaders, filed.Headers)
		require.Len(t, filed.Failures, 1)
		require.Equal(t, 2, filed.Deliveries)
		require.Equal(t, mongoq.OutcomeDone, filed.Outcome())
		require.Equal(t, 24*time.Hour, filed.ExpireAt.Sub(filed.Processed))
		_, err = other.Get(t.Context(), id)
		require.ErrorIs(t, err, mongoq.ErrNotFound)
		in := mongoq.PartitionOf(store, filed.Processed, 24*time.Hour)
		require.Equal(t, []bson.ObjectID{id}, partitionsOf(t, db)[in])

		// In rounds, of several queues and retentions.
		for i := range 250 {
			push(t, q, i)
		}
		for i := range 20 {
			push(t, other, i)
		}
		commitAll(t, q, 250)
		commitAll(t, other, 20)
		awaitFiled(t, db)
		all := partitionsOf(t, db)
		require.GreaterOrEqual(t, len(all), 2)
		total := 0
		for name, ids := range all {
			total += len(ids)
			if strings.HasSuffix(name, ".forever") {
				require.LessOrEqual(t, len(ids), 20)
			}
		}
		require.Equal(t, 271, total)

		// Read, counted, chosen.
		es, pages := allPages(t, q.History(), mongoq.Limit(40))
		require.Len(t, es, 251)
		require.Equal(t, 7, pages)
		require.Len(t, idSet(es), 251)
		require.True(t, slices.IsSortedFunc(es, func(a, b *mongoq.Envelope) int { return b.Processed.Compare(a.Processed) }))
		es, _ = allPages(t, store.History(), mongoq.Limit(100))
		require.Len(t, idSet(es), 271)
		n, err := q.History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 251, n)
		n, err = store.History().Count(t.Context(), mongoq.Header("$set", "$q"))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		n, err = store.History().Count(t.Context(), mongoq.IDs(id, bson.NewObjectID()))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		n, err = store.History().Count(t.Context(), mongoq.Until(filed.Processed))
		require.NoError(t, err)
		require.Zero(t, n)
		st, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 251, st.Processed)
		queues, err := store.Queues(t.Context())
		require.NoError(t, err)
		require.Len(t, queues, 2)

		// Done again, once by an id.
		again, err := q.History().Replay(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, id, reserve(t, q).ReplayOf)
		require.NotEqual(t, id, again)
		for range 2 {
			n, err = other.History().ReplayMany(t.Context(), "again")
			require.NoError(t, err)
			require.EqualValues(t, 20, n)
		}
		commitAll(t, other, 20)
		awaitFiled(t, db)
		n, err = other.History().ReplayMany(t.Context(), "again")
		require.NoError(t, err)
		require.EqualValues(t, 20, n, "they are there: in the history")
		_, err = other.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty)

		// A push under an id that is done is the same push, or a duplicate.
		for _, push := range []func(any) error{
			func(v any) error {
				_, err := q.Push(t.Context(), v, mongoq.Headers(someHeaders), mongoq.ID(id))
				return err
			},
			func(v any) error {
				_, err := q.PushMany(t.Context(), []any{mongoq.With(v, mongoq.Headers(someHeaders), mongoq.ID(id))})
				return err
			},
		} {
			require.NoError(t, push(bson.D{{Key: "$a.b", Value: 1}}))
			require.ErrorIs(t, push("something else"), mongoq.ErrDuplicate)
		}
		e, err = store.Get(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, filed, e)

		require.ErrorIs(t, q.Remove(t.Context(), id), mongoq.ErrNotFound)
	})
}

// Who lost the lease changes nothing of what is in a partition.
func TestWhatIsFiledIsNeverTouchedAgain(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openParted(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		for _, together := range []bool{false, true} {
			// One that is told it lost asks the server no more: each verb has a reservation of its own.
			verbs := []func(r *mongoq.Reservation) error{
				func(r *mongoq.Reservation) error { return r.Commit(t.Context()) },
				func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), nil) },
				func(r *mongoq.Reservation) error { return r.Release(t.Context()) },
				func(r *mongoq.Reservation) error { return r.Extend(t.Context(), time.Minute) },
				func(r *mongoq.Reservation) error { return r.MoveToQ(t.Context(), "elsewhere") },
				func(r *mongoq.Reservation) error { return r.DeadLetter(t.Context(), nil) },
				func(r *mongoq.Reservation) error {
					return q.CommitMany(t.Context(), []*mongoq.Reservation{r})
				},
			}
			stale := reserveAll(t, q, len(verbs))
			for _, r := range stale {
				setDue(t, db, r.ID, -time.Second)
			}
			rs, err := q.ReserveMany(t.Context(), len(verbs))
			require.NoError(t, err)
			require.Len(t, rs, len(verbs))
			if together {
				require.NoError(t, q.CommitMany(t.Context(), rs))
			} else {
				for _, r := range rs {
					require.NoError(t, r.Commit(t.Context()))
				}
			}
			awaitFiled(t, db)
			for i, verb := range verbs {
				before, err := store.Get(t.Context(), stale[i].ID)
				require.NoError(t, err)
				require.ErrorIs(t, verb(stale[i]), mongoq.ErrLeaseLost, i)
				after, err := store.Get(t.Context(), stale[i].ID)
				require.NoError(t, err)
				require.Equal(t, before, after)
			}
		}
		count, err := store.History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 14, count)
	})
}

// childFiles commits, alone or together, and says when the command that it is told of is held on its way there or back.
func childFiles(ctx context.Context, t *testing.T, spec childSpec, say func(childSays)) {
	lossy := newLossy()
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI).SetDialer(lossy))
	require.NoError(t, err)
	q := newQueue(t, openParted(t, client.Database(spec.DB)), "q", mongoq.QueueConfig{Retention: time.Hour, Lease: spec.Lease})
	rs, err := q.ReserveMany(ctx, spec.Concurrency)
	require.NoError(t, err)
	hold := lossy.HoldRequest
	if spec.Back {
		hold = lossy.HoldReply
	}
	held := hold(spec.Command)
	go func() {
		<-held.Reached()
		say(childSays{What: "held"})
	}()
	if spec.Concurrency == 1 {
		say(childSays{What: "settled", Text: fmt.Sprint(rs[0].Commit(ctx))})
	} else {
		say(childSays{What: "settled", Text: fmt.Sprint(q.CommitMany(ctx, rs))})
	}
	<-ctx.Done()
}

// A process is killed at each step of a commit into a partition: before the server has the command, and before its answer
// is there. Each envelope is either in its queue or in the history, once; and what is not done is done by another.
func TestAProcessIsKilledAtEachStepOfAPartitionedCommit(t *testing.T) {
	t.Parallel()
	type step struct {
		command string
		n       int
	}
	for kind, steps := range map[mongotest.Kind][]step{
		mongotest.ReplicaSet: {
			{"aggregate", 20}, {"createIndexes", 20}, {"insert", 20}, {"delete", 20}, {"commitTransaction", 20},
			{"update", 1}, {"insert", 1}, {"delete", 1}, {"commitTransaction", 1},
		},
		mongotest.Standalone: {
			{"update", 20}, {"aggregate", 20}, {"createIndexes", 20}, {"insert", 20}, {"delete", 20},
			{"update", 1}, {"insert", 1}, {"delete", 1},
		},
	} {
		for _, s := range steps {
			for _, back := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/%s/%d/%v", kind, s.command, s.n, back), func(t *testing.T) {
					t.Parallel()
					db := mongotest.Database(t, kind)
					store := openParted(t, db)
					q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour, Lease: time.Minute})
					ids, err := q.PushMany(t.Context(), slices.Repeat([]any{1}, s.n))
					require.NoError(t, err)
					c := spawn(t, db, childSpec{Role: "files", Lease: time.Minute, Concurrency: s.n, Command: s.command, Back: back})
					c.hears(t, "held", 1)
					c.dies(t, db)
					finished := onceEach(t, store, ids)
					t.Logf("%d of %d were finished", finished, s.n)

					// The keeper puts what was left into its partition. What was not finished is done when its lease has ended.
					_, err = db.Collection("mongoq").UpdateMany(t.Context(), bson.D{{Key: "processed", Value: nil}},
						bson.D{{Key: "$set", Value: bson.D{{Key: "when", Value: time.Now().Add(-time.Second)}}}})
					require.NoError(t, err)
					for left := s.n - finished; left > 0; {
						ctx, cancel := context.WithTimeout(t.Context(), late)
						rs, err := q.ReserveMany(ctx, left)
						cancel()
						require.NoError(t, err)
						require.NoError(t, q.CommitMany(t.Context(), rs))
						left -= len(rs)
					}
					_, err = db.Collection("mongoq.queues").UpdateOne(t.Context(),
						bson.D{{Key: "_id", Value: bson.D{{Key: "store", Value: "keeper"}}}},
						bson.D{{Key: "$set", Value: bson.D{{Key: "since", Value: time.Now().Add(-time.Hour)}, {Key: "until", Value: time.Unix(0, 0)}}}}, options.UpdateOne().SetUpsert(true))
					require.NoError(t, err)
					keeper := openParted(t, db)
					mongoq.Ahead(keeper, time.Minute)
					held, err := mongoq.KeepOnce(t.Context(), keeper, bson.NewObjectID())
					require.NoError(t, err)
					require.True(t, held)
					require.Equal(t, s.n, onceEach(t, store, ids))
					awaitFiled(t, db)
					seen := map[bson.ObjectID]int{}
					for _, in := range partitionsOf(t, db) {
						for _, id := range in {
							seen[id]++
						}
					}
					require.Len(t, seen, s.n)
					for id, n := range seen {
						require.Equal(t, 1, n, id.Hex())
					}
				})
			}
		}
	}
}

// onceEach checks that each envelope is either in its queue or in the history, once, and says how many are in the history.
func onceEach(t testing.TB, store *mongoq.Store, ids []bson.ObjectID) int {
	t.Helper()
	listed := map[bson.ObjectID]int{}
	for e, err := range store.History().List(t.Context()) {
		require.NoError(t, err)
		listed[e.ID]++
	}
	finished := 0
	for _, id := range ids {
		e, err := store.Get(t.Context(), id)
		require.NoError(t, err, id.Hex())
		if e.Processed.IsZero() {
			require.Zero(t, listed[id])
		} else {
			require.Equal(t, 1, listed[id])
			finished++
		}
	}
	count, err := store.History().Count(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, finished, count)
	require.Len(t, listed, finished)
	return finished
}

// Each envelope that was there at the first page is on one page, while many more are committed, by rounds and alone, and
// put into partitions.
func TestPagesOfAPartitionedHistoryNeitherSkipNorRepeat(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		const before, during = 1000, 10_000
		store := openParted(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour})
		_, err := q.PushMany(t.Context(), slices.Repeat([]any{1}, before+during))
		require.NoError(t, err)
		commitAll(t, q, before)
		want := idSet(collect(t, q.History()))
		require.Len(t, want, before)
		var wg sync.WaitGroup
		var committed atomic.Int64
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for i := range 4 {
			wg.Go(func() {
				for {
					rs, err := q.ReserveMany(ctx, 100)
					if err != nil { // all are done
						return
					}
					if i == 0 {
						for _, r := range rs[:len(rs)/10] {
							if err := r.Commit(t.Context()); err != nil {
								t.Error(err)
							}
						}
						rs = rs[len(rs)/10:]
						committed.Add(int64(100 - len(rs)))
					}
					if err := q.CommitMany(t.Context(), rs); err != nil {
						t.Error(err)
						cancel()
					}
					if committed.Add(int64(len(rs))) >= during {
						cancel()
					}
				}
			})
		}
		for turn := 0; turn < 3 || ctx.Err() == nil; turn++ {
			for _, h := range []*mongoq.History{q.History(), store.History()} {
				all, _ := allPages(t, h, mongoq.Limit(250))
				seen := idSet(all)
				require.Len(t, all, len(seen), "some come twice")
				for id := range want {
					require.Equal(t, 1, seen[id], "one is missing: %s", id.Hex())
				}
				want = seen
			}
		}
		wg.Wait()
		require.Len(t, collect(t, q.History()), before+during)
		count, err := q.History().Count(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, before+during, count)
	})
}

func collect(t testing.TB, h *mongoq.History) (all []*mongoq.Envelope) {
	t.Helper()
	for e, err := range h.List(t.Context()) {
		require.NoError(t, err)
		all = append(all, e)
	}
	return all
}
