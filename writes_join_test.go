package mongoq

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// The last part may come while the whole is looked at, from a process that is killed before it closes it: the look gives
// the whole back to be looked at soon, not when its next look would be.
func TestAWholeThatWasCompletedWhileItWasHeldIsLookedAtSoon(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		coll := db.Collection("c")
		part := func() bson.D { return bson.D{field("id", bson.NewObjectID())} }
		late := part()
		for _, c := range []struct {
			name       string
			got, ended bson.A
			missing    bson.A
			wait       time.Duration
		}{
			{"parts are missing", bson.A{part()}, bson.A{}, nil, lookLast},
			{"all are there", bson.A{part(), part()}, bson.A{}, nil, lookSoon},
			{"one was ended", bson.A{part()}, bson.A{part()}, nil, lookSoon},
			{"the look misses the last", bson.A{part()}, bson.A{}, bson.A{part()}, lookSoon},
			{"the look misses one that has come", bson.A{late}, bson.A{}, bson.A{late}, lookLast},
		} {
			id, lease := bson.NewObjectID(), bson.NewObjectID()
			_, err := coll.InsertOne(t.Context(), bson.D{
				field("_id", id), field("q", "join"), field("when", time.Now()), field("reserved", time.Now()), field("lease", lease),
				field("join", bson.D{field("fork", bson.NewObjectID()), field("n", 2), field("got", c.got), field("ended", c.ended), field("looks", 9)}),
			})
			require.NoError(t, err)
			missing := c.missing
			if missing == nil {
				missing = bson.A{}
			}
			before := time.Now()
			res, err := coll.UpdateOne(t.Context(), holder(id, lease), holdUpdate(lease, lookLast, missing, ToDeadLetter))
			require.NoError(t, err)
			require.EqualValues(t, 1, res.MatchedCount)
			var held struct {
				When     time.Time
				Reserved *time.Time
			}
			require.NoError(t, coll.FindOne(t.Context(), bson.D{field("_id", id)}).Decode(&held))
			require.Nil(t, held.Reserved, c.name)
			require.WithinRange(t, held.When, before.Add(c.wait-time.Second), time.Now().Add(c.wait+time.Second), c.name)
		}
	})
}

// A whole that has gone on has no parts to count: closing it again matches nothing, and fails nobody beside it.
func TestClosingAWholeThatHasGoneOnIsNoError(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		coll := db.Collection("c")
		gone, odd := whole{id: bson.NewObjectID(), fork: bson.NewObjectID()}, whole{id: bson.NewObjectID(), fork: bson.NewObjectID()}
		_, err := coll.InsertMany(t.Context(), []any{
			bson.D{field("_id", gone.id), field("q", "end"), field("when", time.Now())},
			bson.D{field("_id", odd.id), field("q", "join"), field("join", bson.D{
				field("fork", odd.fork), field("n", "two"), field("got", "none"), field("ended", 0),
			})},
		})
		require.NoError(t, err)
		for _, w := range []whole{gone, odd} {
			for _, filter := range []bson.D{closeFilter(w), reviveFilter(w), completeFilter(w)} {
				res, err := coll.UpdateOne(t.Context(), filter, closeUpdate())
				require.NoError(t, err)
				require.Zero(t, res.MatchedCount)
			}
			// However the server orders its questions.
			n, err := coll.CountDocuments(t.Context(), bson.D{field("$expr", settled())})
			require.NoError(t, err)
			require.Zero(t, n)
		}
	})
}
