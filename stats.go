package mongoq

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// statsBound is how far Stats counts.
const statsBound = 10_000

// Stats are the sizes of a queue at one moment of the server's clock.
type Stats struct {
	Q     string
	Total int64 // live: Ready + Scheduled + Reserved

	Ready     int64 // due: waiting, or held under a lease that has run out
	Scheduled int64 // waiting for a later time
	Reserved  int64 // held under a lease that runs
	Processed int64 // in the history
	Dead      int64 // dead letters that came from this queue, wherever they are

	OldestReady time.Duration // for how long the oldest ready one has been due
	NextDue     time.Time     // when the next scheduled one falls due; zero: none

	Paused bool
	Capped bool // a count stopped at its bound: there are more
}

// Stats counts. Each count is exact up to 10,000, and stops there with Capped set: a few tens of milliseconds whatever the
// queue holds. Of envelopes that are not due, only the 10,000 soonest are counted, as Scheduled or Reserved. What is on its
// way into its partition of the history may be counted twice. Exact counts to the end, at one to two seconds for each
// million envelopes.
func (q *Queue) Stats(ctx context.Context, opts ...StatsOption) (Stats, error) {
	var set statsSettings
	for _, o := range opts {
		if err := o.applyStats(&set); err != nil {
			return Stats{}, err
		}
	}
	if err := q.s.open(); err != nil {
		return Stats{}, err
	}
	return q.s.stats(outside(ctx), q.name, set.exact)
}

// stats counts in one statement, so that all counts are of one $$NOW. Each part reads one index.
func (s *Store) stats(ctx context.Context, q string, exact bool) (Stats, error) {
	bounded := func(match bson.D, stages ...bson.D) bson.A {
		a := bson.A{op("$match", match)}
		for _, st := range stages {
			a = append(a, st)
		}
		return a
	}
	limit := op("$limit", statsBound+1)
	if exact {
		limit = op("$match", bson.D{})
	}
	count := func(id string) bson.D {
		return op("$group", bson.D{field("_id", id), field("n", op("$sum", 1))})
	}
	live := bson.D{field("q", q), field("processed", nil)} // dividers are never due, and of no priority
	with := func(more ...bson.E) bson.D { return append(slices.Clone(live), more...) }
	later := field("$expr", op("$gt", bson.A{"$when", now}))
	byPrio := field("prio", op("$in", priorities))
	soonest := op("$sort", bson.D{field("when", 1)})
	first := op("$limit", 1)
	show := func(id string) bson.D {
		return op("$project", bson.D{field("_id", literal(id)), field("when", 1), field("now", now)})
	}
	finished := bson.D{field("q", q), field("processed", op("$type", "date"))}
	filed, err := s.partitions(ctx)
	if err != nil {
		return Stats{}, err
	}
	var history []bson.D // the rest of it
	history = append(history, united(filed, bson.A{op("$match", finished)})...)
	parts := []bson.A{
		bounded(with(field("$expr", due())), limit, count("ready")),
		bounded(with(byPrio, later), soonest, limit, op("$group", bson.D{
			field("_id", cond(isType("reserved", "missing"), "scheduled", "reserved")), field("n", op("$sum", 1)),
		})),
		bounded(finished, append(history, limit, count("processed"))...),
		bounded(bson.D{field("dead.from", q), field("dead", op("$exists", true)), field("processed", nil)}, limit, count("dead")),
		bounded(with(byPrio, field("$expr", due())), soonest, first, show("oldest")),
		bounded(with(byPrio, later, field("reserved", nil)), soonest, first, show("next")),
	}
	pipeline := parts[0]
	for _, p := range parts[1:] {
		pipeline = append(pipeline, unionWith(s.envs.Name(), p))
	}
	st := Stats{Q: q}
	cur, err := s.envs.Aggregate(ctx, pipeline)
	if err != nil {
		return st, err
	}
	defer cur.Close(ctx)
	for cur.Next(ctx) {
		s.fill(&st, cur.Current, exact)
	}
	if err := cur.Err(); err != nil {
		return st, err
	}
	st.Total = st.Ready + st.Scheduled + st.Reserved
	st.Paused, err = s.paused(ctx, q)
	return st, err
}

// fill adds one row of the statement's answer.
func (s *Store) fill(st *Stats, row bson.Raw, exact bool) {
	id, _ := row.Lookup("_id").StringValueOK()
	n, _ := number(row.Lookup("n"))
	got := int64(n)
	if !exact && got > statsBound {
		got, st.Capped = statsBound, true
	}
	when, _ := row.Lookup("when").TimeOK()
	at, _ := row.Lookup("now").TimeOK()
	switch id {
	case "ready":
		st.Ready = got
	case "scheduled":
		st.Scheduled = got
	case "reserved":
		st.Reserved = got
	case "processed":
		st.Processed = got
	case "dead":
		st.Dead = got
	case "oldest":
		if !when.IsZero() {
			st.OldestReady = max(at.Sub(when), 0)
		}
	case "next":
		st.NextDue = when
	}
	if !exact && st.Scheduled+st.Reserved > statsBound {
		st.Capped = true
	}
}

// Queues gives the bounded Stats of every queue that holds something, live or in the history, or is paused, by name.
// It costs two round trips a queue.
func (s *Store) Queues(ctx context.Context) ([]Stats, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	ctx = outside(ctx)
	names := map[string]bool{}
	if err := s.walkNames(ctx, names, s.envs, readyIndex, s.ready, field("processed", nil), undivided); err != nil {
		return nil, err
	}
	if err := s.finishedNames(ctx, names); err != nil {
		return nil, err
	}
	cur, err := s.queues.Find(ctx, bson.D{field("paused", true)})
	if err != nil {
		return nil, err
	}
	var states []struct {
		ID string `bson:"_id"`
	}
	if err := cur.All(ctx, &states); err != nil {
		return nil, err
	}
	for _, st := range states {
		names[st.ID] = true
	}
	all := make([]Stats, 0, len(names))
	for _, name := range sortedKeys(names) {
		st, err := s.stats(ctx, name, false)
		if err != nil {
			return nil, err
		}
		all = append(all, st)
	}
	return all, nil
}

// walkNames skips through an index from one queue's name to the next: a key for each.
func (s *Store) walkNames(ctx context.Context, names map[string]bool, coll *mongo.Collection, ix index, hint any, partial ...bson.E) error {
	last := ""
	for {
		raw, err := coll.FindOne(ctx, append(bson.D{field("q", op("$gt", last))}, partial...), options.FindOne().
			SetSort(ix.keys).SetHint(hint).SetProjection(bson.D{field("_id", 0), field("q", 1)})).Raw()
		if errors.Is(err, mongo.ErrNoDocuments) {
			return nil
		}
		if err != nil {
			return err
		}
		var ok bool
		if last, ok = raw.Lookup("q").StringValueOK(); !ok {
			return nil
		}
		names[last] = true
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
