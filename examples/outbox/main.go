// Command outbox is the transactional outbox: an order and the mail that confirms it are stored in one transaction, so
// that there is never the one without the other. An order that fails takes its mail with it; a program that dies
// between the two cannot, since there is nothing between them. The mail's handler then notes that the mail was sent in
// the order, and commits the job, in one transaction as well.
//
// It uses the server that MONGODB_URI names, which must be a replica set, and there the database mongoq_outbox, which
// it drops first. Without MONGODB_URI it starts a mongod for as long as it runs.
//
//	go run ./examples/outbox
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Order is what customers place.
type Order struct {
	ID       bson.ObjectID `bson:"_id"`
	Customer string        `bson:"customer"`
	Item     string        `bson:"item"`
	Pieces   int           `bson:"pieces"`
	Mailed   time.Time     `bson:"mailed,omitempty"`
}

// Mail is a job: the confirmation of an order.
type Mail struct {
	Order bson.ObjectID `bson:"order"`
	To    string        `bson:"to"`
	Text  string        `bson:"text"`
}

func main() {
	if err := start(); err != nil {
		fmt.Fprintln(os.Stderr, "outbox:", err)
		os.Exit(1)
	}
}

func start() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if os.Getenv("MONGODB_URI") == "" {
		fmt.Println("MONGODB_URI is not set: this program brings its own server")
	}
	client, disconnect, err := mongotest.Connect(ctx, func(what string) { fmt.Println("  " + what) })
	if err != nil {
		return err
	}
	defer disconnect()
	db := client.Database("mongoq_outbox")
	if err := db.Drop(ctx); err != nil {
		return fmt.Errorf("dropping what the last run left: %w", err)
	}
	return trade(ctx, db, os.Stdout)
}

// shop is what its parts have in common.
type shop struct {
	client *mongo.Client
	orders *mongo.Collection
	stock  *mongo.Collection
	mails  *mongoq.Queue

	mu   sync.Mutex
	out  io.Writer
	sent int
}

func (s *shop) tell(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, format+"\n", args...)
}

// trade takes some orders while a worker sends the mails, and checks that each order has its mail and no other has.
func trade(ctx context.Context, db *mongo.Database, out io.Writer) (err error) {
	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close(context.WithoutCancel(ctx))) }()
	mails, err := store.Queue("mails", mongoq.QueueConfig{})
	if err != nil {
		return err
	}
	s := &shop{client: db.Client(), orders: db.Collection("orders"), stock: db.Collection("stock"), mails: mails, out: out}
	for item, pieces := range map[string]int{"teapot": 3, "kettle": 1} {
		if _, err := s.stock.InsertOne(ctx, bson.D{{Key: "_id", Value: item}, {Key: "pieces", Value: pieces}}); err != nil {
			return err
		}
	}

	working, stop := context.WithCancel(ctx)
	defer stop()
	worker, err := mails.Worker(s.send, mongoq.WorkerConfig{Concurrency: 2})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(working) }()

	placed := 0
	for _, o := range []Order{
		{Customer: "ada", Item: "teapot", Pieces: 2},
		{Customer: "bob", Item: "kettle", Pieces: 1},
		{Customer: "cleo", Item: "kettle", Pieces: 1}, // there is none left
		{Customer: "dan", Item: "teapot", Pieces: 2},  // nor two of these
		{Customer: "eve", Item: "teapot", Pieces: 1},
	} {
		o.ID = bson.NewObjectID()
		switch err := s.place(ctx, o); {
		case err == nil:
			placed++
			s.tell("order of %s: placed", o.Customer)
		case errors.Is(err, errSoldOut):
			s.tell("order of %s: aborted, %v", o.Customer, err)
		default:
			stop()
			return errors.Join(err, <-ended)
		}
	}

	if err := s.awaitMails(ctx); err != nil {
		stop()
		return errors.Join(err, <-ended)
	}
	stop()
	if err := <-ended; err != nil {
		return err
	}
	return s.check(ctx, placed)
}

var errSoldOut = errors.New("sold out")

// place takes the pieces from the stock, stores the order and pushes its mail: all of it or nothing.
func (s *shop) place(ctx context.Context, o Order) error {
	return s.transact(ctx, func(ctx context.Context) error { // this ctx carries the session
		if _, err := s.orders.InsertOne(ctx, o); err != nil {
			return err
		}
		text := fmt.Sprintf("Thank you for ordering %d %s", o.Pieces, o.Item)
		if _, err := s.mails.Push(ctx, Mail{Order: o.ID, To: o.Customer, Text: text}); err != nil {
			return err
		}
		// By now the order and its mail are written. If this fails, both vanish, and nobody has seen them.
		res, err := s.stock.UpdateOne(ctx,
			bson.D{{Key: "_id", Value: o.Item}, {Key: "pieces", Value: bson.D{{Key: "$gte", Value: o.Pieces}}}},
			bson.D{{Key: "$inc", Value: bson.D{{Key: "pieces", Value: -o.Pieces}}}})
		if err == nil && res.MatchedCount == 0 {
			err = fmt.Errorf("%s: %w", o.Item, errSoldOut)
		}
		return err
	})
}

// send sends a mail, and notes it in the order together with the commit of the job. Who dies before that sends the
// mail twice: outside the database it is at least once, and a mail server that is told the order's id can tell.
func (s *shop) send(ctx context.Context, r *mongoq.Reservation) error {
	var m Mail
	if err := r.Decode(&m); err != nil {
		return err
	}
	s.tell("mail to %s: %s (order %s)", m.To, m.Text, m.Order.Hex())
	s.mu.Lock()
	s.sent++
	s.mu.Unlock()
	return s.transact(ctx, func(ctx context.Context) error {
		_, err := s.orders.UpdateByID(ctx, m.Order, bson.D{{Key: "$set", Value: bson.D{{Key: "mailed", Value: time.Now()}}}})
		if err != nil {
			return err
		}
		return r.Commit(ctx)
	})
}

func (s *shop) transact(ctx context.Context, f func(context.Context) error) error {
	session, err := s.client.StartSession()
	if err != nil {
		return err
	}
	defer session.EndSession(context.WithoutCancel(ctx))
	_, err = session.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, f(ctx) })
	return err
}

// awaitMails waits until no mail waits or is being sent.
func (s *shop) awaitMails(ctx context.Context) error {
	for {
		st, err := s.mails.Stats(ctx)
		if err != nil || st.Total == 0 {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// check counts: a mail for each order, and none besides.
func (s *shop) check(ctx context.Context, placed int) error {
	stored, err := s.orders.CountDocuments(ctx, bson.D{})
	if err != nil {
		return err
	}
	mailed, err := s.orders.CountDocuments(ctx, bson.D{{Key: "mailed", Value: bson.D{{Key: "$exists", Value: true}}}})
	if err != nil {
		return err
	}
	s.tell("%d orders placed, %d stored, %d mails sent, %d noted in their order", placed, stored, s.sent, mailed)
	if int(stored) != placed || s.sent != placed || int(mailed) != placed {
		return errors.New("orders and mails disagree")
	}
	return nil
}
