package mongoq

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// Each target has a few seeds, which every run of the tests goes through. To look for more, one at a time:
//
//	go test -run '^$' -fuzz FuzzRead -fuzztime 5m .

// must encodes a document.
func must(t testing.TB, doc any) []byte {
	t.Helper()
	raw, err := bson.Marshal(doc)
	require.NoError(t, err)
	return raw
}

// spent runs something, and gives how many bytes it has allocated.
func spent(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// What is stored may be anything. To read it takes no more memory than a multiple of its size, and does not panic, nor
// does what readers do with it.
func FuzzRead(f *testing.F) {
	id, at := bson.NewObjectID(), time.Now()
	got := bson.D{{Key: "id", Value: id}, {Key: "i", Value: 0}, {Key: "payload", Value: "x"}}
	joined := func(n, i any) bson.D {
		part := bson.D{{Key: "id", Value: id}, {Key: "i", Value: i}}
		return bson.D{{Key: "join", Value: bson.D{{Key: "n", Value: n}, {Key: "branches", Value: bson.A{"a"}}, {Key: "got", Value: bson.A{part}}}}}
	}
	for _, doc := range []any{
		bson.D{},
		bson.D{
			{Key: "_id", Value: id}, {Key: "q", Value: "q"}, {Key: "when", Value: at}, {Key: "prio", Value: 2}, {Key: "payload", Value: bson.D{{Key: "$x", Value: 1}}},
			{Key: "headers", Value: bson.D{{Key: "h", Value: "1"}}}, {Key: "reserved", Value: at}, {Key: "lease", Value: id}, {Key: "processed", Value: at},
			{Key: "result", Value: bson.D{{Key: "dropped", Value: "why"}}},
			{Key: "errs", Value: bson.A{bson.D{{Key: "at", Value: at}, {Key: "retries", Value: 1}, {Key: "msg", Value: "x"}, {Key: "lost", Value: true}}}},
			{Key: "hops", Value: bson.A{bson.D{{Key: "from", Value: "q"}, {Key: "at", Value: at}}}},
			{Key: "dead", Value: bson.D{{Key: "from", Value: "q"}, {Key: "at", Value: at}, {Key: "kind", Value: "lost"}, {Key: "was", Value: bson.D{}}}},
			{Key: "last", Value: bson.D{{Key: "lease", Value: id}, {Key: "verb", Value: "move"}}},
		},
		bson.D{{Key: "_id", Value: 1}, {Key: "q", Value: 1}, {Key: "when", Value: bson.A{at}}, {Key: "was", Value: nil}, {Key: "headers", Value: bson.A{}}, {Key: "digest", Value: "x"}},
		bson.D{{Key: "retries", Value: int64(1) << 62}, {Key: "deliveries", Value: 1.5}, {Key: "moves", Value: -1}, {Key: "prio", Value: 1e300}},
		bson.D{{Key: "part", Value: bson.D{{Key: "of", Value: id}, {Key: "i", Value: -1}, {Key: "n", Value: 1 << 30}}}, {Key: "loops", Value: bson.D{{Key: "a>b", Value: "x"}}}},
		bson.D{{Key: "ways", Value: bson.A{got}}, {Key: "replayOf", Value: bson.D{{Key: "id", Value: id}}}},
		bson.D{{Key: "join", Value: bson.D{{Key: "n", Value: 0}, {Key: "branches", Value: bson.A{}}, {Key: "looks", Value: -1}}}},
		joined(1, 0), joined(-1, 0), joined(1<<30, 0), joined(1, 1), joined(1, -1), joined(1, 1<<40), joined(0, 0),
	} {
		f.Add(must(f, doc))
	}
	f.Add([]byte{5, 0, 0, 0, 1})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e stored
		cost := spent(func() { e = read(b) })
		require.LessOrEqual(t, cost, uint64(64<<10+1000*len(b)))
		_ = e.badFields()
		_ = e.Outcome()
		_, _ = e.Waited(), e.Ran()
		for _, v := range []any{new(string), new(bson.D), new(any), new(struct{ A map[string]int })} {
			_ = e.Decode(v)
		}
		_ = hopDocs(e.Hops)
		_ = failureDocs(e.Failures)
		if j := e.Joined; j != nil {
			require.LessOrEqual(t, j.Count, len(b), "who waits for more parts than can be told waits for ever")
			_, _, _ = j.settled(), j.Part("a"), j.nextLook()
			for i := range j.Parts {
				_ = j.Parts[i].way()
			}
		}
	})
}

// What is pushed is what is stored: whatever a value or a key looks like, it is read back as it was, and in no other place.
func FuzzPush(f *testing.F) {
	f.Add("q", byte(bson.TypeString), []byte("\x03\x00\x00\x00$q\x00"), "$set", "$$NOW", 0, int64(0))
	f.Add("$q", byte(bson.TypeNull), []byte{}, "", "", 5, int64(-1))
	f.Add("a.b", byte(bson.TypeEmbeddedDocument), must(f, bson.D{{Key: "$set", Value: bson.D{{Key: "q", Value: "$payload"}}}}), "a.b", "c", 1, int64(1))
	f.Add("payload\x00q", byte(bson.TypeArray), []byte{5, 0, 0, 0, 0}, "\x00", "\xff", 4, int64(1)<<62)
	f.Add("ü", byte(bson.TypeInt64), []byte{1, 2, 3, 4, 5, 6, 7, 8}, "h", "1", 2, int64(1e9))
	clock := stamp{lo: time.Unix(1_700_000_000, 0), hi: time.Unix(1_700_000_001, 0)}
	f.Fuzz(func(t *testing.T, name string, typ byte, value []byte, key, header string, prio int, delay int64) {
		cfg := QueueConfig{Lease: time.Second, PollInterval: time.Second, Retry: DefaultRetry, DeadLetter: NoDeadLetter}
		if err := errors.Join(checkName(name), cfg.check(name)); err != nil {
			require.ErrorIs(t, err, ErrInvalidOption)
			require.True(t, name == "" || len(name) > MaxQueueName || name[0] == '$' || !utf8.ValidString(name) || strings.ContainsRune(name, 0))
			return
		}
		q := &Queue{name: name, cfg: cfg}
		payload := bson.RawValue{Type: bson.Type(typ), Value: value}
		headers := map[string]string{key: header}
		opts := []PushOption{Headers(headers), ID(bson.NewObjectID())}
		if prio != 0 {
			opts = append(opts, Priority(prio))
		}
		if delay != 0 {
			opts = append(opts, Delay(time.Duration(delay)), TTL(time.Duration(delay)))
		}
		var p *parcel
		var err error
		cost := spent(func() { p, err = q.parcel(payload, opts, clock) })
		require.LessOrEqual(t, cost, uint64(64<<10+20*(len(name)+len(value)+len(key)+len(header))))
		if err != nil {
			require.True(t, errors.Is(err, ErrInvalidOption) || errors.Is(err, ErrPayloadTooLarge), err)
			return
		}
		require.NoError(t, p.doc.Validate())
		elems, err := p.doc.Elements()
		require.NoError(t, err)
		seen := map[string]bool{}
		for _, el := range elems {
			require.False(t, seen[el.Key()], "%s stands there twice", el.Key())
			seen[el.Key()] = true
		}
		e := read(p.doc)
		require.Empty(t, e.bad)
		require.Empty(t, e.Result)
		require.True(t, e.Reserved.IsZero() && e.Processed.IsZero() && e.lease.IsZero())
		require.Equal(t, name, e.Q)
		require.Equal(t, payload.Type, e.Payload.Type)
		require.True(t, bytes.Equal(value, e.Payload.Value))
		require.True(t, maps.Equal(headers, e.Headers))
		require.False(t, e.When.Before(clock.lo))
	})
}

// A cursor is one that a page has given, or an error.
func FuzzCursor(f *testing.F) {
	at, id := time.UnixMilli(1_700_000_000_000), bson.NewObjectID()
	f.Add(place{at: at, id: id}.cursor(listHistory))
	f.Add(place{at: at, id: id, kind: "lost"}.cursor(listDead))
	f.Add("")
	f.Add("{$gt: 1}")
	f.Add(string(bytes.Repeat([]byte("A"), 1000)))
	f.Fuzz(func(t *testing.T, cursor string) {
		for _, list := range []byte{listHistory, listDead} {
			p, err := placeOf(list, cursor)
			if err != nil {
				require.ErrorIs(t, err, ErrInvalidOption)
				require.Less(t, len(err.Error()), 1000)
				continue
			}
			require.Equal(t, cursor, p.cursor(list))
			for _, d := range (&DeadLetters{q: &Queue{name: "q"}}).parts(&selection{}, &p) {
				_ = must(t, d)
			}
		}
	})
}

// A selection's header, and what replaces an envelope's, stand in expressions as what they are.
func FuzzSelection(f *testing.F) {
	f.Add("h", "1", []byte{})
	f.Add("$where", "$$ROOT", []byte("123456789012"))
	f.Add("a.b\x00", "\xff", bytes.Repeat([]byte{0xff}, 36))
	f.Fuzz(func(t *testing.T, key, value string, ids []byte) {
		set := selection{}
		var chosen []bson.ObjectID
		for ; len(ids) >= 12; ids = ids[12:] {
			chosen = append(chosen, bson.ObjectID(ids[:12]))
		}
		if err := errors.Join(Header(key, value).applyHistory(&set), IDs(chosen...).applyHistory(&set)); err != nil {
			require.ErrorIs(t, err, ErrInvalidOption)
			return
		}
		query := historyQuery{selection: set, q: key}
		filter := bson.Raw(must(t, query.filter(nil, set.span(), nil)))
		require.Equal(t, key, filter.Lookup("q").StringValue())
		test := filter.Lookup("$expr", "$eq", "0", "$getField", "field")
		require.Equal(t, key, test.Document().Lookup("$literal").StringValue())
		require.Equal(t, value, filter.Lookup("$expr", "$eq", "1", "$literal").StringValue())

		update := must(t, bson.D{{Key: "u", Value: moveUpdate(bson.NewObjectID(), key, value, moveSettings{patch: patch{
			payload: &bson.RawValue{Type: bson.TypeString, Value: text(value)}, headers: map[string]string{key: value}, set: true,
		}}, nil, Discard)}})
		fields := bson.Raw(update).Lookup("u", "0", "$set").Document()
		require.Equal(t, value, fields.Lookup("q", "$literal").StringValue())
		require.Equal(t, value, fields.Lookup("payload", "$literal").StringValue())
		require.Equal(t, value, fields.Lookup("headers", "$literal").Document().Lookup(key).StringValue())
	})
}

// text is a string as BSON has it.
func text(s string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(s)+1))
	return append(append(b, s...), 0)
}

// A trace context is one by the standard's rules, or a header like any other.
func FuzzTraceparent(f *testing.F) {
	f.Add("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	f.Add("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more")
	f.Add("---")
	f.Fuzz(func(t *testing.T, parent string) {
		child, ok := childSpan(parent)
		if !ok {
			require.Empty(t, child)
			return
		}
		require.Len(t, child, 55)
		require.Equal(t, parent[3:35], child[3:35], "the trace is the same")
		_, ok = childSpan(child)
		require.True(t, ok)
	})
}
