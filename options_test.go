package mongoq_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// bad is an input that breaks a rule.
type bad struct {
	name string
	call func(q *mongoq.Queue, r *mongoq.Reservation) error
	text []string // the rule, and what was given
}

func badPush(name string, o func() mongoq.PushOption, text ...string) []bad {
	return []bad{
		{"Push: " + name, func(q *mongoq.Queue, _ *mongoq.Reservation) error { _, err := q.Push(background, "x", o()); return err }, text},
		{"PushMany: " + name, func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			_, err := q.PushMany(background, []any{"x", "y"}, o())
			return err
		}, text},
		{"With: " + name, func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			_, err := q.PushMany(background, []any{mongoq.With("x", o())})
			return err
		}, text},
	}
}

func badMove(name string, o func() mongoq.MoveOption, text ...string) []bad {
	return []bad{{"MoveToQ: " + name, func(_ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.MoveToQ(background, "to", o())
	}, text}}
}

func badRollback(name string, o func() mongoq.RollbackOption, text ...string) []bad {
	return []bad{{"Rollback: " + name, func(_ *mongoq.Queue, r *mongoq.Reservation) error {
		return r.Rollback(background, errors.New("x"), o())
	}, text}}
}

func badRelease(name string, o func() mongoq.ReleaseOption, text ...string) []bad {
	return []bad{{"Release: " + name, func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.Release(background, o()) }, text}}
}

func badReserve(name string, o func() mongoq.ReserveOption, text ...string) []bad {
	return []bad{
		{"Reserve: " + name, func(q *mongoq.Queue, _ *mongoq.Reservation) error { _, err := q.Reserve(background, o()); return err }, text},
		{"TryReserve: " + name, func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			_, err := q.TryReserve(background, o())
			return err
		}, text},
		{"ReserveMany: " + name, func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			_, err := q.ReserveMany(background, 2, o())
			return err
		}, text},
	}
}

func badCall(name string, call func(q *mongoq.Queue, r *mongoq.Reservation) error, text ...string) []bad {
	return []bad{{name, call, text}}
}

func everyBadInput() (all []bad) {
	add := func(more ...[]bad) {
		for _, m := range more {
			all = append(all, m...)
		}
	}
	for _, d := range []time.Duration{-1, -time.Hour} {
		add(
			badPush("negative Delay", func() mongoq.PushOption { return mongoq.Delay(d) }, "Delay must be >= 0", d.String()),
			badMove("negative Delay", func() mongoq.MoveOption { return mongoq.Delay(d) }, "Delay must be >= 0", d.String()),
			badRelease("negative Delay", func() mongoq.ReleaseOption { return mongoq.Delay(d) }, "Delay must be >= 0", d.String()),
			badRollback("negative After", func() mongoq.RollbackOption { return mongoq.After(d) }, "After must be >= 0", d.String()),
		)
	}
	for _, d := range []time.Duration{-1, 1, time.Millisecond - 1} {
		add(
			badPush("TTL", func() mongoq.PushOption { return mongoq.TTL(d) }, "TTL must be 0 (none) or >= 1ms", d.String()),
			badMove("TTL", func() mongoq.MoveOption { return mongoq.TTL(d) }, "TTL must be 0 (none) or >= 1ms", d.String()),
		)
	}
	for _, d := range []time.Duration{0, -time.Second, time.Millisecond - 1} {
		add(
			badReserve("LeaseFor", func() mongoq.ReserveOption { return mongoq.LeaseFor(d) }, "LeaseFor must be >= 1ms", d.String()),
			badCall("Extend", func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.Extend(background, d) }, "Extend must be >= 1ms", d.String()),
		)
	}
	for given, n := range map[string]int{"0": 0, "5": 5, "-1": -1} {
		add(
			badPush("Priority", func() mongoq.PushOption { return mongoq.Priority(n) }, "Priority must be 1 to 4, got "+given),
			badMove("Priority", func() mongoq.MoveOption { return mongoq.Priority(n) }, "Priority must be 1 to 4, got "+given),
		)
	}
	for _, at := range []time.Time{{}, time.Date(1969, 12, 31, 23, 59, 59, 0, time.UTC), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)} {
		add(
			badPush("At", func() mongoq.PushOption { return mongoq.At(at) }, "At must lie in the years 1970 to 9999", at.Format("2006-01-02")),
			badMove("At", func() mongoq.MoveOption { return mongoq.At(at) }, "At must lie in the years 1970 to 9999", at.Format("2006-01-02")),
			badRelease("At", func() mongoq.ReleaseOption { return mongoq.At(at) }, "At must lie in the years 1970 to 9999", at.Format("2006-01-02")),
		)
	}
	for _, h := range []struct {
		m    map[string]string
		text []string
	}{
		{map[string]string{"": "v"}, []string{"key must not be empty"}},
		{map[string]string{"a\x00b": "v"}, []string{"key must not hold NUL", `a\x00b`}},
		{map[string]string{"a\xff": "v"}, []string{"key must be valid UTF-8", `a\xff`}},
		{map[string]string{"fine": "v", "k": "\xff"}, []string{`value of header "k" must be valid UTF-8`}},
	} {
		add(
			badPush("Headers", func() mongoq.PushOption { return mongoq.Headers(h.m) }, h.text...),
			badMove("Headers", func() mongoq.MoveOption { return mongoq.Headers(h.m) }, h.text...),
			badMove("AddHeaders", func() mongoq.MoveOption { return mongoq.AddHeaders(h.m) }, h.text...),
			badRollback("Headers", func() mongoq.RollbackOption { return mongoq.Headers(h.m) }, h.text...),
			badRollback("AddHeaders", func() mongoq.RollbackOption { return mongoq.AddHeaders(h.m) }, h.text...),
		)
	}
	type cannot struct{ C chan int }
	for _, v := range []any{make(chan int), func() {}, cannot{}, map[string]any{"deep": []any{make(chan int)}}, map[string]any{"a\x00": 1}, complex(1, 2), bson.RawValue{}} {
		add(
			badCall("Push: payload", func(q *mongoq.Queue, _ *mongoq.Reservation) error { _, err := q.Push(background, v); return err }, "the payload must be encodable as BSON"),
			badCall("PushMany: payload", func(q *mongoq.Queue, _ *mongoq.Reservation) error {
				_, err := q.PushMany(background, []any{v})
				return err
			}, "the payload must be encodable as BSON"),
			badRollback("Payload", func() mongoq.RollbackOption { return mongoq.Payload(v) }, "Payload must be encodable as BSON"),
			badMove("Payload", func() mongoq.MoveOption { return mongoq.Payload(v) }, "Payload must be encodable as BSON"),
			badCall("Commit: Result", func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.Commit(background, mongoq.Result(v)) }, "Result must be encodable as BSON"),
		)
	}
	for _, n := range badNames {
		add(badCall("MoveToQ", func(_ *mongoq.Queue, r *mongoq.Reservation) error { return r.MoveToQ(background, n.name) }, n.text...))
	}
	for given, n := range map[string]int{"0": 0, "-3": -3} {
		add(
			badCall("Peek", func(q *mongoq.Queue, _ *mongoq.Reservation) error { _, err := q.Peek(background, n); return err }, "Peek needs n >= 1, got "+given),
			badCall("ReserveMany", func(q *mongoq.Queue, _ *mongoq.Reservation) error { _, err := q.ReserveMany(background, n); return err }, "ReserveMany needs n >= 1, got "+given),
		)
	}
	add(
		badCall("Push: ID", func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			_, err := q.Push(background, "x", mongoq.ID(bson.NilObjectID))
			return err
		}, "ID must not be the nil ObjectID"),
		badCall("PushMany: ID", func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			_, err := q.PushMany(background, []any{"x"}, mongoq.ID(bson.NewObjectID()))
			return err
		}, "ID belongs to one envelope"),
		badCall("PushMany: none", func(q *mongoq.Queue, _ *mongoq.Reservation) error { _, err := q.PushMany(background, nil); return err }, "at least one payload"),
		badCall("CommitMany: none", func(q *mongoq.Queue, _ *mongoq.Reservation) error { return q.CommitMany(background, nil) }, "at least one reservation"),
		badCall("CommitMany: empty", func(q *mongoq.Queue, _ *mongoq.Reservation) error {
			return q.CommitMany(background, []*mongoq.Reservation{})
		}, "at least one reservation"),
		badCall("CommitMany: nil", func(q *mongoq.Queue, r *mongoq.Reservation) error {
			return q.CommitMany(background, []*mongoq.Reservation{r, nil})
		}, "nil at 1"),
	)
	return all
}

func TestBadInputIsRefusedAndChangesNothing(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		q := newQueue(t, openStore(t, db), "q", mongoq.QueueConfig{Retention: time.Hour})
		id := push(t, q, "held")
		r := tryReserve(t, q)
		push(t, q, "waits", mongoq.Delay(time.Hour))
		before := rawDoc(t, db, id)
		for _, b := range everyBadInput() {
			err := b.call(q, r)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, b.name)
			for _, text := range b.text {
				require.ErrorContains(t, err, text, b.name)
			}
			n, err := db.Collection("mongoq").CountDocuments(t.Context(), bson.D{})
			require.NoError(t, err)
			require.EqualValues(t, 2, n, b.name)
			require.Equal(t, before, rawDoc(t, db, id), b.name)
		}
		require.NoError(t, r.Commit(t.Context()), "none settled it")
	})
}

var badNames = []struct {
	name string
	text []string
}{
	{"", []string{"name must not be empty"}},
	{strings.Repeat("n", 256), []string{"at most 255 bytes", "256"}},
	{strings.Repeat("ü", 128), []string{"at most 255 bytes", "256"}},
	{"a\x00b", []string{"must not hold NUL", `a\x00b`}},
	{"\x00", []string{"must not hold NUL"}},
	{"$a", []string{"must not begin with '$'", "$a"}},
	{"$", []string{"must not begin with '$'"}},
	{mongoq.NoDeadLetter, []string{"must not begin with '$'"}},
	{"a\xff", []string{"must be valid UTF-8", `a\xff`}},
}

func TestBadQueueIsRefused(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		refused := func(name string, cfg mongoq.QueueConfig, text ...string) {
			t.Helper()
			q, err := store.Queue(name, cfg)
			require.ErrorIs(t, err, mongoq.ErrInvalidOption, text)
			require.Nil(t, q)
			for _, text := range text {
				require.ErrorContains(t, err, text)
			}
		}
		for _, n := range badNames {
			refused(n.name, mongoq.QueueConfig{DeadLetter: "dead"}, n.text...)
			if n.name != "" && n.name != mongoq.NoDeadLetter {
				refused("q", mongoq.QueueConfig{DeadLetter: n.name}, n.text...)
			}
		}
		refused(strings.Repeat("n", 251), mongoq.QueueConfig{}, "at most 255 bytes", "dead-letter queue", "256") // with ".dead"
		refused("q", mongoq.QueueConfig{DeadLetter: "q"}, "DeadLetter must be another queue", `"q"`)

		refused("q", mongoq.QueueConfig{Lease: -time.Second}, "Lease must be >= 1ms", "-1s")
		refused("q", mongoq.QueueConfig{Lease: 1}, "Lease must be >= 1ms", "1ns")
		refused("q", mongoq.QueueConfig{Delay: -time.Second}, "Delay must be >= 0", "-1s")
		refused("q", mongoq.QueueConfig{TTL: -time.Second}, "TTL must be 0 (none) or >= 1ms", "-1s")
		refused("q", mongoq.QueueConfig{TTL: 1}, "TTL must be 0 (none) or >= 1ms", "1ns")
		refused("q", mongoq.QueueConfig{Retention: -time.Second}, "Retention must be KeepForever, 0 (none) or >= 1ms", "-1s")
		refused("q", mongoq.QueueConfig{Retention: 1}, "Retention must be", "1ns")
		refused("q", mongoq.QueueConfig{PollInterval: -time.Second}, "PollInterval must be >= 1ms", "-1s")
		refused("q", mongoq.QueueConfig{OnExpire: 2}, "OnExpire must be Discard or ToDeadLetter", "2")
		refused("q", mongoq.QueueConfig{OnExpire: -1}, "OnExpire must be Discard or ToDeadLetter", "-1")
		refused("q", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter, DeadLetter: mongoq.NoDeadLetter}, "OnExpire: ToDeadLetter needs a dead-letter queue", "NoDeadLetter")
		refused("q", mongoq.QueueConfig{Retry: func() backoff.BackOff { return nil }}, "Retry must make a policy, got nil")

		for _, name := range []string{strings.Repeat("n", 255), "a", "a$", " ", "ü"} {
			_, err := store.Queue(name, mongoq.QueueConfig{DeadLetter: mongoq.NoDeadLetter})
			require.NoError(t, err)
		}
		_, err := store.Queue(strings.Repeat("n", 250), mongoq.QueueConfig{})
		require.NoError(t, err)
	})
}

// A refused handle leaves no trace of its policy: what expires in the queue goes as the standing handle says.
func TestRefusedQueueChangesNoPolicy(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		store := openStore(t, db)
		q := newQueue(t, store, "q", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter})
		_, err := store.Queue("q", mongoq.QueueConfig{OnExpire: mongoq.Discard, Lease: -1})
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		from := newQueue(t, store, "from")
		id := push(t, from, "x", mongoq.TTL(time.Hour))
		require.NoError(t, tryReserve(t, from).MoveToQ(t.Context(), "q"))
		require.NotContains(t, rawDoc(t, db, id), "expireAt")
		require.Equal(t, "1100", sizes(t, q))
	})
}
