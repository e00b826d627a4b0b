// Package mongoq is a job queue on MongoDB, inside the program that uses it: no broker, no server of its own.
//
// A [Store] is a set of queues that share a collection. What goes through a [Queue] is an [Envelope]: a payload of any
// BSON type, with headers, a priority and a due time.
//
// # The way of an envelope
//
// [Queue.Push] stores it, now or for later. [Queue.Reserve] takes the next one that is due, under a lease: for as long
// as the lease runs, nobody else gets it. The holder of the [Reservation] then settles it by one of these verbs:
//
//   - [Reservation.Commit]: the work is done. The envelope is deleted, or stays in the [History] for a time.
//   - [Reservation.Rollback]: the work failed. It comes again after the queue's backoff, or, when that gives up, goes
//     to the dead-letter queue.
//   - [Reservation.Release]: the work was not begun. It comes again, and nothing counts as failed.
//   - [Reservation.MoveToQ]: the next step is another queue's. It is there in one atomic step.
//   - [Reservation.DeadLetter]: no retry would help.
//
// A [Worker] does that for a [Handler], by what the handler returns: see [Queue.Worker].
//
// [Reservation.Extend] keeps the lease alive meanwhile. A lease that runs out brings the envelope to another consumer,
// with one retry more; one that loses its consumers too often becomes a dead letter, too. [Queue.DeadLetters] lists
// dead letters, and puts them back to where they came from. [Queue.Pop] reserves and commits in one call: at most once.
//
// # Guarantees
//
//   - At least once: what a push acknowledged is delivered until somebody settles it, or its TTL ends.
//   - None lost: pushes, and the verbs that settle, wait for a journaled majority.
//   - None done by a stale consumer: every claim has a new token, and every verb asks for it. One who comes too late
//     gets [ErrLeaseLost] and changes nothing.
//   - None stuck: a lease ends by itself, by the server's clock.
//   - No guessing: a verb whose answer was lost ends as what happened, or as [ErrOutcomeUnknown].
//
// Not exactly once: handlers with effects outside have to be idempotent. And a failover may hand out an envelope again
// that somebody still works on, unless the queue has DurableClaims; only one of the two can commit. docs/guarantees.md
// has the whole list, and how each is kept.
//
// # Transactions
//
// A context that carries a MongoDB session makes a push, and the verbs that settle, part of its transaction. Reserve
// and Pop in one are [ErrInTransaction].
//
// # Examples
//
// Every verb has one in this documentation, which runs against a real server with the tests. The folder examples holds
// whole programs: quickstart is a walk through the queue, etl a pipeline of seven stages over real input; workerpool, retry
// and outbox show a pool, its retries, and jobs in transactions.
package mongoq
