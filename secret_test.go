package mongoq_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// secret stands in payloads, headers' values and results, and must not be seen in a log or in an error.
const secret = "the-secret-of-the-payload"

// transcript keeps all that is logged, with every attribute.
type transcript struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (tr *transcript) Write(b []byte) (int, error) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.text.Write(b)
}

func (tr *transcript) String() string {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.text.String()
}

func (tr *transcript) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(tr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Whatever goes wrong with an envelope, neither the log nor an error says what is in it.
func TestNoPayloadInLogsOrErrors(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var log transcript
		store := openStore(t, db, mongoq.Config{Logger: log.logger()})
		q := newQueue(t, store, "q", mongoq.QueueConfig{Retry: retries(1), Retention: time.Hour})
		headers := mongoq.Headers(map[string]string{"h": secret})
		fails := func(err error) {
			t.Helper()
			require.Error(t, err)
			require.NotContains(t, err.Error(), secret)
		}
		pushFails := func(payload any, opts ...mongoq.PushOption) {
			t.Helper()
			_, err := q.Push(t.Context(), payload, opts...)
			fails(err)
			_, err = q.PushMany(t.Context(), []any{"fine", mongoq.With(payload, opts...)})
			fails(err)
		}
		large := strings.Repeat(secret, mongoq.MaxEnvelopeSize/len(secret)+1)

		// What is not taken.
		id := push(t, q, "x", mongoq.ID(bson.NewObjectID()))
		pushFails(secret, mongoq.ID(id))
		pushFails(large)
		pushFails(json.Number(secret))
		pushFails(map[string]any{"s": secret, "c": make(chan int)})
		pushFails(bson.Raw(secret))
		pushFails(bson.D{{Key: "s", Value: secret}, {Key: "r", Value: bson.Raw(secret)}})
		pushFails("x", mongoq.Headers(map[string]string{"h": secret + "\xff"}))
		pushFails("x", mongoq.Headers(map[string]string{"": secret}))
		_, err := q.Purge(t.Context())
		require.NoError(t, err)

		// What cannot be decoded, and verbs that are refused.
		push(t, q, secret, headers)
		r := reserve(t, q)
		fails(r.Decode(new(int)))
		var wrong *time.ParseError
		err = r.Decode(new(time.Time))
		fails(err)
		require.ErrorAs(t, err, &wrong)
		fails(r.Decode(new(struct{ A int })))
		fails(r.Decode(new([]int)))
		fails(r.Decode(new(bson.ObjectID)))
		fails(r.Commit(t.Context(), mongoq.Result(large)))
		fails(r.Commit(t.Context(), mongoq.Result(make(chan int))))
		fails(r.MoveToQ(t.Context(), "there", mongoq.Payload(large)))
		fails(r.Rollback(t.Context(), errFailed, mongoq.Headers(map[string]string{"h": large})))
		require.NoError(t, r.Commit(t.Context(), mongoq.Result(secret)))
		fails(r.Commit(t.Context(), mongoq.Result(secret)))
		_, err = q.History().ReplayMany(t.Context(), "again", mongoq.To(newQueue(t, store, "replayed")))
		require.NoError(t, err)
		_, err = q.History().ReplayMany(t.Context(), "again")
		fails(err)

		// What dies: by its failures, with its consumers, past its deadline, and in the hands of typed handlers.
		push(t, q, secret, headers)
		for range 2 {
			require.NoError(t, reserve(t, q).Rollback(t.Context(), errFailed, mongoq.After(0)))
		}
		push(t, q, secret, headers)
		for range 2 {
			reserve(t, q, mongoq.LeaseFor(time.Millisecond))
		}
		push(t, q, secret, headers, mongoq.TTL(time.Millisecond))
		push(t, q, bson.D{{Key: "n", Value: secret}}, headers)
		worker, err := q.Worker(mongoq.Handle(func(context.Context, struct{ N time.Time }) error { return nil }), mongoq.WorkerConfig{
			Middleware: []mongoq.Middleware{mongoq.Logging(log.logger())},
		})
		require.NoError(t, err)
		w := begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, worker.Run(ctx) })
		require.Eventually(t, func() bool {
			s, err := q.Stats(t.Context())
			return err == nil && s.Dead == 3 && s.Total == 0
		}, late, 10*time.Millisecond)
		w.cancel()
		_, err = w.ended(t)
		require.NoError(t, err)

		// What is no envelope, or none that can be kept.
		for _, doc := range []bson.D{
			{{Key: "payload", Value: secret}, {Key: "headers", Value: bson.D{{Key: "h", Value: secret}, {Key: "n", Value: 1}}}},
			{{Key: "payload", Value: secret}, {Key: "retries", Value: secret}, {Key: "errs", Value: secret}},
			{{Key: "payload", Value: secret}, {Key: "deadline", Value: secret}, {Key: "result", Value: secret}, {Key: "more", Value: secret}},
			{{Key: "payload", Value: (large + secret + strings.Repeat(" ", 1<<20))[:16<<20-130]}},
		} {
			_, err := db.Collection("mongoq").InsertOne(t.Context(), append(bson.D{
				{Key: "q", Value: "q"}, {Key: "prio", Value: 1}, {Key: "when", Value: time.Now().Add(-time.Hour)},
			}, doc...))
			require.NoError(t, err)
		}
		died := map[mongoq.DeadKind]int64{
			mongoq.DeadRetries: 1, mongoq.DeadLost: 1, mongoq.DeadPermanent: 1, mongoq.DeadUndecodable: 4,
		}
		require.Eventually(t, func() bool { // a busy server may refuse so much, and it is passed over for a while
			_, err := q.TryReserve(t.Context())
			counts, _ := q.DeadLetters().Count(t.Context())
			return errors.Is(err, mongoq.ErrEmpty) && maps.Equal(counts, died)
		}, 2*late, time.Millisecond)
		for e, err := range q.DeadLetters().List(t.Context()) {
			require.NoError(t, err)
			require.NotContains(t, e.Dead.Msg, secret)
			for _, f := range e.Failures {
				require.NotContains(t, f.Msg, secret)
			}
		}
		_, err = q.DeadLetters().Redrive(t.Context(), mongoq.Rewrite(func(*mongoq.Envelope) (any, error) { return large, nil }))
		fails(err)
		_, err = q.DeadLetters().Redrive(t.Context(), mongoq.Rewrite(func(*mongoq.Envelope) (any, error) { return nil, errors.New("no") }))
		fails(err)

		require.Contains(t, log.String(), "was set aside")
		require.NotContains(t, log.String(), secret)
	})
}

// What cannot be parsed is not quoted, as the parsers of the standard library do.
func TestADecodeErrorDoesNotQuote(t *testing.T) {
	t.Parallel()
	typ, data, err := bson.MarshalValue(bson.D{{Key: "a", Value: bson.D{{Key: "b", Value: "\x7f" + secret}}}})
	require.NoError(t, err)
	e := mongoq.Envelope{Payload: bson.RawValue{Type: typ, Value: data}}
	err = e.Decode(new(struct{ A struct{ B time.Time } }))
	require.ErrorContains(t, err, "a.b")
	require.NotContains(t, err.Error(), secret)
	var wrong *time.ParseError
	require.ErrorAs(t, err, &wrong)
	err = e.Decode(new(struct{ A struct{ B url.URL } }))
	require.ErrorContains(t, err, "a.b")
	require.NotContains(t, err.Error(), secret)
}
