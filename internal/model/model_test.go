package model_test

import (
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
)

// maxRetries is what the policy of every queue allows; its waits are zero, so that what is rolled back is due at once.
const maxRetries = 2

// state is where an envelope is in its life.
type state string

const (
	waiting state = "waiting"
	held    state = "held"
	done    state = "done" // in the history; what is deleted is not in the model any more
)

// envelope is what the model knows of one.
type envelope struct {
	no      int // in the order in which they came
	id      bson.ObjectID
	q       string
	payload bson.RawValue
	headers map[string]string
	prio    int

	state   state
	later   bool // it waits for a time that does not come in a test
	lapsed  bool // its lease has run out, and nobody has taken it since
	holder  *ticket
	mortal  bool // it has a deadline
	expired bool // and that has passed

	retries, deliveries, moves, failures, hops int

	dead     string // the queue it died in
	kind     mongoq.DeadKind
	pushedAs string // what was pushed under an id of the caller's
	replayOf bson.ObjectID
	replayID string
	result   bson.RawValue
}

// ticket is a reservation that a consumer was given, whatever became of it since.
type ticket struct {
	no       int
	r        *mongoq.Reservation
	q        string
	e        *envelope // as the model has it
	sure     bool      // the consumer knows when its lease ends: the server's clock did not jump
	settled  bool      // by its own words
	consumer int
}

// rules are what a test may doctor, to see that it would be noticed.
type rules struct {
	staleCommits   bool // a consumer that lost its lease may commit
	forgivenLosses bool // a lost consumer counts no retry
	undeadMoves    bool // a move leaves a dead letter dead
}

// model is what the store should hold.
type model struct {
	rules
	envs map[bson.ObjectID]*envelope
	last int
}

func newModel(r rules) *model { return &model{rules: r, envs: map[bson.ObjectID]*envelope{}} }

func (m *model) add(e *envelope) {
	m.last++
	e.no = m.last
	m.envs[e.id] = e
}

// all gives the envelopes that are chosen, in the order in which they came.
func (m *model) all(chosen func(*envelope) bool) []*envelope {
	var found []*envelope
	for _, e := range m.envs {
		if chosen(e) {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b *envelope) int { return a.no - b.no })
	return found
}

func (m *model) in(q string, chosen func(*envelope) bool) []*envelope {
	return m.all(func(e *envelope) bool { return e.q == q && chosen(e) })
}

func (m *model) died(q string, chosen func(*envelope) bool) []*envelope {
	return m.all(func(e *envelope) bool { return e.dead == q && e.state != done && chosen(e) })
}

// due is true of what a claim may take.
func (e *envelope) due() bool {
	return e.state == waiting && !e.later || e.state == held && e.lapsed
}

// idle is true of what nobody holds.
func (e *envelope) idle() bool { return e.state == waiting || e.state == held && e.lapsed }

// doomed is true of what is never delivered again: the next claim, a purge or the server's TTL index ends it, at a time
// that the model does not know.
func (e *envelope) doomed() bool { return e.expired && e.dead == "" && e.idle() }

// hopeless is true of what a claim dead-letters, since it was lost with its consumers too often.
func (m *model) hopeless(e *envelope, w *world) bool {
	return e.state == held && e.lapsed && e.retries >= maxRetries && e.dead == "" && w.deadLetterOf(e.q) != ""
}

// deliverable is true of what a claim hands out.
func (m *model) deliverable(e *envelope, w *world) bool {
	return e.due() && !e.doomed() && !m.hopeless(e, w)
}

// lose counts that the consumer was lost, if the lease has run out.
func (m *model) lose(e *envelope) {
	if e.state == held {
		if !m.forgivenLosses {
			e.retries++
		}
		e.failures = min(e.failures+1, 10)
	}
}

// claim is what a consumer's claim does.
func (m *model) claim(e *envelope, t *ticket) {
	m.lose(e)
	e.deliveries++
	e.state, e.lapsed, e.later, e.holder = held, false, false, t
}

// holds is true while a verb of the ticket is still allowed.
func (m *model) holds(t *ticket) bool {
	if m.staleCommits && m.envs[t.e.id] == t.e && t.e.state == held {
		return !t.settled
	}
	return m.envs[t.e.id] == t.e && t.e.state == held && t.e.holder == t
}

// giveUp is the part that all verbs have that end a lease and leave the envelope waiting.
func (e *envelope) giveUp(later bool) {
	e.state, e.lapsed, e.later, e.holder = waiting, false, later, nil
}

func (m *model) commit(e *envelope, keeps bool, result bson.RawValue) {
	if !keeps {
		delete(m.envs, e.id)
		return
	}
	e.state, e.lapsed, e.result = done, false, result
}

func (e *envelope) hop(to string, later bool) {
	e.giveUp(later)
	e.q = to
	e.moves++
	e.hops = min(e.hops+1, 32)
}

// fail is a rollback: another try, or the dead-letter queue. at is what the consumer knows, which is as it was claimed.
func (m *model) fail(e *envelope, later bool, w *world) {
	to := w.deadLetterOf(e.q)
	if e.retries+1 > maxRetries && e.dead == "" && to != "" {
		m.bury(e, to, mongoq.DeadRetries)
		return
	}
	e.giveUp(later)
	e.retries++
	e.failures = min(e.failures+1, 10)
}

// bury is a dead-lettering with a failure; its retries stay.
func (m *model) bury(e *envelope, to string, kind mongoq.DeadKind) {
	if kind != mongoq.DeadLost && kind != mongoq.DeadExpired {
		e.failures = min(e.failures+1, 10)
	}
	e.dead, e.kind = e.q, kind
	e.hop(to, false)
}

func (m *model) deadLetter(e *envelope, w *world) {
	if e.dead != "" {
		e.giveUp(false)
		e.retries++
		e.failures = min(e.failures+1, 10)
		return
	}
	m.bury(e, w.deadLetterOf(e.q), mongoq.DeadExplicit)
}

func (m *model) move(e *envelope, to string, later bool) {
	e.hop(to, later)
	e.retries = 0
	if e.dead != "" { // its deadline is a fact of the past
		e.mortal, e.expired = false, false
	}
	if !m.undeadMoves {
		e.dead, e.kind = "", ""
	}
}

func (m *model) redrive(e *envelope, to string) {
	e.hop(to, false)
	e.retries, e.dead, e.kind, e.mortal, e.expired = 0, "", "", false, false
}
