package mongoq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// right is an action on one of the store's collections, by the suffix of its name.
type right struct{ suffix, action string }

// The rights of a store's user, as docs/security.md gives them to a role.
var (
	// needed are those without which some verb fails, or an envelope would block its queue.
	needed = []right{
		{"", "find"}, {"", "insert"}, {"", "update"}, {"", "remove"}, {"", "listIndexes"},
		{".queues", "find"}, {".queues", "insert"}, {".queues", "update"},
		{".aside", "insert"},
	}
	// partitionRights are those without which a history has no partitions.
	partitionRights = []right{
		{".history.*", "find"}, {".history.*", "insert"}, {".history.*", "update"}, {".history.*", "remove"},
		{".history.*", "createIndex"}, {".history.*", "dropCollection"},
	}
	// helpful are those without which it goes on, more slowly: nobody is rung for, claimers of several processes hinder each
	// other, and what a killed process held in a transaction is held for longer.
	helpful = []right{
		{".signals", "find"}, {".signals", "insert"},
		{".turns", "find"}, {".turns", "insert"}, {".turns", "update"},
		{".transactions", "find"}, {".transactions", "insert"}, {".transactions", "update"}, {".transactions", "remove"},
	}
	// writing is what one who only watches has no right to.
	writing = []right{{"", "insert"}, {"", "update"}, {"", "remove"}}
)

// checkRights asks the server what its user may do, so that a right that is missing is told of now, and not by the first
// envelope that needs it. A server without access control, or one that does not tell, is not asked further.
func (s *Store) checkRights(ctx context.Context) error {
	raw, err := s.db.RunCommand(ctx, bson.D{field("connectionStatus", 1), field("showPrivileges", true)}).Raw()
	var se mongo.ServerError
	switch {
	case errors.As(err, &se) && !mayPass(err):
		return nil // it does not tell
	case err != nil:
		return err
	}
	var status connectionStatus
	if told := bson.Unmarshal(raw, &status) == nil && len(status.AuthInfo.Users) > 0; !told {
		return nil
	}
	if len(s.missing(status, writing)) == len(writing) && len(s.missing(status, needed[:1])) == 0 {
		s.log.Warn("mongoq: the user may look at envelopes and write none: nothing can be pushed, taken or settled here", "collection", s.envs.Name())
		return nil
	}
	all := needed
	if s.partitioning != PartitionNone {
		all = slices.Concat(needed, partitionRights)
	}
	if missing := s.missing(status, all); len(missing) > 0 {
		return fmt.Errorf("%w: the user needs the right to %s", ErrUnauthorized, strings.Join(missing, ", "))
	}
	if missing := s.missing(status, helpful); len(missing) > 0 {
		s.log.Warn("mongoq: rights are missing that make it faster, see docs/security.md", "missing", strings.Join(missing, ", "))
	}
	return nil
}

// missing names those rights that the user has not.
func (s *Store) missing(status connectionStatus, rights []right) []string {
	var missing []string
	for _, r := range rights {
		coll := s.envs.Name() + r.suffix
		if !slices.ContainsFunc(status.AuthInfo.Privileges, func(p privilege) bool {
			return slices.Contains(p.Actions, r.action) && p.Resource.covers(s.db.Name(), coll)
		}) {
			missing = append(missing, fmt.Sprintf("%s on %s.%s", r.action, s.db.Name(), coll))
		}
	}
	return missing
}

// connectionStatus is what the server tells of its user.
type connectionStatus struct {
	AuthInfo struct {
		Users      []bson.Raw  `bson:"authenticatedUsers"`
		Privileges []privilege `bson:"authenticatedUserPrivileges"`
	} `bson:"authInfo"`
}

type privilege struct {
	Resource resource `bson:"resource"`
	Actions  []string `bson:"actions"`
}

// resource is what a privilege is about.
type resource struct {
	Any        bool    `bson:"anyResource"`
	DB         *string `bson:"db"`         // empty: all
	Collection *string `bson:"collection"` // empty: all but the system's
}

func (r resource) covers(db, coll string) bool {
	if r.Any {
		return true
	}
	return r.DB != nil && r.Collection != nil && (*r.DB == "" || *r.DB == db) && (*r.Collection == "" || *r.Collection == coll)
}

// lacking tells what the user would need for what the server refused for want of rights; other errors stay as they are.
func (s *Store) lacking(err error, action string) error {
	if !hasCode(err, codeUnauthorized) {
		return err
	}
	return fmt.Errorf("%w: the user needs the right to %s on %s.%s: %w", ErrUnauthorized, action, s.db.Name(), s.envs.Name(), err)
}
