package mongoq

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// The guarded writes: the filter and the update of every transition of an envelope, and what it means when the filter
// matches nothing. Nothing else in the package changes a stored envelope but Remove and the purges, which delete what
// waits, and setAside, which repairs what cannot be read.
//
// The server's clock ($$NOW) decides what is due and when a lease ends. What a user gave stands under $literal, since
// a string may begin with "$". Expressions check types where a document written by hand could make one fail, and leave
// a field of a wrong type as it is, so that the claimer finds it.

// The verbs; all but commit leave a trace in `last`.
const (
	verbCommit     = "commit"
	verbRollback   = "rollback"
	verbRelease    = "release"
	verbMove       = "move"
	verbDeadLetter = "dead-letter"
	verbRedrive    = "redrive"
	verbFork       = "fork"
)

const now = "$$NOW"

// op is an aggregation expression, or any document of one field.
func op(name string, arg any) bson.D { return bson.D{{Key: name, Value: arg}} }

func literal(v any) bson.D { return op("$literal", v) }

func isType(field, name string) bson.D {
	return op("$eq", bson.A{op("$type", "$"+field), name})
}

func cond(test, then, otherwise any) bson.D { return op("$cond", bson.A{test, then, otherwise}) }

// later is the server's time in d.
func later(d time.Duration) any {
	if d <= 0 {
		return now
	}
	return op("$add", bson.A{now, millis(d)})
}

// millis rounds up: what is asked for is never cut short.
func millis(d time.Duration) int64 {
	ms := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		ms++
	}
	return ms
}

// starting is when an envelope may be taken that starts as s says: never before now, but for one that keeps its place.
func starting(s start) any {
	switch {
	case s.place:
		return cond(isType("due", "date"), "$due", now)
	case !s.at.IsZero():
		return op("$max", bson.A{bson.NewDateTimeFromTime(s.at), now})
	}
	return later(s.delay)
}

// plusOne counts, from 0 where there was nothing.
func plusOne(field string) bson.D {
	f := "$" + field
	return cond(op("$isNumber", f), op("$add", bson.A{f, 1}), op("$ifNull", bson.A{f, 1}))
}

// appended is the array with an item more, its last keep items; no array at all is left alone.
func appended(field string, item bson.D, keep int) bson.D {
	f := op("$ifNull", bson.A{"$" + field, bson.A{}})
	return cond(op("$isArray", bson.A{f}),
		op("$slice", bson.A{op("$concatArrays", bson.A{f, bson.A{item}}), -keep}), "$"+field)
}

func failure(retries any, msg string) bson.D {
	return bson.D{{Key: "at", Value: now}, {Key: "retries", Value: retries}, {Key: "msg", Value: literal(msg)}}
}

func lastOf(lease bson.ObjectID, verb string) bson.D {
	return literal(bson.D{{Key: "lease", Value: lease}, {Key: "verb", Value: verb}})
}

// due is true when the server's clock has reached `when`; its bounds use the ready index.
func due() bson.D { return op("$lte", bson.A{"$when", now}) }

// mortal is true for an envelope whose deadline counts: a dead letter keeps its deadline, as a fact only.
func mortal() bson.D {
	return op("$and", bson.A{isType("deadline", "date"), isType("dead", "missing")})
}

// expired is true past the deadline.
func expired() bson.D {
	return op("$and", bson.A{mortal(), op("$lte", bson.A{"$deadline", now})})
}

// idle is true while nobody holds a lease that still runs.
func idle() bson.D {
	return op("$or", bson.A{isType("reserved", "missing"), due()})
}

// expiryWaiting is the `expireAt` of an envelope that waits: its deadline, if the TTL index may delete it.
func expiryWaiting(p ExpirePolicy) any {
	if p == ToDeadLetter {
		return "$$REMOVE"
	}
	return cond(mortal(), "$deadline", "$$REMOVE")
}

// expiryReserved is the `expireAt` of an envelope under a lease: never before the lease ends.
func expiryReserved(p ExpirePolicy, until any) any {
	if p == ToDeadLetter {
		return "$$REMOVE"
	}
	return cond(mortal(), op("$max", bson.A{"$deadline", until}), "$$REMOVE")
}

// set starts an update pipeline.
func set(fields ...bson.E) bson.A { return bson.A{op("$set", bson.D(fields))} }

func field(name string, v any) bson.E { return bson.E{Key: name, Value: v} }

// dropLease ends an update pipeline that gives the envelope up.
func dropLease(p bson.A, more ...string) bson.A {
	return append(p, op("$unset", append([]string{"reserved", "lease"}, more...)))
}

// patched adds what the user replaces; the reservation's headers are merged here, under the lease nobody changes them.
func patched(fields bson.D, p patch, headers map[string]string) bson.D {
	if p.payload != nil {
		fields = append(fields, field("payload", literal(*p.payload)))
	}
	if p.set {
		fields = append(fields, field("headers", literal(p.result(headers))))
	}
	return fields
}

// claim: takes what is due.
//
// Filter: q, not processed, `when` reached, and not before from, if given. Update: `due` = what `when` was, `when` = the
// lease's end, `reserved` now, a new token, one delivery more; if it was reserved, its consumer was lost: one retry more and a failure. Nothing
// matched: nothing is due.
func claimFilter(q string, skip []bson.RawValue, from time.Time) bson.D {
	ready := due()
	if !from.IsZero() {
		ready = op("$and", bson.A{op("$gte", bson.A{"$when", from}), ready})
	}
	f := bson.D{field("q", q), field("processed", nil), field("$expr", ready)}
	if !from.IsZero() { // for each of them
		f = append(f, field("prio", op("$in", priorities)))
	}
	if len(skip) > 0 {
		f = append(f, field("_id", op("$nin", skip)))
	}
	return f
}

func claimOneFilter(q string, id bson.RawValue) bson.D {
	return bson.D{field("_id", id), field("q", q), field("processed", nil), field("$expr", due())}
}

func claimManyFilter(q string, ids []bson.RawValue) bson.D {
	return bson.D{field("_id", op("$in", ids)), field("q", q), field("processed", nil), field("$expr", due())}
}

func claimUpdate(token bson.ObjectID, lease time.Duration, p ExpirePolicy) bson.A {
	until := later(lease)
	lost := op("$ne", bson.A{op("$type", "$reserved"), "missing"})
	entry := append(failure(plusOne("retries"), "the consumer was lost: its lease ran out"), field("lost", true))
	return set(
		field("due", cond(isType("when", "date"), "$when", "$$REMOVE")),
		field("was", cond(isType("when", "date"), "$$REMOVE", op("$ifNull", bson.A{"$when", nil}))),
		field("when", until),
		field("reserved", now),
		field("lease", token),
		field("deliveries", plusOne("deliveries")),
		field("retries", cond(lost, plusOne("retries"), "$retries")),
		field("errs", cond(lost, appended("errs", entry, keptFailures), "$errs")),
		field("expireAt", expiryReserved(p, until)),
	)
}

// claim of what nobody has claimed since it began to wait: the same with less to do.
//
// Filter: q, not processed, not reserved, as many deliveries as it had. Update: as claim's. Nothing matched: somebody
// else was first.
func claimFreshFilter(q string, ids []bson.RawValue, deliveries int) bson.D {
	var count any = deliveries
	if deliveries == 0 { // of one that was never claimed, there is none, unless somebody wrote it by hand
		count = op("$in", bson.A{nil, 0})
	}
	return bson.D{field("_id", op("$in", ids)), field("q", q), field("processed", nil), field("deliveries", count), field("reserved", nil)}
}

func claimFreshUpdate(token bson.ObjectID, lease time.Duration, p ExpirePolicy, deliveries int) bson.A {
	until := later(lease)
	fields := bson.D{
		field("due", "$when"), field("when", until), field("reserved", now), field("lease", token), field("deliveries", deliveries+1),
	}
	if p == Discard {
		fields = append(fields, field("expireAt", expiryReserved(p, until)))
	}
	return set(fields...)
}

// holder is the guard of every verb of a reservation: its id and its token, and not finished. Nothing matched: the
// lease was lost.
func holder(id, lease bson.ObjectID) bson.D {
	return bson.D{field("_id", id), field("lease", lease), field("processed", nil)}
}

// holders guards a statement over several envelopes that were claimed with one token.
func holders(ids []bson.ObjectID, lease bson.ObjectID) bson.D {
	return bson.D{field("_id", op("$in", ids)), field("lease", lease), field("processed", nil)}
}

// extend: holder's guard; `when` = d from now.
func extendUpdate(d time.Duration, p ExpirePolicy) bson.A {
	return set(field("when", later(d)), field("expireAt", expiryReserved(p, later(d))))
}

// commit into the history: holder's guard; processed now, to be forgotten after retention. The lease stays, as
// evidence of who committed. Without a history a commit is a delete under the same guard.
func commitUpdate(keep retention, result *bson.RawValue) bson.A {
	fields := bson.D{field("processed", now), field("expireAt", keep.expireAt(now))}
	if result != nil {
		fields = append(fields, field("result", literal(*result)))
	}
	return set(fields...)
}

// retention is for how long a finished envelope is kept.
type retention struct {
	time   time.Duration
	spread time.Duration // the most that is added at random, to each its own
}

// expireAt is when what was committed at a time may be forgotten.
func (k retention) expireAt(committed any) any {
	if k.time == KeepForever {
		return "$$REMOVE"
	}
	sum := bson.A{committed, millis(k.time)}
	if k.spread > 0 {
		sum = append(sum, op("$floor", op("$multiply", bson.A{op("$rand", bson.D{}), millis(k.spread) + 1})))
	}
	return op("$add", sum)
}

// retention changed: of what is finished, by id. Nothing else of a finished envelope ever changes. Nothing matched: it
// has been forgotten.
func finishedFilter(ids []bson.ObjectID) bson.D {
	return bson.D{field("_id", op("$in", ids)), field("processed", op("$type", "date"))}
}

func retentionUpdate(keep retention) bson.A {
	at := keep.expireAt("$processed")
	if at != "$$REMOVE" {
		at = cond(isType("processed", "date"), at, "$expireAt")
	}
	return set(field("expireAt", at))
}

// rollback: holder's guard; it waits, one retry more, with the failure noted.
func rollbackUpdate(lease bson.ObjectID, wait time.Duration, msg string, s rollbackSettings, had map[string]string, p ExpirePolicy) bson.A {
	fields := bson.D{
		field("when", later(wait)),
		field("retries", plusOne("retries")),
		field("errs", appended("errs", failure(plusOne("retries"), msg), keptFailures)),
		field("last", lastOf(lease, verbRollback)),
		field("expireAt", expiryWaiting(p)),
	}
	return dropLease(set(patched(fields, s.patch, had)...))
}

// release: holder's guard; it waits, and nothing counts as failed.
func releaseUpdate(lease bson.ObjectID, s start, p ExpirePolicy) bson.A {
	return dropLease(set(
		field("when", starting(s)),
		field("last", lastOf(lease, verbRelease)),
		field("expireAt", expiryWaiting(p)),
	))
}

// moveToQ: holder's guard; it waits in another queue, with a fresh count of retries. The deadline goes with it unless
// told otherwise; p is the target's policy.
func moveUpdate(lease bson.ObjectID, from, to string, s moveSettings, had map[string]string, p ExpirePolicy) bson.A {
	fields := bson.D{
		field("q", literal(to)),
		field("when", starting(s.start)),
		field("retries", 0),
		field("moves", plusOne("moves")),
		field("hops", appended("hops", hop(literal(from)), keptHops)),
		field("last", lastOf(lease, verbMove)),
	}
	if s.prio != 0 {
		fields = append(fields, field("prio", s.prio))
	}
	if s.ttl != nil {
		var deadline any = "$$REMOVE"
		if *s.ttl > 0 {
			deadline = later(*s.ttl)
		}
		fields = append(fields, field("deadline", deadline))
	}
	fields = append(fields, s.more...)
	p1 := dropLease(set(patched(fields, s.patch, had)...), "dead", "join")
	// expireAt follows from what the first stages made of the deadline.
	return append(p1, set(field("expireAt", expiryWaiting(p)))...)
}

// moveToQ that changes nothing but the queue: the same in one stage, which the server does faster.
func plainMoveUpdate(lease bson.ObjectID, from, to string, p ExpirePolicy) bson.A {
	var expireAt any = "$$REMOVE"
	if p == Discard { // dead, it is no more
		expireAt = cond(isType("deadline", "date"), "$deadline", "$$REMOVE")
	}
	return set(
		field("q", literal(to)),
		field("when", now),
		field("retries", 0),
		field("moves", plusOne("moves")),
		field("hops", appended("hops", hop(literal(from)), keptHops)),
		field("last", lastOf(lease, verbMove)),
		field("expireAt", expireAt),
		field("reserved", "$$REMOVE"), field("lease", "$$REMOVE"), field("dead", "$$REMOVE"), field("join", "$$REMOVE"),
	)
}

func hop(from any) bson.D {
	return bson.D{field("from", from), field("at", now)}
}

// dead-letter: holder's guard; a move to the dead-letter queue that keeps its retries and says why. It has no expiry,
// whatever deadline it had, unless dead letters are kept for a time only. from may be an expression.
func deadLetterUpdate(last, from any, to string, kind DeadKind, msg string, failed bool, p patch, had map[string]string, keep time.Duration) bson.A {
	var expireAt any = "$$REMOVE"
	if keep > 0 {
		expireAt = later(keep)
	}
	fields := bson.D{
		field("q", literal(to)),
		field("when", now),
		field("moves", plusOne("moves")),
		field("hops", appended("hops", hop(from), keptHops)),
		field("last", last),
		field("dead", bson.D{
			field("from", from), field("at", now), field("kind", literal(string(kind))), field("msg", literal(msg)),
		}),
		field("expireAt", expireAt),
	}
	if failed {
		fields = append(fields, field("errs", appended("errs", failure(plusOne("retries"), msg), keptFailures)))
	}
	return dropLease(set(patched(fields, p, had)...))
}

// expire: dead-letters in one statement those of ids that still wait and are past their deadline. Nothing matched:
// somebody else did.
func expireFilter(q string, ids []bson.RawValue) bson.D {
	return bson.D{
		field("_id", op("$in", ids)), field("q", q), field("processed", nil),
		field("$expr", op("$and", bson.A{due(), expired()})),
	}
}

// redrive: takes dead letters that nobody holds back to where they came from, or elsewhere, with a fresh start: no
// retries, no deadline. Nothing matched: somebody else did.
func redriveUpdate(token bson.ObjectID, s redriveSettings) bson.A {
	var to any = "$dead.from"
	if s.to != nil {
		to = literal(s.to.name)
	}
	fields := bson.D{
		field("q", to),
		field("when", now),
		field("retries", 0),
		field("moves", plusOne("moves")),
		field("hops", appended("hops", hop("$q"), keptHops)),
		field("last", lastOf(token, verbRedrive)),
	}
	if s.patch.payload != nil {
		fields = append(fields, field("payload", literal(*s.patch.payload)))
	}
	switch {
	case s.patch.set && s.patch.merge:
		had := cond(isType("headers", "object"), "$headers", literal(bson.D{}))
		fields = append(fields, field("headers", op("$mergeObjects", bson.A{had, literal(s.patch.headers)})))
	case s.patch.set:
		fields = append(fields, field("headers", literal(s.patch.result(nil))))
	}
	return dropLease(set(fields...), "dead", "deadline", "expireAt", "loops")
}
