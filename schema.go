package mongoq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// oldestServer is the first with $$NOW bounds in $expr, the history's partial index and majority reads everywhere.
const oldestServer = "5.0"

// index is one of the store's indexes.
type index struct {
	name    string
	keys    bson.D
	partial bson.D
	ttl     bool
}

// The store's indexes, by the question they answer.
var (
	// What is due in a queue, the first first; claims hint it.
	readyIndex = index{
		name:    "mongoq_ready",
		keys:    bson.D{field("q", 1), field("prio", 1), field("when", 1)},
		partial: bson.D{field("processed", nil)},
	}
	// What the server may forget.
	ttlIndex = index{
		name:    "mongoq_ttl",
		keys:    bson.D{field("expireAt", 1)},
		partial: bson.D{field("expireAt", op("$type", "date"))},
		ttl:     true,
	}
	// What a queue has done, the latest first.
	historyIndex = index{
		name:    "mongoq_history",
		keys:    bson.D{field("q", 1), field("processed", -1), field("_id", -1)},
		partial: bson.D{field("processed", op("$type", "date"))},
	}
	// What died in a queue, by reason, the latest first.
	deadIndex = index{
		name:    "mongoq_died",
		keys:    bson.D{field("dead.from", 1), field("dead.kind", 1), field("dead.at", -1), field("_id", -1)},
		partial: bson.D{field("dead", op("$exists", true))},
	}
)

// The parts of an envelope that a pipeline has forked.
var partsIndex = index{
	name:    "mongoq_parts",
	keys:    bson.D{field("part.of", 1)},
	partial: bson.D{field("part", op("$exists", true))},
}

func (ix index) spec() bson.D {
	d := bson.D{field("key", ix.keys), field("name", ix.name)}
	if ix.partial != nil {
		d = append(d, field("partialFilterExpression", ix.partial))
	}
	if ix.ttl {
		d = append(d, field("expireAfterSeconds", int32(0)))
	}
	return d
}

// checkServer refuses a server that is too old, and tells whether it has transactions.
func checkServer(ctx context.Context, db *mongo.Database) (transactions bool, err error) {
	raw, err := db.RunCommand(ctx, bson.D{field("buildInfo", 1)}).Raw()
	if err != nil {
		return false, err
	}
	version, _ := raw.Lookup("version").StringValueOK()
	if err := checkVersion(version); err != nil {
		return false, err
	}
	raw, err = db.RunCommand(ctx, bson.D{field("hello", 1)}).Raw()
	if err != nil {
		return false, err
	}
	_, member := raw.Lookup("setName").StringValueOK()
	_, sharded := raw.Lookup("msg").StringValueOK()
	return member || sharded, nil
}

func checkVersion(version string) error {
	major, _, _ := strings.Cut(version, ".")
	if n, err := strconv.Atoi(major); err != nil || n < 5 {
		return fmt.Errorf("%w: MongoDB %s or newer is needed, found %q", ErrUnsupportedServer, oldestServer, version)
	}
	return nil
}

// prepare makes the collection with its validator and its indexes, unless they stand.
func (s *Store) prepare(ctx context.Context) error {
	if err := s.validate(ctx); err != nil {
		return err
	}
	for _, ix := range []index{readyIndex, ttlIndex, historyIndex, deadIndex, partsIndex} {
		name, err := s.ensure(ctx, ix)
		if err != nil {
			return err
		}
		switch ix.name {
		case readyIndex.name:
			s.ready = name
		case historyIndex.name:
			s.history = name
		case deadIndex.name:
			s.dead = name
		case ttlIndex.name:
			s.ttl = name
		case partsIndex.name:
			s.parts = name
		}
	}
	return nil
}

// suitable tells whether a collection that stands can hold queues: an ordinary one, which compares names byte by byte.
func suitable(c mongo.CollectionSpecification) error {
	if c.Type != "collection" {
		return invalid("the collection of a store must be an ordinary one, %q is a %s", c.Name, c.Type)
	}
	if capped, _ := c.Options.Lookup("capped").BooleanOK(); capped {
		return invalid("the collection of a store must not be capped, %q is", c.Name)
	}
	if collation, ok := c.Options.Lookup("collation").DocumentOK(); ok {
		return invalid("the collection of a store must compare by bytes, %q has a collation: %s", c.Name, collation)
	}
	return nil
}

// whenIsDate is the validator: an envelope whose `when` is an array would make the ready index multikey, and every
// claim slow for good.
var whenIsDate = op("$expr", isType("when", "date"))

// validate sees to the validator. It is moderate: what was invalid before may still be updated, so that it can be set
// aside. Without the right to set one, or beside another validator, a warning is all.
func (s *Store) validate(ctx context.Context) error {
	name := s.envs.Name()
	err := s.db.RunCommand(ctx, bson.D{
		field("create", name), field("validator", whenIsDate), field("validationLevel", "moderate"),
	}).Err()
	if err == nil {
		return nil
	}
	if !hasCode(err, codeNamespaceExists) {
		var se mongo.ServerError
		if !errors.As(err, &se) || mayHaveHappened(err) {
			return err
		}
		// Without the right to create a collection the first write may still make it, or somebody has.
		s.log.Warn("mongoq: no validator was set: nothing keeps a document whose `when` is no date out of the collection", "collection", name, "error", err)
		return nil
	}
	specs, err := s.db.ListCollectionSpecifications(ctx, bson.D{field("name", name)})
	if err != nil || len(specs) != 1 {
		return s.lacking(err, "listCollections")
	}
	if err := suitable(specs[0]); err != nil {
		return err
	}
	standing, _ := specs[0].Options.Lookup("validator").DocumentOK()
	want, err := bson.Marshal(whenIsDate)
	if err != nil {
		return err
	}
	switch {
	case bytes.Equal(standing, want):
		return nil
	case len(standing) > 5: // not {}
		s.log.Warn("mongoq: the collection has another validator, which should ask that `when` is a date, too", "collection", name)
		return nil
	}
	err = s.again(ctx, func() error {
		return s.db.RunCommand(ctx, bson.D{
			field("collMod", name), field("validator", whenIsDate), field("validationLevel", "moderate"),
		}).Err()
	})
	if err != nil {
		s.log.Warn("mongoq: no validator was set: nothing keeps a document whose `when` is no date out of the collection", "collection", name, "error", err)
	}
	return ctx.Err()
}

// standingIndex is an index as the server lists it.
type standingIndex struct {
	Name    string   `bson:"name"`
	Key     bson.Raw `bson:"key"`
	Partial bson.Raw `bson:"partialFilterExpression"`
	Expire  *float64 `bson:"expireAfterSeconds"`

	Unique    bool     `bson:"unique"`
	Sparse    bool     `bson:"sparse"`
	Hidden    bool     `bson:"hidden"`
	Collation bson.Raw `bson:"collation"`
}

// plain is true of an index without options that would keep it from serving the store's queries.
func (ix standingIndex) plain() bool {
	return !ix.Unique && !ix.Sparse && !ix.Hidden && len(ix.Collation) == 0
}

// ensure makes an index, or finds one that serves, and gives its name. What stands under the same keys and filter with
// another time to live is changed online; what cannot be changed is named in the error.
func (s *Store) ensure(ctx context.Context, ix index) (string, error) {
	var name string
	err := s.again(ctx, func() error {
		standing, err := s.standing(ctx)
		if err != nil {
			return err
		}
		name, err = s.reconcile(ctx, ix, standing)
		if name != "" || err != nil {
			return err
		}
		name = ix.name
		return s.lacking(s.db.RunCommand(ctx, bson.D{
			field("createIndexes", s.envs.Name()), field("indexes", bson.A{ix.spec()}),
		}).Err(), "createIndex")
	})
	if hasCode(err, codeIndexOptionsConflict, codeIndexKeySpecsConflict) {
		return "", fmt.Errorf("mongoq: index %s of collection %s stands in the way with other options, drop or rename it: %w", ix.name, s.envs.Name(), err)
	}
	return name, err
}

func (s *Store) standing(ctx context.Context) ([]standingIndex, error) {
	cur, err := s.envs.Indexes().List(ctx)
	if err != nil {
		if hasCode(err, codeNamespaceNotFound) {
			return nil, nil
		}
		return nil, s.lacking(err, "listIndexes")
	}
	var all []standingIndex
	return all, cur.All(ctx, &all)
}

// reconcile finds the index that serves as ix; no name and no error: there is none.
func (s *Store) reconcile(ctx context.Context, ix index, standing []standingIndex) (string, error) {
	keys, err := bson.Marshal(ix.keys)
	if err != nil {
		return "", err
	}
	partial, err := bson.Marshal(ix.partial)
	if err != nil {
		return "", err
	}
	for _, old := range standing {
		if sameKeys(old.Key, keys) && old.Unique {
			return "", fmt.Errorf("mongoq: index %s of collection %s is unique, which the store's envelopes are not in these keys: drop it", old.Name, s.envs.Name())
		}
		same := sameKeys(old.Key, keys) && bytes.Equal(old.Partial, partial) && old.plain()
		if old.Name == ix.name && !same {
			return "", fmt.Errorf("mongoq: index %s of collection %s has other keys, another filter or other options than the store's (%v, %v): drop it", old.Name, s.envs.Name(), old.Key, old.Partial)
		}
		if !same {
			continue
		}
		switch {
		case ix.ttl && (old.Expire == nil || *old.Expire != 0):
			// Changing an index that had no time to live into one that has takes MongoDB 5.1.
			err := s.db.RunCommand(ctx, bson.D{
				field("collMod", s.envs.Name()),
				field("index", bson.D{field("name", old.Name), field("expireAfterSeconds", int64(0))}),
			}).Err()
			if err != nil {
				return "", fmt.Errorf("mongoq: index %s of collection %s must have expireAfterSeconds 0 and cannot be changed: %w", old.Name, s.envs.Name(), s.lacking(err, "collMod"))
			}
		case !ix.ttl && old.Expire != nil:
			return "", fmt.Errorf("mongoq: index %s of collection %s must have no expireAfterSeconds, found %v: drop it", old.Name, s.envs.Name(), *old.Expire)
		}
		return old.Name, nil
	}
	return "", nil
}

// sameKeys compares keys by name and number: 1, 1.0 and NumberLong(1) are one.
func sameKeys(a, b bson.Raw) bool {
	x, errX := a.Elements()
	y, errY := b.Elements()
	if errX != nil || errY != nil || len(x) != len(y) {
		return false
	}
	for i := range x {
		m, okM := number(x[i].Value())
		n, okN := number(y[i].Value())
		if x[i].Key() != y[i].Key() || !okM || !okN || m != n {
			return false
		}
	}
	return true
}

// again repeats a change of the schema that met another process making the same one.
func (s *Store) again(ctx context.Context, change func() error) error {
	for pause := 10 * time.Millisecond; ; pause *= 2 {
		err := change()
		if pause > 2*time.Second || !hasCode(err, codeConflictingOperation, codeBuildingIndex, codeNamespaceExists, codeIndexNotFound) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
