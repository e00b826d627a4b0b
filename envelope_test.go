package mongoq_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// everyValue is what may be a payload, a replaced payload, or a result.
func everyValue(t testing.TB) map[string]any {
	t.Helper()
	decimal, err := bson.ParseDecimal128("-1234567890.123456789012345678901234")
	require.NoError(t, err)
	type nested struct {
		Name string   `bson:"name"`
		Tags []string `bson:"tags"`
		In   *nested  `bson:"in,omitempty"`
	}
	return map[string]any{
		"object":                  bson.D{{Key: "b", Value: 1}, {Key: "a", Value: bson.D{{Key: "c", Value: "x"}}}},
		"struct":                  nested{Name: "x", Tags: []string{"a", "b"}, In: &nested{}},
		"map":                     map[string]any{"one": int64(1)},
		"array":                   bson.A{1, "two", nil, bson.D{}, bson.A{}},
		"slice":                   []int32{3, 2, 1},
		"string":                  "text with \x00 NUL and ünïçødé ✓",
		"int32":                   int32(-7),
		"int64":                   int64(math.MaxInt64),
		"double":                  3.25,
		"NaN":                     math.NaN(),
		"infinity":                math.Inf(-1),
		"negative zero":           math.Copysign(0, -1),
		"Decimal128":              decimal,
		"bytes":                   []byte{0, 1, 2, 255},
		"UUID":                    bson.Binary{Subtype: 4, Data: bytes.Repeat([]byte{7}, 16)},
		"true":                    true,
		"false":                   false,
		"null":                    nil,
		"date":                    time.Date(1969, 7, 20, 20, 17, 40, 123e6, time.UTC),
		"ObjectID":                bson.NewObjectID(),
		"regular expression":      bson.Regex{Pattern: "^a.*$", Options: "i"},
		"timestamp":               bson.Timestamp{T: 1, I: 2},
		"code":                    bson.JavaScript("function() {}"),
		"MinKey":                  bson.MinKey{},
		"empty object":            bson.D{},
		"empty array":             bson.A{},
		"empty string":            "",
		"empty bytes":             []byte{},
		"zero":                    0,
		"a path":                  "$payload.x",
		"a variable":              "$$ROOT",
		"a removal":               "$$REMOVE",
		"a dollar":                "$",
		"paths inside":            bson.D{{Key: "a", Value: "$q"}, {Key: "b", Value: bson.A{"$$NOW", "$lease"}}},
		"an operator":             bson.D{{Key: "$literal", Value: 1}},
		"another operator":        bson.D{{Key: "$add", Value: bson.A{1, "$when"}}},
		"an update":               bson.D{{Key: "$set", Value: bson.D{{Key: "q", Value: "stolen"}}}},
		"keys with dots":          bson.D{{Key: "a.b", Value: 1}, {Key: ".", Value: 2}, {Key: "a..b.", Value: bson.D{{Key: "x.y", Value: 3}}}},
		"keys with dollars":       bson.D{{Key: "$", Value: 1}, {Key: "$a.b", Value: 2}, {Key: "a$", Value: 3}, {Key: "deep", Value: bson.A{bson.D{{Key: "$x", Value: 4}}}}},
		"a reference":             bson.D{{Key: "$ref", Value: "c"}, {Key: "$id", Value: bson.NewObjectID()}, {Key: "$db", Value: "d"}},
		"an unfinished reference": bson.D{{Key: "$id", Value: 1}, {Key: "$db", Value: 2}},
		"an empty key":            bson.D{{Key: "", Value: 1}},
		"a key twice":             bson.D{{Key: "k", Value: 1}, {Key: "k", Value: 2}},
		"an _id":                  bson.D{{Key: "_id", Value: bson.A{1}}, {Key: "q", Value: "x"}, {Key: "when", Value: bson.A{}}},
	}
}

var someHeaders = map[string]string{"plain": "v", "a.b": "1", "$set": "$q", "$$NOW": "", ".": ".", "$a.b.": "$$ROOT", "ü": "✓"}

// same sees that a value has the BSON type and the bytes of what was given.
func same(t testing.TB, name string, want any, got bson.RawValue) {
	t.Helper()
	if want == nil {
		require.Equal(t, bson.TypeNull, got.Type, name)
		require.Empty(t, got.Value, name)
		return
	}
	typ, value, err := bson.MarshalValue(want)
	require.NoError(t, err, name)
	require.Equal(t, typ, got.Type, name)
	require.True(t, bytes.Equal(value, got.Value), "%s came back as %.300v", name, got)
}

func TestValuesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		for _, headers := range []map[string]string{nil, someHeaders} {
			name := fmt.Sprintf("%d headers", len(headers))
			q := newQueue(t, store, name, mongoq.QueueConfig{Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} }})
			to := newQueue(t, store, name+", moved", mongoq.QueueConfig{Retention: time.Hour})
			values := everyValue(t)
			var names []string
			var payloads []any
			for name, v := range values {
				names, payloads = append(names, name), append(payloads, v)
			}
			ids, err := q.PushMany(t.Context(), payloads, mongoq.Headers(headers))
			require.NoError(t, err)
			each := func(q *mongoq.Queue, claim func() []*mongoq.Reservation, then func(*mongoq.Reservation, any)) {
				t.Helper()
				rs := claim()
				require.Len(t, rs, len(names))
				for _, r := range rs {
					name := names[slices.Index(ids, r.ID)]
					same(t, name, values[name], r.Payload)
					require.Equal(t, headers, r.Headers, name)
					then(r, values[name])
				}
			}
			together := func(q *mongoq.Queue) func() []*mongoq.Reservation {
				return func() []*mongoq.Reservation {
					rs, err := q.ReserveMany(t.Context(), len(names))
					require.NoError(t, err)
					return rs
				}
			}
			singly := func(q *mongoq.Queue) func() []*mongoq.Reservation {
				return func() (rs []*mongoq.Reservation) {
					for range names {
						rs = append(rs, tryReserve(t, q))
					}
					return rs
				}
			}
			each(q, together(q), func(r *mongoq.Reservation, _ any) {
				require.NoError(t, r.Rollback(t.Context(), nil, mongoq.Payload("something else")))
			})
			for range names {
				r := tryReserve(t, q)
				require.Equal(t, "something else", payloadOf[string](t, &r.Envelope))
				name := names[slices.Index(ids, r.ID)]
				require.NoError(t, r.Rollback(t.Context(), nil, mongoq.Payload(values[name])), name)
			}
			each(q, singly(q), func(r *mongoq.Reservation, v any) {
				require.NoError(t, r.MoveToQ(t.Context(), to.Name(), mongoq.Payload(v)))
			})
			each(to, together(to), func(r *mongoq.Reservation, v any) {
				require.NoError(t, r.Commit(t.Context(), mongoq.Result(v)))
			})
			for i, id := range ids {
				e, err := to.Get(t.Context(), id)
				require.NoError(t, err)
				same(t, names[i], payloads[i], e.Payload)
				same(t, names[i], payloads[i], e.Result)
				require.Equal(t, headers, e.Headers)
				require.False(t, e.Processed.IsZero())
			}
		}
	})
}

func TestDecodeGivesThePayload(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q")
		type job struct {
			Name string
			At   time.Time
			N    []int
		}
		want := job{Name: "x", At: time.Now().UTC().Truncate(time.Millisecond), N: []int{1, 2}}
		push(t, q, want)
		e, err := q.TryPop(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, payloadOf[job](t, e))
		var n int
		err = e.Decode(&n)
		require.ErrorContains(t, err, e.ID.Hex())
		require.ErrorContains(t, err, "*int")
	})
}

// The tests with envelopes of many megabytes run one after the other: mongod's cache is small.
//
//nolint:paralleltest // see above
func TestLargeEnvelopes(t *testing.T) {
	t.Parallel()
	for _, kind := range []mongotest.Kind{mongotest.ReplicaSet, mongotest.Standalone} {
		for _, c := range []struct {
			name string
			test func(*testing.T, *mongo.Database)
		}{
			{"values come back as they were", largeValuesComeBack},
			{"too large is refused before anything is sent", tooLargeIsRefused},
			{"at the limit it goes every way", atTheLimitEveryWay},
			{"too large to be claimed is set aside", tooLargeToBeClaimed},
		} {
			t.Run(kind.String()+"/"+c.name, func(t *testing.T) { c.test(t, mongotest.Database(t, kind)) })
		}
	}
}

func largeValuesComeBack(t *testing.T, db *mongo.Database) {
	store := openStore(t, db)
	q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour, Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} }})
	text, data := strings.Repeat("$ab", 5<<20), bytes.Repeat([]byte{1}, 15<<20)
	object := bson.D{{Key: "$a.b", Value: text}}

	id := push(t, q, text, mongoq.Headers(someHeaders), mongoq.ID(bson.NewObjectID()))
	r := reserve(t, q)
	same(t, "pushed", text, r.Payload)
	require.NoError(t, r.Rollback(t.Context(), errors.New("x"), mongoq.Payload(data)))
	r = reserve(t, q)
	same(t, "patched", data, r.Payload)
	require.NoError(t, r.MoveToQ(t.Context(), "q", mongoq.Payload(object)))
	r = reserve(t, q)
	same(t, "moved", object, r.Payload)
	require.Equal(t, someHeaders, r.Headers)
	require.NoError(t, r.MoveToQ(t.Context(), "q", mongoq.Payload("small")))
	require.NoError(t, reserve(t, q).Commit(t.Context(), mongoq.Result(data)))
	e, err := q.Get(t.Context(), id)
	require.NoError(t, err)
	same(t, "result", data, e.Result)
}

func tooLargeIsRefused(t *testing.T, db *mongo.Database) {
	db, w := watched(t, db)
	q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retention: time.Hour})
	huge := bytes.Repeat([]byte{1}, mongoq.MaxEnvelopeSize)
	refused := func(what string, err error) {
		t.Helper()
		require.ErrorIs(t, err, mongoq.ErrPayloadTooLarge, what)
		require.ErrorContains(t, err, fmt.Sprint(mongoq.MaxEnvelopeSize), what)
		require.Empty(t, w.take("insert", "update", "delete", "findAndModify", "bulkWrite"), what)
	}
	push(t, q, "small", mongoq.Headers(map[string]string{"k": "v"}))
	r := reserve(t, q)
	w.take()

	_, err := q.Push(t.Context(), huge)
	refused("Push", err)
	_, err = q.Push(t.Context(), "small", mongoq.Headers(map[string]string{"k": string(huge)}))
	refused("Push with headers", err)
	_, err = q.PushMany(t.Context(), []any{huge, huge})
	refused("PushMany", err)
	refused("Rollback", r.Rollback(t.Context(), nil, mongoq.Payload(huge)))
	refused("Rollback with headers", r.Rollback(t.Context(), nil, mongoq.AddHeaders(map[string]string{"h": string(huge)})))
	refused("MoveToQ", r.MoveToQ(t.Context(), "to", mongoq.Payload(huge)))
	refused("MoveToQ with headers", r.MoveToQ(t.Context(), "to", mongoq.Headers(map[string]string{"h": string(huge)})))
	refused("Commit", r.Commit(t.Context(), mongoq.Result(huge)))

	require.NoError(t, r.Commit(t.Context()), "it settled nothing")
}

// What failures, moves and the claims themselves add fits into what the limit leaves.
func atTheLimitEveryWay(t *testing.T, db *mongo.Database) {
	store := openStore(t, db)
	long := func(c string) string { return strings.Repeat(c, mongoq.MaxQueueName) }
	cfg := mongoq.QueueConfig{
		DeadLetter: long("d"), Retention: mongoq.KeepForever, Lease: time.Minute, TTL: time.Hour,
		Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} },
	}
	q, to := newQueue(t, store, long("q"), cfg), newQueue(t, store, long("t"), cfg)
	cfg.DeadLetter = "the dead of the dead"
	dead := newQueue(t, store, long("d"), cfg)
	own := func() []mongoq.PushOption {
		return []mongoq.PushOption{mongoq.ID(bson.NewObjectID()), mongoq.Headers(map[string]string{"k": "v"})}
	}
	raw, err := db.Collection("mongoq").FindOne(t.Context(), bson.D{{Key: "_id", Value: push(t, q, []byte{}, own()...)}}).Raw()
	require.NoError(t, err)
	require.NoError(t, reserve(t, q).Commit(t.Context()))
	most := bytes.Repeat([]byte{1}, mongoq.MaxEnvelopeSize-len(raw))

	_, err = q.Push(t.Context(), append(most, 1), own()...)
	require.ErrorIs(t, err, mongoq.ErrPayloadTooLarge)
	id := push(t, q, most, own()...)
	raw, err = db.Collection("mongoq").FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	require.NoError(t, err)
	require.Len(t, raw, mongoq.MaxEnvelopeSize)

	cause := errors.New(strings.Repeat("c", 2<<10))
	once := func() {
		t.Helper()
		require.NoError(t, reserve(t, q).Rollback(t.Context(), cause))
		require.NoError(t, reserve(t, q).MoveToQ(t.Context(), to.Name()))
		require.NoError(t, reserve(t, to).MoveToQ(t.Context(), q.Name()))
	}
	once()

	// Its way is long. It goes that without its payload, for the test's speed, and gets it back by hand.
	require.NoError(t, reserve(t, q).Rollback(t.Context(), cause, mongoq.Payload(nil)))
	for range 12 {
		require.NoError(t, reserve(t, q).Rollback(t.Context(), cause))
	}
	for i := range 40 {
		a, b := q, to
		if i%2 == 1 {
			a, b = to, q
		}
		require.NoError(t, reserve(t, a).MoveToQ(t.Context(), b.Name()))
	}
	require.Eventually(t, func() bool { // while mongod's cache is full, it refuses a write of that size
		_, err := db.Collection("mongoq").UpdateByID(t.Context(), id, bson.D{{Key: "$set", Value: bson.D{{Key: "payload", Value: most}}}})
		return err == nil
	}, time.Minute, 100*time.Millisecond)
	once()

	r := reserve(t, q)
	require.Len(t, r.Failures, 10)
	require.Len(t, r.Hops, 32)
	require.Equal(t, 44, r.Moves)
	require.NoError(t, r.Rollback(t.Context(), cause, mongoq.Payload(most)), "no larger than it was")
	require.NoError(t, reserve(t, q).DeadLetter(t.Context(), cause))
	r = reserve(t, dead)
	same(t, "payload", most, r.Payload)
	require.NoError(t, r.Commit(t.Context()))
	e, err := dead.Get(t.Context(), id)
	require.NoError(t, err)
	require.False(t, e.Processed.IsZero())
}

// byHand is an envelope that somebody wrote, of so many bytes in all.
func byHand(t testing.TB, q string, prio, size int) bson.D {
	t.Helper()
	doc := func(n int) bson.D {
		return bson.D{
			{Key: "_id", Value: bson.NewObjectID()}, {Key: "q", Value: q}, {Key: "when", Value: time.Now().Add(-time.Minute)},
			{Key: "prio", Value: prio}, {Key: "payload", Value: bytes.Repeat([]byte{1}, n)},
		}
	}
	raw, err := bson.Marshal(doc(0))
	require.NoError(t, err)
	return doc(size - len(raw))
}

func tooLargeToBeClaimed(t *testing.T, db *mongo.Database) {
	const size = 16<<20 - 10
	store := openStore(t, db)
	dead := newQueue(t, store, "dead")
	for _, c := range []struct {
		name string
		take func(q *mongoq.Queue) []string
	}{
		{"singly", func(q *mongoq.Queue) (got []string) {
			for range 4 {
				got = append(got, payloadOf[string](t, &reserve(t, q).Envelope))
			}
			return got
		}},
		{"together", func(q *mongoq.Queue) (got []string) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			for len(got) < 4 {
				rs, err := q.ReserveMany(ctx, 10)
				require.NoError(t, err, "the neighbours are delivered, got %v", got)
				for _, r := range rs {
					got = append(got, payloadOf[string](t, &r.Envelope))
				}
			}
			return got
		}},
	} {
		name := c.name
		q := newQueue(t, store, name, mongoq.QueueConfig{DeadLetter: "dead"})
		for _, p := range []int{1, 2, 3, 4} {
			push(t, q, fmt.Sprint(p), mongoq.Priority(p))
		}
		doc := byHand(t, name, 2, size) // between its neighbours
		raw, err := bson.Marshal(doc)
		require.NoError(t, err)
		require.Len(t, raw, size)
		_, err = db.Collection("mongoq").InsertOne(t.Context(), raw)
		require.NoError(t, err)
		id := doc[0].Value.(bson.ObjectID)

		require.ElementsMatch(t, []string{"1", "2", "3", "4"}, c.take(q), name)
		_, err = q.TryReserve(t.Context())
		require.ErrorIs(t, err, mongoq.ErrEmpty, name)

		r := reserve(t, dead)
		require.Equal(t, id, r.ID)
		require.Equal(t, bson.TypeNull, r.Payload.Type)
		require.Equal(t, mongoq.DeadUndecodable, r.Dead.Kind)
		require.Equal(t, name, r.Dead.From)
		require.Contains(t, r.Dead.Msg, "mongoq.aside")
		require.NoError(t, r.Commit(t.Context()))
		kept, err := db.Collection("mongoq.aside").FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
		require.NoError(t, err)
		same(t, name, doc[4].Value, kept.Lookup("payload"))
	}
}

func TestHeadersAreReplacedAndMerged(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} }})
		merged := map[string]string{"plain": "new", "a.b": "1", "$set": "$lease", "$$NOW": "", ".": ".", "$a.b.": "$$ROOT", "ü": "✓", "a": "$q", "a.c": "2"}
		add := map[string]string{"plain": "new", "$set": "$lease", "a": "$q", "a.c": "2"}
		for name, c := range map[string]struct {
			had, want map[string]string
			rollback  []mongoq.RollbackOption
			move      []mongoq.MoveOption
		}{
			"nothing is said":   {someHeaders, someHeaders, nil, nil},
			"replaced":          {someHeaders, add, []mongoq.RollbackOption{mongoq.Headers(add)}, []mongoq.MoveOption{mongoq.Headers(add)}},
			"replaced by none":  {someHeaders, nil, []mongoq.RollbackOption{mongoq.Headers(nil)}, []mongoq.MoveOption{mongoq.Headers(nil)}},
			"merged":            {someHeaders, merged, []mongoq.RollbackOption{mongoq.AddHeaders(add)}, []mongoq.MoveOption{mongoq.AddHeaders(add)}},
			"merged with none":  {someHeaders, someHeaders, []mongoq.RollbackOption{mongoq.AddHeaders(nil)}, []mongoq.MoveOption{mongoq.AddHeaders(nil)}},
			"given where none":  {nil, add, []mongoq.RollbackOption{mongoq.Headers(add)}, []mongoq.MoveOption{mongoq.Headers(add)}},
			"added where none":  {nil, add, []mongoq.RollbackOption{mongoq.AddHeaders(add)}, []mongoq.MoveOption{mongoq.AddHeaders(add)}},
			"none where none":   {nil, nil, []mongoq.RollbackOption{mongoq.AddHeaders(nil)}, []mongoq.MoveOption{mongoq.AddHeaders(nil)}},
			"beside a payload":  {someHeaders, add, []mongoq.RollbackOption{mongoq.Payload("x"), mongoq.Headers(add)}, []mongoq.MoveOption{mongoq.Payload("x"), mongoq.Headers(add)}},
			"the last is taken": {someHeaders, add, []mongoq.RollbackOption{mongoq.Headers(someHeaders), mongoq.Headers(add)}, []mongoq.MoveOption{mongoq.Headers(someHeaders), mongoq.Headers(add)}},
		} {
			for verb, do := range map[string]func(*mongoq.Reservation) error{
				"rollback": func(r *mongoq.Reservation) error { return r.Rollback(t.Context(), errors.New("x"), c.rollback...) },
				"move":     func(r *mongoq.Reservation) error { return r.MoveToQ(t.Context(), "q", c.move...) },
			} {
				push(t, q, "x", mongoq.Headers(c.had))
				require.NoError(t, do(tryReserve(t, q)))
				r := tryReserve(t, q)
				require.Equal(t, c.want, r.Headers, "%s, %s", verb, name)
				require.Equal(t, "x", payloadOf[string](t, &r.Envelope))
				require.NoError(t, r.Commit(t.Context()))
			}
		}
	})
}

// A patch belongs to a failure that is dead-lettered, too.
func TestPatchGoesWithADeadLetter(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: func() backoff.BackOff { return &backoff.StopBackOff{} }})
		push(t, q, "x", mongoq.Headers(map[string]string{"a": "1", "b": "2"}))
		require.NoError(t, tryReserve(t, q).Rollback(t.Context(), errors.New("x"), mongoq.Payload("$y"), mongoq.AddHeaders(map[string]string{"b": "$3"})))
		r := tryReserve(t, newQueue(t, store, "q.dead"))
		require.Equal(t, "$y", payloadOf[string](t, &r.Envelope))
		require.Equal(t, map[string]string{"a": "1", "b": "$3"}, r.Headers)
	})
}

func TestFailuresAndHopsAreBounded(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} }})
		push(t, q, "x")
		for i := range 12 {
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), fmt.Errorf("$failure %d", i+1)))
		}
		r := tryReserve(t, q)
		require.Equal(t, 12, r.Retries)
		require.Equal(t, 13, r.Deliveries)
		require.Len(t, r.Failures, 10)
		for i, f := range r.Failures {
			require.Equal(t, fmt.Sprintf("$failure %d", i+3), f.Msg)
			require.Equal(t, i+3, f.Retries)
			require.False(t, f.Lost)
			require.False(t, f.At.IsZero())
		}
		require.NoError(t, r.MoveToQ(t.Context(), "q"))
		for range 34 {
			require.NoError(t, tryReserve(t, q).MoveToQ(t.Context(), "q"))
		}
		r = tryReserve(t, q)
		require.Equal(t, 35, r.Moves)
		require.Len(t, r.Hops, 32)
		require.Zero(t, r.Retries, "back to 0 by a move")
		require.Len(t, r.Failures, 10)
		require.Equal(t, 48, r.Deliveries, "never reset")
	})
}

func TestFailuresAreCut(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: func() backoff.BackOff { return &backoff.ZeroBackOff{} }})
		push(t, q, "x")
		for _, c := range []struct {
			cause error
			want  string
		}{
			{nil, ""},
			{errors.New(""), ""},
			{errors.New("$q"), "$q"},
			{errors.New(strings.Repeat("a", 1024)), strings.Repeat("a", 1024)},
			{errors.New(strings.Repeat("a", 5000)), strings.Repeat("a", 1024)},
			{errors.New("a" + strings.Repeat("✓", 1000)), "a" + strings.Repeat("✓", 341)},
			{errors.New("bad \xff\xfe UTF-8"), "bad  UTF-8"},
		} {
			require.NoError(t, tryReserve(t, q).Rollback(t.Context(), c.cause))
			r := tryReserve(t, q)
			msg := r.Failures[len(r.Failures)-1].Msg
			require.Equal(t, c.want, msg)
			require.True(t, utf8.ValidString(msg))
			require.NoError(t, r.Release(t.Context()))
		}
		require.NoError(t, tryReserve(t, q).DeadLetter(t.Context(), errors.New(strings.Repeat("✓", 1000))))
		require.Equal(t, strings.Repeat("✓", 341), tryReserve(t, newQueue(t, store, "q.dead")).Dead.Msg)
	})
}

// slowLink is a network that carries so many bytes a second to the client.
type slowLink int

type slowConn struct {
	net.Conn
	rate int
}

func (l slowLink) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	return slowConn{c, int(l)}, err
}

func (c slowConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b[:min(len(b), 64<<10)])
	time.Sleep(time.Duration(n) * time.Second / time.Duration(c.rate)) //nolint:forbidigo // the link's pace, not the test's
	return n, err
}

// What takes long to come over the network is delivered all the same, once, and does not keep its neighbours.
func TestLargeEnvelopeComesOverASlowLink(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		far := openStore(t, anotherClient(t, db, options.Client().SetDialer(slowLink(4<<20))))
		q := newQueue(t, openStore(t, db), "q")
		large := push(t, q, bytes.Repeat([]byte{1}, 6<<20)) // a second and a half
		small := push(t, q, "small")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		var got []bson.ObjectID
		for range 2 {
			r, err := newQueue(t, far, "q").Reserve(ctx)
			require.NoError(t, err, "got %v of %v, %v", got, large, small)
			got = append(got, r.ID)
			require.Equal(t, 1, r.Deliveries)
		}
		require.Equal(t, []bson.ObjectID{large, small}, got)
	})
}
