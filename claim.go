package mongoq

import (
	"context"
	"errors"
	"iter"
	"math"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

const (
	// claimTimeout bounds one claim on the server. A claim takes a millisecond; one that takes this long met an envelope that an open
	// transaction holds, and candidates are then tried one by one.
	claimTimeout = time.Second
	// lookTimeout bounds what a claimer reads beside its claims.
	lookTimeout = 5 * time.Second
	// candidateTimeout bounds the claim of one candidate then.
	candidateTimeout = 100 * time.Millisecond
	// candidates is how many are tried then.
	candidates = 32
	// tooSlow is after how many candidates without a success the server is held to be slow.
	tooSlow = 8
	// skipRetry is how often those passed over are tried, each for a short time, when there is nothing else.
	skipRetry = time.Second
	// skipFor is for how long a candidate that could not be had is passed over.
	skipFor = 5 * time.Second
	// claimAttempts is how often a claim is sent before those who wait are told its error.
	claimAttempts = 4
	// claimBatch is how many envelopes one statement claims at most. After one that took too long it is half as many, at the
	// least claimBatch >> mostHalved.
	claimBatch = 1000
	mostHalved = 5
	// conflicts is how often a claim of several looks for other candidates when somebody else took all of those it had.
	conflicts = 8
	// freshCounts is for how many counts of deliveries there is a statement of its own.
	freshCounts = 4
)

// levels is how many priorities there are, from 1 on.
const levels = 4

// priorities stand in queries whose order is `when`: each is a scan of its own, merged.
var priorities = bson.A{1, 2, 3, 4}

// grant is what a claim asks for.
type grant struct {
	lease   time.Duration
	policy  ExpirePolicy
	durable bool
}

func (g grant) writeConcern() bson.D {
	if g.durable {
		return bson.D{field("w", "majority"), field("j", true)}
	}
	return bson.D{field("w", 1)}
}

// taken is an envelope that a claim got: as the claim left it or, fresh, as it waited before.
type taken struct {
	raw   bson.Raw
	epoch string

	fresh           bool
	reserved, until time.Time // by the earliest that the server's clock can have shown
	latest          time.Time // the latest that it can have shown
	token           bson.ObjectID
	policy          ExpirePolicy
}

// read is the envelope as the claim left it.
func (t taken) read() stored {
	e := read(t.raw)
	if t.fresh {
		e.Due = e.When
		t.reserved = maxTime(t.reserved, e.Due)
		e.Reserved, e.When, e.lease = t.reserved.Truncate(time.Millisecond), t.until.Truncate(time.Millisecond), t.token
		e.Deliveries++
		if e.ExpireAt = (time.Time{}); t.policy == Discard && e.Dead == nil && !e.Deadline.IsZero() {
			e.ExpireAt = maxTime(e.Deadline, e.When)
		}
	}
	return e
}

// claim takes up to n due envelopes, the first first. Each attempt has a new token and is never sent twice: one whose
// answer was lost may still run later, and its token must then belong to nobody. Such tokens are looked for, and
// released.
//
// sure: nothing that is due may be overlooked, since somebody will be told that the queue is empty.
func (c *claimer) claim(ctx context.Context, q *Queue, n int, sure bool, g grant) ([]taken, error) {
	var all []taken
	for {
		got, err := c.claimSome(ctx, q, n-len(all), sure, g)
		all = append(all, got...)
		if err == nil && len(all) == 0 && (sure || time.Since(c.skipsTried) >= skipRetry) {
			c.skipsTried = time.Now()
			all = c.skippedNow(ctx, n, g)
		}
		if len(got) < c.batch() || len(all) >= n || err != nil {
			if len(all) > 0 {
				err = nil // what is had is handed out; the error comes again if it lasts
			}
			return all, err
		}
	}
}

// claimSome is claim for what one statement takes.
func (c *claimer) claimSome(ctx context.Context, q *Queue, n int, sure bool, g grant) ([]taken, error) {
	var last error
	pause := 5 * time.Millisecond
	for range claimAttempts {
		epoch := c.s.clock.known()
		token := bson.NewObjectID()
		c.sent = false
		got, err := c.attempt(ctx, n, sure, g, token)
		if err != nil && len(got) == 0 && c.sent && (n > 1 || mayHaveHappened(err)) {
			c.abandon(token, g.lease) // whatever is under it is nobody's
		}
		if mayPass(err) {
			c.s.clock.distrust() // the server may be another one
		}
		if mayHaveHappened(err) {
			// Too slow, though the server answers: an open transaction holds the head.
			if errors.Is(err, context.DeadlineExceeded) {
				c.halved = min(c.halved+1, mostHalved)
				if !c.s.answers(ctx) {
					return nil, err // the server is away
				}
				if got, none := c.oneByOne(ctx, n, g); none != nil || len(got) > 0 {
					return stamped(got, epoch), none
				}
			}
		}
		if tooLarge(err) {
			if err := q.setAsideTooLarge(ctx); err != nil {
				c.s.log.Warn("mongoq: an envelope that is too large could not be set aside; it is passed over for a while", "queue", c.name, "error", err)
				if got, none := c.oneByOne(ctx, n, g); none == nil && len(got) > 0 {
					return stamped(got, epoch), nil
				}
			}
		}
		switch {
		case err == nil || len(got) > 0:
			return stamped(got, epoch), nil
		case !mayPass(err) && !tooLarge(err):
			return nil, err
		}
		last = err
		if err := sleep(ctx, pause); err != nil {
			return nil, errors.Join(err, last)
		}
		pause *= 4
	}
	return nil, last
}

func (c *claimer) attempt(ctx context.Context, n int, sure bool, g grant, token bson.ObjectID) ([]taken, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	began, _, err := c.s.clock.bounds(ctx)
	if err != nil {
		return nil, err
	}
	from, err := c.floor(ctx, began)
	if err != nil {
		return nil, err
	}
	if time.Since(maxTime(c.low.whole, c.low.tried)) >= lowMost { // for what no look from a bound finds
		c.low.tried, from = time.Now(), time.Time{}
	}
	for range conflicts {
		got, met, err := c.look(ctx, n, g, token, from)
		switch {
		case err != nil || len(got) > 0:
			return got, err
		case met:
			continue // others were faster
		}
		c.low.empty(began)
		switch {
		case from.IsZero():
			c.low.whole = time.Now()
			return nil, nil
		case !sure && time.Since(c.low.whole) < lowMost:
			return nil, nil
		case !sure:
			c.low.whole = time.Now() // also if it fails: whoever waits can do without
		}
		from = time.Time{} // before the queue is called empty
	}
	got, _, err := c.look(ctx, 1, g, token, time.Time{})
	if err == nil && len(got) == 0 {
		c.low.whole = time.Now()
	}
	return got, err
}

// look claims up to n from a bound on; met: there were candidates, whoever got them.
func (c *claimer) look(ctx context.Context, n int, g grant, token bson.ObjectID, from time.Time) (got []taken, met bool, err error) {
	if n > 1 {
		return c.claimMany(ctx, min(n, c.batch()), g, token, from)
	}
	now, _, err := c.s.clock.bounds(ctx)
	if err != nil {
		return nil, false, err
	}
	c.sent = true
	raw, err := c.s.claimOne(ctx, claimTimeout, claimFilter(c.name, c.skipped(), from), c.s.ready, g, token)
	if err != nil || raw == nil {
		return nil, false, err
	}
	c.low.met++
	if due, ok := raw.Lookup("due").TimeOK(); ok {
		c.low.saw(priorityOf(raw), due, now)
	}
	return []taken{{raw: raw}}, true, nil
}

// claimOne is the guarded write for one envelope: one round trip. It goes as a bare command, since the driver would
// send a claim again under the same token.
func (s *Store) claimOne(ctx context.Context, limit time.Duration, filter bson.D, hint string, g grant, token bson.ObjectID) (bson.Raw, error) {
	cmd := bson.D{
		field("findAndModify", s.envs.Name()),
		field("query", filter),
		field("update", claimUpdate(token, g.lease, g.policy)),
		field("new", true),
		field("writeConcern", g.writeConcern()),
	}
	if hint != "" {
		cmd = append(cmd, field("sort", bson.D{field("prio", 1), field("when", 1)}), field("hint", hint))
	}
	reply, err := s.bounded(ctx, limit, cmd)
	if err != nil {
		return nil, err
	}
	doc, _ := reply.Lookup("value").DocumentOK()
	return doc, nil
}

// batch is how many envelopes a statement claims now.
func (c *claimer) batch() int { return claimBatch >> c.halved }

// claimMany is the guarded write for several: find candidates, take them in one statement under one token, read what
// was got. met: there were candidates, or may have been.
//
// An envelope that waits cannot have changed between the find and the claim, if nobody has claimed it meanwhile, which
// the claim's filter asks for: where all are such and all were got, there is nothing to read.
//
// Claimers of several processes see the same head. Those that met each other there go by turns: see turn.go.
func (c *claimer) claimMany(ctx context.Context, n int, g grant, token bson.ObjectID, from time.Time) (got []taken, met bool, err error) {
	over := c.takeTurn(ctx)
	defer over()
	lo, _, err := c.s.clock.bounds(ctx)
	if err != nil {
		return nil, false, err
	}
	found, err := c.s.candidates(ctx, claimFilter(c.name, c.skipped(), from), n)
	if err != nil || len(found) == 0 {
		return nil, false, err
	}
	c.low.met += len(found)
	if when, ok := found[0].raw.Lookup("when").TimeOK(); ok {
		c.low.saw(priorityOf(found[0].raw), when, lo)
	}
	fresh, other := sortFresh(found, g.policy)
	c.sent = true
	won, err := c.s.claimStatements(ctx, c.name, fresh, other, g, token)
	over()
	if err != nil {
		if !mayHaveHappened(err) { // one envelope was refused: those before it were claimed
			if got, _ = c.s.underToken(ctx, found, token); len(got) > 0 {
				return got, true, err
			}
		}
		return got, true, err
	}
	c.turn.learn(len(found) - won)
	if won == c.batch() {
		c.halved = max(c.halved-1, 0)
	}
	switch {
	case won == 0:
		return nil, true, nil
	case won == len(found) && len(other) == 0:
		got = make([]taken, len(found))
		latest := c.s.clock.guess()
		for i, d := range found {
			got[i] = taken{raw: d.raw, fresh: true, reserved: lo, latest: latest, until: lo.Add(g.lease), token: token, policy: g.policy}
		}
		return got, true, nil
	}
	got, err = c.s.underToken(ctx, found, token)
	return got, true, err
}

// candidate is a due envelope that a claimer found.
type candidate struct {
	id  bson.RawValue
	raw bson.Raw
}

// sortFresh tells the ids of those that nobody has claimed since they began to wait, by the count of their claims, and
// that cannot be others under the same id, from the rest. Nothing changes such an envelope but a claim, which counts, or a
// move out of the queue; but for one that waits at a join for its parts.
func sortFresh(found []candidate, p ExpirePolicy) (fresh map[int][]bson.RawValue, other []bson.RawValue) {
	fresh = map[int][]bson.RawValue{}
	for _, d := range found {
		_, reserved := d.raw.LookupErr("reserved")
		_, named := d.raw.LookupErr("digest")
		_, joins := d.raw.LookupErr("join")
		_, expires := d.raw.LookupErr("expireAt") // by another process's policy, if this one's says that it does not
		n, counted := 0, true
		if v, err := d.raw.LookupErr("deliveries"); err == nil {
			n, counted = number(v)
		}
		_, met := fresh[n]
		switch {
		case reserved != nil && named != nil && joins != nil && counted && n >= 0 && (expires != nil || p == Discard) &&
			d.raw.Lookup("when").Type == bson.TypeDateTime && (met || len(fresh) < freshCounts):
			fresh[n] = append(fresh[n], d.id)
		default:
			other = append(other, d.id)
		}
	}
	return fresh, other
}

func priorityOf(raw bson.Raw) int {
	p, _ := number(raw.Lookup("prio"))
	return p
}

// byID is a hint: the planner would try the ready index as well, each time.
var byID = bson.D{field("_id", 1)}

// claimStatements claims what was found, in one command, and says how many were got.
func (s *Store) claimStatements(ctx context.Context, q string, fresh map[int][]bson.RawValue, other []bson.RawValue, g grant, token bson.ObjectID) (int, error) {
	var updates bson.A
	for n, ids := range fresh {
		updates = append(updates, bson.D{
			field("q", claimFreshFilter(q, ids, n)), field("u", claimFreshUpdate(token, g.lease, g.policy, n)), field("multi", true),
			field("hint", byID),
		})
	}
	if len(other) > 0 {
		updates = append(updates, bson.D{
			field("q", claimManyFilter(q, other)), field("u", claimUpdate(token, g.lease, g.policy)), field("multi", true),
			field("hint", byID),
		})
	}
	reply, err := s.bounded(ctx, claimTimeout, bson.D{
		field("update", s.envs.Name()), field("updates", updates), field("ordered", false), field("writeConcern", g.writeConcern()),
	})
	if err != nil {
		return 0, err
	}
	n, _ := number(reply.Lookup("n"))
	return n, nil
}

// underToken reads what a claim got, in the order in which it was found.
func (s *Store) underToken(ctx context.Context, found []candidate, token bson.ObjectID) ([]taken, error) {
	want := make([]bson.RawValue, len(found))
	place := make(map[string]int, len(found))
	for i, d := range found {
		want[i] = d.id
		place[string(d.id.Value)] = i
	}
	cur, err := s.envs.Find(ctx, bson.D{field("_id", op("$in", want)), field("lease", token)})
	if err != nil {
		return nil, err
	}
	defer cur.Close(ctx)
	var got []taken
	for cur.Next(ctx) {
		got = append(got, taken{raw: slices.Clone(cur.Current)})
	}
	if err := cur.Err(); err != nil {
		return nil, err // the token is abandoned as a whole
	}
	slices.SortFunc(got, func(a, b taken) int {
		return place[string(a.raw.Lookup("_id").Value)] - place[string(b.raw.Lookup("_id").Value)]
	})
	return got, nil
}

// candidates finds what is due, the first first.
func (s *Store) candidates(ctx context.Context, filter bson.D, n int) ([]candidate, error) {
	cur, err := s.envs.Find(ctx, filter, options.Find().SetSort(bson.D{field("prio", 1), field("when", 1)}).SetHint(s.ready).
		SetLimit(int64(n)).SetBatchSize(int32(min(n+1, math.MaxInt32))))
	if err != nil {
		return nil, err
	}
	defer cur.Close(ctx)
	var found []candidate
	for cur.Next(ctx) {
		raw := slices.Clone(cur.Current)
		found = append(found, candidate{id: raw.Lookup("_id"), raw: raw})
	}
	return found, cur.Err()
}

func ids(ctx context.Context, cur *mongo.Cursor) ([]bson.RawValue, error) {
	defer cur.Close(ctx)
	var all []bson.RawValue
	for cur.Next(ctx) {
		id := cur.Current.Lookup("_id")
		id.Value = slices.Clone(id.Value)
		all = append(all, id)
	}
	return all, cur.Err()
}

// oneByOne claims candidates singly and for a short time each: one that an open transaction holds, under a lease that
// has run out, would hold up a claim of the head until that transaction ends. Such ones are passed over for a while.
// When nothing can be had it may be the server that is slow, and the caller is told; else the next claim gets past them.
func (c *claimer) oneByOne(ctx context.Context, n int, g grant) ([]taken, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	n = min(n, candidates)
	found, err := c.s.candidates(ctx, claimFilter(c.name, c.skipped(), time.Time{}), candidates)
	if err != nil {
		return nil, err
	}
	ids := make([]bson.RawValue, len(found))
	for i, d := range found {
		ids[i] = d.id
	}
	got, slow, err := c.byID(ctx, ids, n, g)
	for _, id := range slow {
		c.skips = append(c.skips, skip{id: id, until: time.Now().Add(skipFor)})
	}
	if err != nil || len(slow) == tooSlow && len(got) == 0 {
		return nil, errors.Join(err, context.DeadlineExceeded)
	}
	return got, nil
}

// byID claims envelopes one by one; slow are those that could not be had, in short time or at all.
func (c *claimer) byID(ctx context.Context, ids []bson.RawValue, n int, g grant) (got []taken, slow []bson.RawValue, err error) {
	for _, id := range ids {
		if len(got) == n || len(slow) == tooSlow {
			break
		}
		token := bson.NewObjectID()
		raw, err := c.s.claimOne(ctx, candidateTimeout, claimOneFilter(c.name, id), "", g, token)
		switch {
		case err == nil && raw != nil:
			got = append(got, taken{raw: raw})
		case mayHaveHappened(err):
			c.abandon(token, g.lease)
			slow = append(slow, id)
		case tooLarge(err):
			slow = append(slow, id)
		case err != nil && len(got) == 0:
			return nil, nil, err
		}
	}
	return got, slow, nil
}

// skippedNow claims those that are passed over, before anybody is told that the queue is empty.
func (c *claimer) skippedNow(ctx context.Context, n int, g grant) []taken {
	ids := c.skipped()
	if len(ids) == 0 {
		return nil
	}
	epoch := c.s.clock.known()
	got, slow, _ := c.byID(ctx, ids, n, g)
	if len(got)+len(slow) < len(ids) { // others may be had as well, below where a claim looks
		c.late.noteUnknown()
	}
	c.skips = slices.DeleteFunc(c.skips, func(s skip) bool {
		return !slices.ContainsFunc(slow, func(id bson.RawValue) bool { return id.Equal(s.id) })
	})
	return stamped(got, epoch)
}

func stamped(got []taken, epoch string) []taken {
	for i := range got {
		got[i].epoch = epoch
	}
	return got
}

// bounded runs a command that the server is to give up after limit, while its answer may take as long as any: a large
// envelope comes slowly over a slow line. Where the client has a Timeout of its own, limit holds for both.
func (s *Store) bounded(ctx context.Context, limit time.Duration, cmd bson.D) (bson.Raw, error) {
	if s.clientTimeout {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		return s.db.RunCommand(ctx, cmd).Raw()
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // no deadline: the driver would add its own maxTimeMS
	defer cancel(nil)
	defer time.AfterFunc(attemptTimeout, func() { cancel(context.DeadlineExceeded) }).Stop()
	raw, err := s.db.RunCommand(ctx, append(cmd, field("maxTimeMS", limit.Milliseconds()))).Raw()
	if err != nil && ctx.Err() != nil {
		err = errors.Join(context.DeadlineExceeded, err)
	}
	return raw, err
}

// hasClientTimeout tells whether the driver adds a maxTimeMS of the client's: the server refuses a second one.
func hasClientTimeout(ctx context.Context, db *mongo.Database) bool {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer time.AfterFunc(attemptTimeout, cancel).Stop()
	return db.RunCommand(ctx, bson.D{field("ping", 1), field("maxTimeMS", attemptTimeout.Milliseconds())}).Err() != nil
}

// answers is true when the server says hello in short time.
func (s *Store) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, claimTimeout)
	defer cancel()
	_, err := s.clock.hello(ctx)
	return err == nil
}

// skipped are the candidates to pass over now.
func (c *claimer) skipped() []bson.RawValue {
	n := len(c.skips)
	c.skips = slices.DeleteFunc(c.skips, func(s skip) bool { return time.Now().After(s.until) })
	if len(c.skips) < n { // it may be there again, below where others were found meanwhile
		c.late.noteUnknown()
	}
	ids := make([]bson.RawValue, len(c.skips))
	for i, s := range c.skips {
		ids[i] = s.id
	}
	return ids
}

type skip struct {
	id    bson.RawValue
	until time.Time
}

// nextDue asks when the first envelope of the queue can be taken, by this process's clock, zero if there is none, and
// whether it is due. One whose `when` is no date, and sorts after all dates, no claim would ever meet: it is set aside when
// it is all there is.
func (c *claimer) nextDue(ctx context.Context, q *Queue) (at time.Time, due bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	lo, _, err := c.s.clock.bounds(ctx)
	if err != nil {
		return time.Time{}, false, err
	}
	from, err := c.floor(ctx, lo)
	if err != nil {
		return time.Time{}, false, err
	}
	var odd bson.Raw
	for raw, err := range c.firsts(ctx, from) {
		if err != nil {
			return time.Time{}, false, err
		}
		if ms, isDate := raw.Lookup("in").AsInt64OK(); !isDate {
			odd = raw
		} else {
			at = sooner(at, time.Now().Add(time.Duration(ms)*time.Millisecond)) // the next may take long
			due = due || ms <= 0
		}
	}
	if odd != nil && at.IsZero() {
		id := odd.Lookup("_id")
		g := grant{lease: q.cfg.Lease, policy: q.cfg.OnExpire}
		odd, err := c.s.claimOne(ctx, claimTimeout, bson.D{field("_id", id), field("q", c.name), field("processed", nil), field("lease", nil)}, "", g, bson.NewObjectID())
		if err == nil && odd != nil {
			c.hand(ctx, []*waiter{{q: q, gone: true}}, []taken{{raw: odd}})
		}
		return time.Time{}, false, err
	}
	return at, due, nil
}

// firsts are the envelopes with the earliest `when` of each priority, from a bound on: how long until it, and what it
// is. One read for each priority that the queue has, and one that finds no more.
func (c *claimer) firsts(ctx context.Context, from time.Time) iter.Seq2[bson.Raw, error] {
	return func(yield func(bson.Raw, error) bool) {
		left := priorities
		for {
			filter := bson.D{field("q", c.name), field("processed", nil), field("prio", op("$in", left))}
			if !from.IsZero() {
				filter = append(filter, field("when", op("$gte", from)))
			}
			if skipped := c.skipped(); len(skipped) > 0 {
				filter = append(filter, field("_id", op("$nin", skipped)))
			}
			raw, err := c.s.envs.FindOne(ctx, filter, options.FindOne().SetSort(bson.D{field("prio", 1), field("when", 1)}).
				SetHint(c.s.ready).SetProjection(firstFields)).Raw()
			if errors.Is(err, mongo.ErrNoDocuments) || !yield(raw, err) || err != nil {
				return
			}
			// One that is no plain number, which matches all the same, counts for the first that was asked for.
			done := max(priorityOf(raw), levels-len(left)+1)
			if left = priorities[done:]; len(left) == 0 {
				return
			}
		}
	}
}

var firstFields = bson.D{
	field("prio", 1), field("when", 1),
	field("in", cond(isType("when", "date"), op("$subtract", bson.A{"$when", now}), nil)),
}
