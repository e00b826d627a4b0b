package mongoq

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// endedSize is what the mark of an ended part has beside its branch and its message, in bytes, at the most.
const endedSize = 128

// The guarded writes of forks and joins, as writes.go has those of every transition. What they are for stands in
// docs/decisions/018-fork-and-join.md.

// fork of an envelope that has a join: holder's guard, in the transaction that inserts the copies. The original becomes
// the whole: it waits in the join's queue for its parts, and falls due when they should be looked for. Without a join
// it is deleted under the same guard.
func forkUpdate(lease bson.ObjectID, from, to string, branches []string, whole patch, had map[string]string, p ExpirePolicy) bson.A {
	fields := bson.D{
		field("q", literal(to)),
		field("when", later(lookFirst)),
		field("retries", 0),
		field("moves", plusOne("moves")),
		field("hops", appended("hops", hop(literal(from)), keptHops)),
		field("last", lastOf(lease, verbFork)),
		field("join", literal(bson.D{
			field("fork", lease), field("at", to), field("n", len(branches)), field("branches", branches),
			field("got", bson.A{}), field("ended", bson.A{}), field("looks", 0),
		})),
	}
	p1 := dropLease(set(patched(fields, whole, had)...), "dead")
	return append(p1, set(field("expireAt", expiryWaiting(p)))...)
}

// gather: puts a part into its whole. The guard is the fork's token, that the join is open, and that the part is not in
// it, and that the whole stays an envelope with it: what is larger could neither be claimed nor fail. It asks for no lease:
// what has arrived does not change, so that a part put in again is the same. Nothing matched: it is there already, it comes
// too late, or it is too much.
func gatherFilter(p *Part, id bson.ObjectID, size int) bson.D {
	return bson.D{
		field("_id", p.Of), field("processed", nil), field("join.fork", p.fork), field("join.closed", nil),
		field("join.got.id", op("$ne", id)),
		field("$expr", op("$lte", bson.A{op("$bsonSize", "$$ROOT"), MaxEnvelopeSize - size})),
	}
}

// gatherWrite is that of a part with its content, which may have been given up for dead before.
func gatherWrite(r *Reservation) (filter bson.D, update bson.A) {
	e := &r.Envelope
	got := bson.D{
		field("id", e.ID), field("i", e.Part.Index), field("branch", literal(e.Part.Branch)), field("at", now),
		field("payload", literal(e.Payload)), field("headers", literal(headersOf(e.Headers))), field("hops", literal(hopDocs(e.Hops))),
	}
	return gatherFilter(e.Part, e.ID, r.size), complete(set(
		field("join.got", op("$concatArrays", bson.A{"$join.got", bson.A{got}})),
		field("join.ended", without(e.ID)),
	))
}

// endedUpdate is that of a part that a stage has ended.
func endedUpdate(m *MissingPart) bson.A {
	return complete(set(field("join.ended", op("$concatArrays", bson.A{without(m.ID), bson.A{literal(m.doc())}}))))
}

// endedWrite is the gathering of such a part: its mark, with a message that is cut, in place of its content.
func endedWrite(p *Part, id bson.ObjectID, end ending) (filter bson.D, update bson.A) {
	m := MissingPart{ID: id, Branch: p.Branch, Ended: true, Msg: cut(end.Verb + ": " + end.Msg), told: true}
	return append(gatherFilter(p, id, len(m.Msg)+len(m.Branch)+endedSize), field("join.ended.id", op("$ne", id))), endedUpdate(&m)
}

// settled is true of a whole that waits for no more parts. The server may ask that of a document before it asks whether it
// is that whole: one that has gone on has no parts.
func settled() bson.D {
	count := func(parts string) bson.D { return cond(op("$isArray", parts), op("$size", parts), 0) }
	return op("$and", bson.A{
		op("$isNumber", "$join.n"), op("$gte", bson.A{op("$add", bson.A{count("$join.got"), count("$join.ended")}), "$join.n"}),
	})
}

// complete has a whole that now has all its parts looked at soon: should nobody live to close it.
func complete(p bson.A) bson.A {
	due := op("$and", bson.A{settled(), isType("reserved", "missing"), isType("dead", "missing")})
	return append(p, set(field("when", cond(due, later(lookSoon), "$when")))...)
}

// headersOf is never nil: an empty one is none.
func headersOf(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

func without(id bson.ObjectID) bson.D {
	return op("$filter", bson.D{field("input", "$join.ended"), field("cond", op("$ne", bson.A{"$$this.id", id}))})
}

// close: a whole that waits for no more parts is due, or comes back to life if it was dead. The guard is the fork's
// token and that it is complete; that it is not closed yet, but for one that died when it was. Nothing matched: parts are
// missing, or somebody else did it.
func completeFilter(w whole) bson.D {
	return bson.D{
		field("_id", w.id), field("processed", nil), field("join.fork", w.fork),
		field("$expr", settled()),
	}
}

func closeFilter(w whole) bson.D {
	return append(completeFilter(w), field("join.closed", nil))
}

// closeUpdate leaves `when` to the one who looks at it, who gives it back. One that died waits where it is.
func closeUpdate() bson.A {
	waits := op("$and", bson.A{isType("reserved", "missing"), isType("dead", "missing")})
	return set(field("join.closed", now), field("when", cond(waits, now, "$when")))
}

// reviveFilter: it died of a part, and nobody holds the dead letter, for whom a redrive would find it complete. What died
// of anything else is for people to look at.
func reviveFilter(w whole) bson.D {
	return append(completeFilter(w), field("dead.kind", string(DeadPart)), field("reserved", nil))
}

// hold: holder's guard; the whole goes on waiting, without those parts that will not come. If it was closed meanwhile it
// is due; if it has all its parts, whoever put in the last while it was held may not live to close it.
func holdUpdate(lease bson.ObjectID, d time.Duration, missing bson.A, p ExpirePolicy) bson.A {
	arrived := op("$map", bson.D{field("input", "$join.got"), field("in", "$$this.id")})
	known := op("$map", bson.D{field("input", "$join.ended"), field("in", "$$this.id")})
	fresh := op("$filter", bson.D{
		field("input", literal(missing)),
		field("cond", op("$not", op("$in", bson.A{"$$this.id", op("$concatArrays", bson.A{arrived, known})}))),
	})
	closed := op("$eq", bson.A{op("$type", "$join.closed"), "date"})
	held := set(
		field("join.looks", plusOne("join.looks")),
		field("join.ended", cond(closed, "$join.ended", op("$concatArrays", bson.A{"$join.ended", fresh}))),
		field("last", lastOf(lease, verbRelease)),
		field("expireAt", expiryWaiting(p)),
	)
	return dropLease(append(held, set(field("when", cond(closed, now, cond(settled(), later(min(d, lookSoon)), later(d)))))...))
}

// tell: a whole that waits for a part that died is looked at now. Nothing matched: it is looked at, or was.
func tellFilter(p *Part) bson.D {
	return bson.D{
		field("_id", p.Of), field("q", p.join), field("processed", nil), field("reserved", nil), field("dead", nil),
		field("join.fork", p.fork), field("join.closed", nil),
	}
}
