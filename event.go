package mongoq

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// EventKind says what happened to an envelope in a worker.
type EventKind string

// The events of a worker.
const (
	EventReserved     EventKind = "reserved"      // claimed for this worker
	EventCommitted    EventKind = "committed"     // done
	EventFailed       EventKind = "failed"        // rolled back, to be retried
	EventReleased     EventKind = "released"      // snoozed, or given back unstarted
	EventDeadLettered EventKind = "dead-lettered" // failed for good
	EventMoved        EventKind = "moved"         // to another queue
	EventForked       EventKind = "forked"        // into parts
	EventArrived      EventKind = "arrived"       // a part, at its join
	EventHeld         EventKind = "held"          // a forked one that waits for its parts, looked at
	EventDropped      EventKind = "dropped"       // ended by its stage, with a reason
	EventLeaseLost    EventKind = "lease-lost"    // somebody else may have it; its result was discarded
	EventUnsettled    EventKind = "unsettled"     // what it came to could not be stored, or is not known to be
)

// Event is what a worker tells WorkerConfig.OnEvent, for metrics.
type Event struct {
	Kind    EventKind
	Q       string
	ID      bson.ObjectID
	Retries int
	// Deliveries is the envelope's count of claims: two events of one claim have the same.
	Deliveries int
	Waited     time.Duration // from the time it was due to its reservation, by the server's clock
	Ran        time.Duration // in the handler; 0 if it did not run
	Err        error         // the failure, or why it is unsettled
	To         []string      // of a pipeline's stage: the queues that it was moved to, or its copies
}

// event is one of a reservation.
func (r *Reservation) event(kind EventKind) Event {
	return Event{Kind: kind, Q: r.Q, ID: r.ID, Retries: r.Retries, Deliveries: r.Deliveries, Waited: r.Waited()}
}
