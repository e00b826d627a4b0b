package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
)

func ExampleQueue_Push() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	type Mail struct {
		To   string `bson:"to"`
		Text string `bson:"text"`
	}
	id, err := mails.Push(ctx, Mail{To: "ada", Text: "welcome"})
	if err != nil {
		panic(err)
	}

	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	var m Mail
	if err := r.Decode(&m); err != nil {
		panic(err)
	}
	fmt.Println(r.ID == id, m.To, m.Text)
	// Output:
	// true ada welcome
}

// A push in a transaction is there when the transaction commits, together with what else it wrote.
func ExampleQueue_Push_transaction() {
	ctx := context.Background()
	db, drop := exampleDatabase()
	defer drop()
	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		panic(err)
	}
	mails, err := store.Queue("mails", mongoq.QueueConfig{})
	if err != nil {
		panic(err)
	}

	session, err := db.Client().StartSession()
	if err != nil {
		panic(err)
	}
	defer session.EndSession(ctx)
	_, err = session.WithTransaction(ctx, func(ctx context.Context) (any, error) {
		// This ctx carries the session: every verb that gets it is part of the transaction.
		if _, err := db.Collection("orders").InsertOne(ctx, bson.D{{Key: "_id", Value: 7}}); err != nil {
			return nil, err
		}
		return mails.Push(ctx, "thank you for order 7")
	})
	if err != nil {
		panic(err)
	}

	e, err := mails.TryPop(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(e))
	// Output:
	// thank you for order 7
}

func ExampleQueue_PushMany() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	ids, err := mails.PushMany(ctx, []any{
		"for ada",
		"for bob",
		mongoq.With("for cleo, at once", mongoq.Priority(1)), // with options of its own
	}, mongoq.Headers(map[string]string{"campaign": "spring"})) // these are for all
	if err != nil {
		panic(err)
	}

	fmt.Println(len(ids), "pushed")
	for range ids {
		r, err := mails.Reserve(ctx)
		if err != nil {
			panic(err)
		}
		fmt.Println(textOf(&r.Envelope), r.Headers["campaign"])
	}
	// Output:
	// 3 pushed
	// for cleo, at once spring
	// for ada spring
	// for bob spring
}

// What cannot be pushed does not keep its neighbours out.
func ExampleBatchError() {
	ctx := context.Background()
	files, done := exampleQueue("files", mongoq.QueueConfig{})
	defer done()

	_, err := files.PushMany(ctx, []any{"small", strings.Repeat("x", mongoq.MaxEnvelopeSize), "small, too"})

	var some *mongoq.BatchError
	if errors.As(err, &some) {
		for _, f := range some.Failed {
			fmt.Println(f.Index, errors.Is(f.Err, mongoq.ErrPayloadTooLarge))
		}
	}
	s, err := files.Stats(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(s.Total, "are stored")
	// Output:
	// 1 true
	// 2 are stored
}

func ExampleDelay() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	if _, err := mails.Push(ctx, "later", mongoq.Delay(100*time.Millisecond)); err != nil {
		panic(err)
	}

	_, err := mails.TryReserve(ctx)
	fmt.Println(err)
	r, err := mails.Reserve(ctx) // waits until it is due
	if err != nil {
		panic(err)
	}
	fmt.Println(textOf(&r.Envelope))
	// Output:
	// mongoq: queue is empty
	// later
}

func ExampleAt() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	newYear := time.Date(2999, time.January, 1, 0, 0, 0, 0, time.UTC)
	if _, err := mails.Push(ctx, "happy new year", mongoq.At(newYear)); err != nil {
		panic(err)
	}

	s, err := mails.Stats(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(s.Scheduled, "scheduled, the next for", s.NextDue.UTC().Format(time.DateOnly))
	// Output:
	// 1 scheduled, the next for 2999-01-01
}

func ExamplePriority() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{}, "newsletter") // priority 2, the default
	defer done()

	if _, err := mails.Push(ctx, "password reset", mongoq.Priority(1)); err != nil {
		panic(err)
	}
	if _, err := mails.Push(ctx, "statistics", mongoq.Priority(4)); err != nil {
		panic(err)
	}

	next, err := mails.Peek(ctx, 3)
	if err != nil {
		panic(err)
	}
	for _, e := range next {
		fmt.Println(e.Priority, textOf(e))
	}
	// Output:
	// 1 password reset
	// 2 newsletter
	// 4 statistics
}

func ExampleHeaders() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	if _, err := mails.Push(ctx, "hello", mongoq.Headers(map[string]string{"trace": "4711"})); err != nil {
		panic(err)
	}

	r, err := mails.Reserve(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Headers["trace"])
	// Output:
	// 4711
}

// An envelope that nobody took in time is never delivered.
func ExampleTTL() {
	ctx := context.Background()
	codes, done := exampleQueue("codes", mongoq.QueueConfig{OnExpire: mongoq.ToDeadLetter}) // the default discards it
	defer done()

	if _, err := codes.Push(ctx, "login code 1234", mongoq.TTL(20*time.Millisecond)); err != nil {
		panic(err)
	}
	time.Sleep(200 * time.Millisecond)

	_, err := codes.TryReserve(ctx)
	fmt.Println(err)
	for e, err := range codes.DeadLetters().List(ctx) {
		if err != nil {
			panic(err)
		}
		fmt.Println(e.Dead.Kind, e.Dead.Msg)
	}
	// Output:
	// mongoq: queue is empty
	// expired not taken before its deadline
}

// An ID makes a push repeatable: after a lost answer, push again.
func ExampleID() {
	ctx := context.Background()
	mails, done := exampleQueue("mails", mongoq.QueueConfig{})
	defer done()

	id := bson.NewObjectID()
	for range 2 {
		if _, err := mails.Push(ctx, "welcome", mongoq.ID(id)); err != nil {
			panic(err)
		}
	}
	_, err := mails.Push(ctx, "something else", mongoq.ID(id))
	fmt.Println(errors.Is(err, mongoq.ErrDuplicate))

	s, err := mails.Stats(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(s.Total, "stored")
	// Output:
	// true
	// 1 stored
}
