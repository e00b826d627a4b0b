package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// joining are the transitions that join a transaction.
func joining() (some []transition) {
	for _, tr := range transitions {
		if !tr.claim && !tr.pop && !tr.harmless {
			some = append(some, tr)
		}
	}
	return some
}

// transactional is a stage on a replica set, with a collection of the caller's own.
func transactional(t testing.TB) (s *stage, orders *mongo.Collection) {
	t.Helper()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	require.NoError(t, db.CreateCollection(t.Context(), "orders"))
	return &stage{kind: mongotest.ReplicaSet, retries: true, db: db, store: openStore(t, db), met: newMet()}, db.Collection("orders")
}

// begun is an open transaction, which ends with the test.
func begun(t testing.TB, db *mongo.Database) (session *mongo.Session, ctx context.Context) {
	t.Helper()
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	t.Cleanup(func() { session.EndSession(context.Background()) })
	require.NoError(t, session.StartTransaction())
	return session, mongo.NewSessionContext(t.Context(), session)
}

// withTransaction runs f by the driver's own WithTransaction.
func withTransaction(t testing.TB, db *mongo.Database, f func(context.Context) error) error {
	t.Helper()
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(context.Background())
	_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) { return nil, f(ctx) })
	return err
}

func requireOrder(t testing.TB, orders *mongo.Collection, id string, there bool) {
	t.Helper()
	n, err := orders.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: id}})
	require.NoError(t, err)
	require.Equal(t, there, n == 1, id)
}

func TestATransactionIsAllOrNothing(t *testing.T) {
	t.Parallel()
	s, orders := transactional(t)
	order := func(ctx context.Context, id string) error {
		_, err := orders.InsertOne(ctx, bson.D{{Key: "_id", Value: id}})
		return err
	}
	abort := errors.New("abort")
	for _, tr := range joining() {
		trial := tr.prepare(t, s)
		both := func(ctx context.Context, id string) error {
			return errors.Join(order(ctx, id), errors.Join(trial.call(ctx)...))
		}
		none := func(id string) {
			require.NotContains(t, trial.effect(t), true, id)
			requireOrder(t, orders, id, false)
		}

		// It aborts, by either way of running it, and can be tried again.
		err := withTransaction(t, s.db, func(ctx context.Context) error {
			require.NoError(t, both(ctx, tr.name+" 1"))
			none(tr.name + " 1")
			return abort
		})
		require.Equal(t, abort, err)
		none(tr.name + " 1")
		session, ctx := begun(t, s.db)
		require.NoError(t, both(ctx, tr.name+" 2"))
		none(tr.name + " 2")
		require.NoError(t, session.AbortTransaction(ctx))
		none(tr.name + " 2")

		// It commits, by either way.
		if tr.name != "commit" && tr.name != "move" {
			require.NoError(t, withTransaction(t, s.db, func(ctx context.Context) error { return both(ctx, tr.name) }))
		} else {
			session, ctx := begun(t, s.db)
			require.NoError(t, both(ctx, tr.name))
			none(tr.name)
			require.NoError(t, session.CommitTransaction(ctx))
		}
		require.NotContains(t, trial.effect(t), false, tr.name)
		requireOrder(t, orders, tr.name, true)
	}
}

// A verb of a transaction that came to nothing can be tried without one.
func TestAVerbAfterATransactionThatAborted(t *testing.T) {
	t.Parallel()
	s, _ := transactional(t)
	for _, tr := range joining() {
		trial := tr.prepare(t, s)
		session, ctx := begun(t, s.db)
		require.NoError(t, errors.Join(trial.call(ctx)...), tr.name)
		require.NoError(t, session.AbortTransaction(ctx))
		require.NoError(t, errors.Join(trial.call(t.Context())...), tr.name)
		require.NotContains(t, trial.effect(t), false, tr.name)
	}
}

// WithTransaction runs its function again when the transaction met a conflict: the verb is a new one then.
func TestATransactionThatRunsAgain(t *testing.T) {
	t.Parallel()
	s, orders := transactional(t)
	bump := func(ctx context.Context, id string) error {
		_, err := orders.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: 1}}}}, upsert)
		return err
	}
	for _, tr := range joining() {
		require.NoError(t, bump(t.Context(), tr.name))
		trial := tr.prepare(t, s)
		runs := 0
		err := withTransaction(t, s.db, func(ctx context.Context) error {
			runs++
			if err := errors.Join(trial.call(ctx)...); err != nil {
				return err
			}
			if runs == 1 { // somebody else is faster
				require.NoError(t, bump(t.Context(), tr.name))
			}
			return bump(ctx, tr.name)
		})
		require.NoError(t, err, tr.name)
		require.Equal(t, 2, runs, tr.name)
		require.NotContains(t, trial.effect(t), false, tr.name)
		n, err := orders.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: tr.name}, {Key: "n", Value: 3}})
		require.NoError(t, err)
		require.EqualValues(t, 1, n, tr.name)
	}
}

// A verb that itself meets the conflict says so in the driver's way, by the label that has WithTransaction run again.
func TestErrorsInATransactionKeepTheirLabels(t *testing.T) {
	t.Parallel()
	s, orders := transactional(t)
	transient := func(err error) bool {
		var le mongo.LabeledError
		return errors.As(err, &le) && le.HasErrorLabel("TransientTransactionError")
	}
	verbs := map[string]func(context.Context, *mongoq.Queue, []*mongoq.Reservation) error{
		"commit": func(ctx context.Context, _ *mongoq.Queue, rs []*mongoq.Reservation) error { return rs[1].Commit(ctx) },
		"rollback": func(ctx context.Context, _ *mongoq.Queue, rs []*mongoq.Reservation) error {
			return rs[1].Rollback(ctx, errFailed)
		},
		"release": func(ctx context.Context, _ *mongoq.Queue, rs []*mongoq.Reservation) error { return rs[1].Release(ctx) },
		"move": func(ctx context.Context, _ *mongoq.Queue, rs []*mongoq.Reservation) error {
			return rs[1].MoveToQ(ctx, "elsewhere")
		},
		"dead-letter": func(ctx context.Context, _ *mongoq.Queue, rs []*mongoq.Reservation) error {
			return rs[1].DeadLetter(ctx, errFailed)
		},
		"commit of many": func(ctx context.Context, q *mongoq.Queue, rs []*mongoq.Reservation) error {
			return q.CommitMany(ctx, rs)
		},
	}
	for name, verb := range verbs {
		q := s.queue(t)
		rs := reserveAll(t, q, 3)
		runs := 0
		err := withTransaction(t, s.db, func(ctx context.Context) error {
			runs++
			_, err := orders.CountDocuments(ctx, bson.D{}) // the transaction sees the database as of now
			require.NoError(t, err)
			if runs == 1 {
				require.NoError(t, rs[1].Extend(t.Context(), time.Hour)) // and this comes after it
			}
			err = verb(ctx, q, rs)
			require.Equal(t, runs == 1, transient(err), "%s: %v", name, err)
			return err
		})
		require.NoError(t, err, name)
		require.Equal(t, 2, runs, name)
	}

	// So do pushes: of an id that somebody pushes meanwhile.
	for name, push := range map[string]func(context.Context, *mongoq.Queue, bson.ObjectID) error{
		"push": func(ctx context.Context, q *mongoq.Queue, id bson.ObjectID) error {
			_, err := q.Push(ctx, "x", mongoq.ID(id))
			return err
		},
		"push of many": func(ctx context.Context, q *mongoq.Queue, id bson.ObjectID) error {
			_, err := q.PushMany(ctx, []any{1, mongoq.With("x", mongoq.ID(id)), 2})
			return err
		},
	} {
		q, id := s.queue(t), bson.NewObjectID()
		runs := 0
		err := withTransaction(t, s.db, func(ctx context.Context) error {
			runs++
			_, err := orders.CountDocuments(ctx, bson.D{})
			require.NoError(t, err)
			if runs == 1 {
				_, err := q.Push(t.Context(), "x", mongoq.ID(id))
				require.NoError(t, err)
			}
			err = push(ctx, q, id)
			require.Equal(t, runs == 1, transient(err), "%s: %v", name, err)
			return err
		})
		require.NoError(t, err, name)
		require.Equal(t, 2, runs, name)
	}
}

func TestClaimsAreRefusedInATransaction(t *testing.T) {
	t.Parallel()
	s, _ := transactional(t)
	q := s.queue(t)
	push(t, q, "x")
	_, open := begun(t, s.db)
	session, err := s.db.Client().StartSession() // without a transaction
	require.NoError(t, err)
	defer session.EndSession(context.Background())
	for _, ctx := range []context.Context{open, mongo.NewSessionContext(t.Context(), session)} {
		for name, claim := range map[string]func() (any, error){
			"Reserve":     func() (any, error) { return q.Reserve(ctx) },
			"TryReserve":  func() (any, error) { return q.TryReserve(ctx) },
			"ReserveMany": func() (any, error) { return q.ReserveMany(ctx, 3) },
			"Pop":         func() (any, error) { return q.Pop(ctx) },
			"TryPop":      func() (any, error) { return q.TryPop(ctx) },
		} {
			_, err := claim()
			require.ErrorIs(t, err, mongoq.ErrInTransaction, name)
		}
	}
	require.Equal(t, "1100", sizes(t, q), "nothing was taken")
}

// requireSoon requires that a call ends within a few seconds, whatever an open transaction holds.
func requireSoon[T any](t testing.TB, what string, call func(context.Context) (T, error)) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	began := time.Now()
	got, err := call(ctx)
	require.NoError(t, err, "%s, after %v", what, time.Since(began))
	return got
}

// An open transaction that has touched a reserved envelope holds up nobody but those who want that very envelope.
func TestAnOpenTransactionHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	s, _ := transactional(t)
	there := s.another(t)
	verbs := map[string]func(context.Context, *mongoq.Reservation) error{
		"commit":  func(ctx context.Context, r *mongoq.Reservation) error { return r.Commit(ctx) },
		"release": func(ctx context.Context, r *mongoq.Reservation) error { return r.Release(ctx) },
	}
	for name, verb := range verbs {
		q := s.queue(t)
		other := newQueue(t, there.store, q.Name(), mongoq.QueueConfig{Lease: time.Hour})
		neighbours := reserveAll(t, q, 2)
		heldElsewhere := reserveAll(t, s.queue(t), 4)
		session, ctx := begun(t, s.db)
		push(t, q, "head")
		head := tryReserve(t, q, mongoq.LeaseFor(brief)) // last: it may lapse at once, and nobody else shall take it
		require.NoError(t, verb(ctx, head), name)
		var wait []*pending[struct{}]
		for _, r := range heldElsewhere { // their holders wait for the transaction: nobody else does
			require.NoError(t, verb(ctx, r), name)
			wait = append(wait, begin(t, func(ctx context.Context) (struct{}, error) { return struct{}{}, verb(ctx, r) }))
		}
		require.Eventually(t, func() bool { // its lease has lapsed: to others it stands at the head
			es, err := q.Peek(t.Context(), 1)
			return err == nil && len(es) == 1
		}, soon, 10*time.Millisecond)
		var behind []bson.ObjectID
		for i := range 5 {
			behind = append(behind, push(t, q, i))
		}

		require.Equal(t, behind[0], requireSoon(t, "a claim", func(ctx context.Context) (*mongoq.Reservation, error) { return q.TryReserve(ctx) }).ID, name)
		require.Equal(t, behind[1], requireSoon(t, "the next", func(ctx context.Context) (*mongoq.Reservation, error) { return q.Reserve(ctx) }).ID, name)
		rs := requireSoon(t, "a claim in another process", func(ctx context.Context) ([]*mongoq.Reservation, error) { return other.ReserveMany(ctx, 3) })
		require.Contains(t, behind[2:], rs[0].ID, name)
		for _, r := range neighbours {
			requireSoon(t, "an extension", func(ctx context.Context) (any, error) { return nil, r.Extend(ctx, time.Minute) })
			requireSoon(t, "a commit", func(ctx context.Context) (any, error) { return nil, r.Commit(ctx) })
		}

		require.NoError(t, session.AbortTransaction(ctx))
		for _, w := range wait {
			w.result(t)
		}
		fresh := newQueue(t, openStore(t, s.db), q.Name()) // one that has not met the transaction
		again := reserve(t, fresh)
		require.Equal(t, head.ID, again.ID)
		require.NoError(t, again.Commit(t.Context()))
	}
}

// Who waits for an envelope that an open transaction holds gets it when that has aborted, whatever its poll interval.
func TestAWaiterGetsWhatAnOpenTransactionHeld(t *testing.T) {
	t.Parallel()
	s, _ := transactional(t)
	q := s.queue(t)
	id := push(t, q, "x")
	r := tryReserve(t, q, mongoq.LeaseFor(brief))
	session, ctx := begun(t, s.db)
	require.NoError(t, r.Commit(ctx))
	w := beginReserve(t, q)
	held := func() bool { // the claim has met the transaction
		_, err := q.TryReserve(t.Context())
		return errors.Is(err, mongoq.ErrEmpty)
	}
	require.Eventually(t, func() bool {
		es, err := q.Peek(t.Context(), 1)
		return err == nil && len(es) == 1
	}, soon, 10*time.Millisecond)
	require.True(t, held())
	require.NoError(t, session.AbortTransaction(ctx))
	got, err := w.ended(t)
	require.NoError(t, err)
	require.Equal(t, id, got.ID)
}

// An extension of what an open transaction holds ends with its context, and does no harm.
func TestExtendOfWhatAnOpenTransactionHolds(t *testing.T) {
	t.Parallel()
	s, _ := transactional(t)
	q := s.queue(t)
	push(t, q, "x")
	r := tryReserve(t, q)
	session, open := begun(t, s.db)
	require.NoError(t, r.Release(open))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	call := begin(t, func(context.Context) (any, error) { return nil, r.Extend(ctx, time.Hour) })
	_, err := call.ended(t)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, mongoq.ErrLeaseLost)
	require.NoError(t, session.AbortTransaction(open))
	require.NoError(t, r.Extend(t.Context(), time.Hour))
	require.NoError(t, r.Commit(t.Context()))
}

// A verb that comes while another of its reservation is under way waits no longer than its context lasts.
func TestAVerbBehindAnotherOfItsReservation(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		s, lossy := lossyStage(t, db, true)
		q := s.queue(t)
		r := reserveAll(t, q, 1)[0]
		held := lossy.HoldReply("update")
		extend := begin(t, func(ctx context.Context) (any, error) { return nil, r.Extend(ctx, time.Minute) })
		awaitHeld(t, held)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		calls := []*pending[any]{
			begin(t, func(context.Context) (any, error) { return nil, r.Commit(ctx) }),
			begin(t, func(context.Context) (any, error) { return nil, r.Extend(ctx, time.Hour) }),
			begin(t, func(context.Context) (any, error) { return nil, q.CommitMany(ctx, []*mongoq.Reservation{r}) }),
		}
		late := time.After(3 * time.Second)
		for i, call := range calls {
			select {
			case <-call.done:
				require.ErrorIs(t, call.err, context.DeadlineExceeded)
				require.NotErrorIs(t, call.err, mongoq.ErrOutcomeUnknown)
			case <-late:
				held.Release()
				require.FailNow(t, "it waits for the other verb", "call %d", i)
			}
		}
		held.Release()
		extend.result(t)
		require.NoError(t, r.Commit(t.Context()))
	})
}

// A round with a push under an id that an open transaction has pushed, which waits for it: the others don't.
func TestAPushThatWaitsForAnOpenTransactionTakesNoOtherDown(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	openStore(t, db)
	s, lossy := lossyStage(t, db, true)
	q, id := s.queue(t), bson.NewObjectID()
	session, open := begun(t, s.db)
	_, err := q.Push(open, "x", mongoq.ID(id))
	require.NoError(t, err)
	c := holdFlights(t, s, lossy, named("push"))
	same := begin(t, func(ctx context.Context) (bson.ObjectID, error) { return q.Push(ctx, "x", mongoq.ID(id)) })
	var others []*pending[bson.ObjectID]
	for i := range 10 {
		others = append(others, begin(t, func(ctx context.Context) (bson.ObjectID, error) { return q.Push(ctx, i) }))
	}
	require.Eventually(t, func() bool {
		pushes, _, _ := mongoq.InLine(s.store)
		return pushes >= len(others)
	}, soon, time.Millisecond)
	c.goOn(t)
	for _, other := range others {
		other.result(t)
	}
	require.NoError(t, session.CommitTransaction(open))
	require.Equal(t, id, same.result(t))
	require.Equal(t, 1+len(others), storedIn(t, db, q.Name()))
}

// Consumers of any process learn of what a transaction pushes when it has committed, and not before.
func TestAPushInATransactionWakesWhoWaits(t *testing.T) {
	t.Parallel()
	s, _ := transactional(t)
	cfg := mongoq.QueueConfig{PollInterval: time.Minute, Lease: time.Hour}
	far := openStore(t, anotherClient(t, s.db))
	for name, prepare := range map[string]func(q *mongoq.Queue) func(context.Context) error{
		"pushes": func(q *mongoq.Queue) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := q.Push(ctx, "x")
				_, again := q.Push(ctx, "x")
				return errors.Join(err, again)
			}
		},
		"push of many": func(q *mongoq.Queue) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := q.PushMany(ctx, []any{"x", "x"})
				return err
			}
		},
		"moves": func(q *mongoq.Queue) func(context.Context) error {
			rs := reserveAll(t, newQueue(t, s.store, "from"), 2)
			return func(ctx context.Context) error {
				return errors.Join(rs[0].MoveToQ(ctx, q.Name()), rs[1].MoveToQ(ctx, q.Name()))
			}
		},
	} {
		q, there := newQueue(t, s.store, name, cfg), newQueue(t, far, name, cfg)
		happen := prepare(q)
		waiters := []*pending[*mongoq.Reservation]{beginReserve(t, q), beginReserve(t, there)}
		require.Eventually(t, func() bool {
			n, _, asleep := mongoq.Line(s.store, name)
			m, _, too := mongoq.Line(far, name)
			return n == 1 && asleep && m == 1 && too && mongoq.Hears(s.store) && mongoq.Hears(far)
		}, soon, time.Millisecond)
		session, ctx := begun(t, s.db)
		require.NoError(t, happen(ctx))
		for _, w := range waiters {
			select {
			case <-w.done:
				require.FailNow(t, "it was delivered before the commit", name)
			default:
			}
		}
		require.NoError(t, session.CommitTransaction(ctx))
		for _, w := range waiters {
			require.Zero(t, w.result(t).Retries, name)
		}
	}
}

// A push under an id can be repeated in its transaction, in another one, and without one.
func TestAPushWithAnIDRepeatedInATransaction(t *testing.T) {
	t.Parallel()
	s, orders := transactional(t)
	q, id := s.queue(t), bson.NewObjectID()
	same := func(ctx context.Context) error {
		got, err := q.Push(ctx, "x", mongoq.ID(id))
		if err == nil && got != id {
			err = fmt.Errorf("another id: %s", got.Hex())
		}
		return err
	}
	other := func(ctx context.Context) error {
		_, err := q.Push(ctx, "another", mongoq.ID(id))
		return err
	}
	for i := range 2 { // in the second the envelope is there
		require.NoError(t, withTransaction(t, s.db, func(ctx context.Context) error {
			_, err := orders.InsertOne(ctx, bson.D{{Key: "_id", Value: fmt.Sprint(i)}})
			require.NoError(t, err)
			require.NoError(t, same(ctx))
			require.NoError(t, same(ctx))
			require.ErrorIs(t, other(ctx), mongoq.ErrDuplicate)
			_, err = q.PushMany(ctx, []any{mongoq.With("x", mongoq.ID(id))})
			return err // none of these has ended the transaction
		}))
		requireOrder(t, orders, fmt.Sprint(i), true)
		require.Equal(t, 1, storedIn(t, s.db, q.Name()))
	}
	require.NoError(t, same(t.Context()))
	require.ErrorIs(t, other(t.Context()), mongoq.ErrDuplicate)
	require.Equal(t, 1, storedIn(t, s.db, q.Name()))
}
