package model_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Each target has a few seeds, which every run of the tests goes through. To look for more, one at a time, with one
// server:
//
//	go test -run '^$' -fuzz FuzzDocument -fuzztime 5m -parallel 1 .

// bypass lets a document in that the validator would keep out, as one that was there before it.
var bypass = options.InsertOne().SetBypassDocumentValidation(true)

func encoded(t testing.TB, fields ...bson.E) []byte {
	t.Helper()
	raw, err := bson.Marshal(bson.D(fields))
	require.NoError(t, err)
	return raw
}

// Whatever payload, header, result and queue name there is comes back as it was, by each verb that writes one: none is
// read as an operator, an expression or the path of a field.
func FuzzVerbs(f *testing.F) {
	f.Add("q", byte(bson.TypeString), []byte("\x03\x00\x00\x00$q\x00"), "$set", "$$NOW")
	f.Add("a.b", byte(bson.TypeEmbeddedDocument), encoded(f, bson.E{Key: "$set", Value: bson.D{{Key: "q", Value: "$payload"}}}), "a.b", "$q")
	f.Add("$$ROOT", byte(bson.TypeEmbeddedDocument), encoded(f, bson.E{Key: "", Value: 1}, bson.E{Key: "", Value: 2}), "", "")
	f.Add("x$", byte(bson.TypeEmbeddedDocument), encoded(f, bson.E{Key: "$ref", Value: "c"}, bson.E{Key: "$id", Value: 1}), "_id", "\x00")
	f.Add("ü", byte(bson.TypeArray), encoded(f, bson.E{Key: "0", Value: bson.D{{Key: "$literal", Value: 1}}}), "h\x00", "x")
	f.Add("{$gt:''}", byte(bson.TypeRegex), []byte(".*\x00i\x00"), "$[]", "$")
	f.Add("q", byte(bson.TypeJavaScript), []byte("\x02\x00\x00\x00x\x00"), "payload", "{}")
	f.Add("q", byte(bson.TypeMinKey), []byte{}, "deadline", "1")
	f.Add("q", byte(bson.TypeUndefined), []byte{}, "h", "1")
	f.Add("q", byte(bson.TypeBoolean), []byte("0"), "0", "0")
	f.Add("q", byte(bson.TypeEmbeddedDocument), []byte("\x1a\x00\x00\x000000000000000000000000"), "0", "0")
	f.Add("q", byte(bson.TypeEmbeddedDocument), []byte("\x0d\x00\x00\x00\x03a\x00\x05\x00\x00\x00\x01\x00"), "0", "0")
	store := openStores(f, mongotest.Database(f, mongotest.ReplicaSet))[0]
	f.Fuzz(func(t *testing.T, name string, typ byte, raw []byte, key, text string) {
		ctx := t.Context()
		cfg := mongoq.QueueConfig{Retry: atOnce, Retention: mongoq.KeepForever, DeadLetter: "dead"}
		q, err := store.Queue(name, cfg)
		if err != nil {
			require.ErrorIs(t, err, mongoq.ErrInvalidOption)
			return
		}
		if len(name)+10 > mongoq.MaxQueueName || !utf8.ValidString(name) {
			return
		}
		payload, headers := bson.RawValue{Type: bson.Type(typ), Value: raw}, map[string]string{key: text}
		id, err := q.Push(ctx, payload, mongoq.Headers(headers))
		if err != nil {
			require.ErrorIs(t, err, mongoq.ErrInvalidOption)
			return
		}
		same := func(e *mongoq.Envelope) {
			t.Helper()
			require.Equal(t, id, e.ID)
			require.Equal(t, payload.Type, e.Payload.Type)
			require.Equal(t, string(raw), string(e.Payload.Value))
			require.Equal(t, headers, e.Headers)
		}
		take := func(q *mongoq.Queue) *mongoq.Reservation {
			t.Helper()
			r, err := q.TryReserve(ctx)
			require.NoError(t, err)
			same(&r.Envelope)
			require.Equal(t, q.Name(), r.Q)
			return r
		}
		// Each verb that writes them writes them anew.
		require.NoError(t, take(q).Rollback(ctx, errors.New(text), mongoq.Payload(payload), mongoq.Headers(headers)))
		require.NoError(t, take(q).MoveToQ(ctx, name+".elsewhere", mongoq.Payload(payload), mongoq.AddHeaders(headers)))
		elsewhere, err := store.Queue(name+".elsewhere", cfg)
		require.NoError(t, err)
		require.NoError(t, take(elsewhere).DeadLetter(ctx, errors.New(text)))
		n, err := elsewhere.DeadLetters().Redrive(ctx, mongoq.Payload(payload), mongoq.AddHeaders(headers), mongoq.To(q))
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		r := take(q)
		require.NoError(t, r.Commit(ctx, mongoq.Result(payload)))
		for e, err := range q.History().List(ctx, mongoq.Header(key, text), mongoq.IDs(id)) {
			require.NoError(t, err)
			same(e)
			require.Equal(t, payload.Type, e.Result.Type)
			require.Equal(t, string(raw), string(e.Result.Value))
		}
		again, err := q.History().Replay(ctx, id)
		require.NoError(t, err)
		id = again
		e, err := q.TryPop(ctx)
		require.NoError(t, err)
		same(e)
		_, err = q.TryReserve(ctx)
		require.ErrorIs(t, err, mongoq.ErrEmpty)
	})
}

// What somebody writes by hand is delivered, or set aside, or it is none of the queue's; its neighbours are delivered in
// any case, and nobody who looks at it falls over.
func FuzzDocument(f *testing.F) {
	at := time.Now().Add(-time.Hour)
	for _, fields := range []bson.D{
		{},
		{{Key: "_id", Value: "mine"}, {Key: "payload", Value: 1}},
		{{Key: "_id", Value: bson.D{{Key: "$gt", Value: 1}}}},
		{{Key: "when", Value: bson.A{at}}}, {{Key: "when", Value: "x"}}, {{Key: "when", Value: nil}},
		{{Key: "prio", Value: "x"}}, {{Key: "prio", Value: -1.5}}, {{Key: "prio", Value: bson.A{1, 2}}},
		{{Key: "deliveries", Value: 1.5}}, {{Key: "deliveries", Value: int64(math.MaxInt64)}}, {{Key: "retries", Value: int64(math.MaxInt64)}, {Key: "reserved", Value: at}},
		{{Key: "reserved", Value: "x"}, {Key: "lease", Value: "y"}}, {{Key: "lease", Value: bson.NewObjectID()}},
		{{Key: "errs", Value: bson.A{1}}, {Key: "hops", Value: "x"}, {Key: "reserved", Value: at}}, {{Key: "last", Value: 1}},
		{{Key: "dead", Value: bson.D{}}}, {{Key: "dead", Value: bson.D{{Key: "from", Value: "$q"}}}}, {{Key: "dead", Value: "x"}},
		{{Key: "deadline", Value: at}}, {{Key: "deadline", Value: bson.A{at}}}, {{Key: "expireAt", Value: "x"}},
		{{Key: "join", Value: bson.D{{Key: "n", Value: -1}}}}, {{Key: "join", Value: bson.D{{Key: "n", Value: 1 << 30}}}}, {{Key: "join", Value: 1}},
		{{Key: "part", Value: bson.D{{Key: "of", Value: bson.NewObjectID()}, {Key: "join", Value: "j"}}}},
		{{Key: "loops", Value: bson.D{{Key: "a>b", Value: "x"}}}}, {{Key: "ways", Value: bson.A{bson.D{}}}}, {{Key: "digest", Value: 1}},
		{{Key: "headers", Value: bson.D{{Key: "$h", Value: 1}}}}, {{Key: "headers", Value: bson.D{{Key: "", Value: "x"}}}}, {{Key: "was", Value: 1}},
		{{Key: "replayOf", Value: bson.D{{Key: "id", Value: 1}}}}, {{Key: "pushed", Value: 1}}, {{Key: "moves", Value: "x"}}, {{Key: "due", Value: "x"}},
		{{Key: "processed", Value: "x"}}, {{Key: "processed", Value: bson.A{}}}, {{Key: "result", Value: bson.D{{Key: "dropped", Value: 1}}}},
	} {
		f.Add(encoded(f, fields...), false)
		f.Add(encoded(f, fields...), true)
	}
	db := mongotest.Database(f, mongotest.ReplicaSet)
	stores := openStores(f, db)
	f.Fuzz(func(t *testing.T, raw []byte, many bool) {
		var fields bson.D
		if bson.Raw(raw).Validate() != nil || bson.Unmarshal(raw, &fields) != nil {
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		w := newWorld(t, db, stores, atOnce)
		q := w.handle[0][w.names[0]]
		first := pushOf(t, q, "first")
		doc := bson.D{{Key: "q", Value: w.names[0]}, {Key: "when", Value: at}, {Key: "prio", Value: 2}}
		for _, el := range fields {
			if el.Key == "q" { // it is in this queue, to be met
				continue
			}
			for i := range doc {
				if doc[i].Key == el.Key {
					doc[i].Value = el.Value
				}
			}
			if !has(doc, el.Key) {
				doc = append(doc, el)
			}
		}
		odd := db.Collection("mongoq")
		if _, err := odd.InsertOne(ctx, doc, bypass); err != nil {
			return // the server does not take it
		}
		last := pushOf(t, q, "last")
		seen := map[bson.ObjectID]bool{}
		for range 40 {
			rs, err := claimOf(ctx, q, many)
			if errors.Is(err, mongoq.ErrEmpty) || errors.Is(err, context.DeadlineExceeded) {
				break
			}
			require.NoError(t, err)
			for _, r := range rs {
				seen[r.ID] = true
				_, _ = r.Outcome(), r.Decode(new(any))
				if len(seen)%2 == 0 && r.Retries == 0 {
					require.NoError(t, r.Rollback(ctx, errFailed))
					continue
				}
				require.NoError(t, r.Commit(ctx))
			}
		}
		require.True(t, seen[first] && seen[last], "a neighbour was not delivered")
		// Whoever looks sees it, or not.
		_, err := q.Stats(ctx)
		require.NoError(t, err)
		_, err = q.Peek(ctx, 10)
		require.NoError(t, err)
		for _, err := range q.DeadLetters().List(ctx) {
			require.NoError(t, err)
		}
		_, err = q.DeadLetters().Page(ctx)
		require.NoError(t, err)
		for _, err := range q.History().List(ctx) {
			require.NoError(t, err)
		}
		_, err = q.DeadLetters().Redrive(ctx)
		require.NoError(t, err)
		_, err = q.Purge(ctx)
		require.NoError(t, err)
		_, err = odd.DeleteMany(ctx, bson.D{{Key: "q", Value: bson.D{{Key: "$in", Value: w.names}}}})
		require.NoError(t, err)
	})
}

func has(doc bson.D, key string) bool {
	for _, el := range doc {
		if el.Key == key {
			return true
		}
	}
	return false
}

func pushOf(t testing.TB, q *mongoq.Queue, payload any) bson.ObjectID {
	t.Helper()
	id, err := q.Push(t.Context(), payload)
	require.NoError(t, err)
	return id
}

// claimOf claims by one of the two statements that there are.
func claimOf(ctx context.Context, q *mongoq.Queue, many bool) ([]*mongoq.Reservation, error) {
	if many {
		if s, err := q.Stats(ctx); err != nil || s.Ready == 0 {
			return nil, errors.Join(err, mongoq.ErrEmpty)
		}
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		return q.ReserveMany(ctx, 3)
	}
	r, err := q.TryReserve(ctx)
	return []*mongoq.Reservation{r}, err
}

// What a list is asked for is found, or refused as a bad option, and never read as anything else.
func FuzzLists(f *testing.F) {
	f.Add("", "h", "1", []byte{}, "lost", 1)
	f.Add("{$gt: ''}", "$where", "$$ROOT", []byte("123456789012"), "$gt", -1)
	f.Add(strings.Repeat("A", 100), "a.b", "\xff", []byte{}, "", 1001)
	db := mongotest.Database(f, mongotest.ReplicaSet)
	store := openStores(f, db)[0]
	q, err := store.Queue("q", mongoq.QueueConfig{Retention: mongoq.KeepForever, DeadLetter: "dead", Retry: atOnce})
	require.NoError(f, err)
	for i := range 4 {
		_, err := q.Push(f.Context(), i, mongoq.Headers(map[string]string{"h": "1"}))
		require.NoError(f, err)
		r, err := q.TryReserve(f.Context())
		require.NoError(f, err)
		if i%2 == 0 {
			err = r.Commit(f.Context())
		} else {
			err = r.DeadLetter(f.Context(), errFailed)
		}
		require.NoError(f, err)
	}
	for _, cursor := range cursorsOf(f, q) {
		f.Add(cursor, "h", "1", []byte{}, "explicit", 1)
	}
	f.Fuzz(func(t *testing.T, cursor, key, value string, raw []byte, kind string, limit int) {
		ctx := t.Context()
		var ids []bson.ObjectID
		for ; len(raw) >= 12; raw = raw[12:] {
			ids = append(ids, bson.ObjectID(raw[:12]))
		}
		chosen := []mongoq.SelectOption{mongoq.Header(key, value)}
		if len(ids) > 0 {
			chosen = append(chosen, mongoq.IDs(ids...))
		}
		if limit != 0 {
			chosen = append(chosen, mongoq.Limit(limit))
		}
		history := []mongoq.HistoryOption{mongoq.Cursor(cursor)}
		dead := []mongoq.DeadLetterOption{mongoq.Cursor(cursor), mongoq.Kinds(mongoq.DeadKind(kind))}
		for _, o := range chosen {
			history, dead = append(history, o), append(dead, o)
		}
		page, err := q.History().Page(ctx, history...)
		fits(t, page, err, key, value)
		page, err = store.History().Page(ctx, history...)
		fits(t, page, err, key, value)
		page, err = q.DeadLetters().Page(ctx, dead...)
		fits(t, page, err, key, value)
		if err == nil {
			for _, e := range page.Envelopes {
				require.Equal(t, kind, string(e.Dead.Kind))
			}
		}
	})
}

// fits requires that a page holds what was asked for, or was refused.
func fits(t testing.TB, page *mongoq.Page, err error, key, value string) {
	t.Helper()
	if err != nil {
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		return
	}
	for _, e := range page.Envelopes {
		got, ok := e.Headers[key]
		require.True(t, ok && got == value)
	}
}

func cursorsOf(t testing.TB, q *mongoq.Queue) []string {
	t.Helper()
	done, err := q.History().Page(t.Context(), mongoq.Limit(1))
	require.NoError(t, err)
	dead, err := q.DeadLetters().Page(t.Context(), mongoq.Limit(1))
	require.NoError(t, err)
	require.NotEmpty(t, done.Next)
	require.NotEmpty(t, dead.Next)
	return []string{done.Next, dead.Next}
}
