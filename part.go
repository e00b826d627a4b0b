package mongoq

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Part says of which fork an envelope is a part.
type Part struct {
	Of     bson.ObjectID // the envelope that was forked: where there is a join, it waits there
	Branch string        // the stage that this part was sent to
	Index  int           // its place among the branches, from 0
	Count  int           // how many parts the fork made

	fork bson.ObjectID // the token under which it was made
	join string        // the queue of the join; empty: none
	end  *ending       // it will not come any further
}

// ending is what a part that a stage ended tells its join.
type ending struct {
	Verb string `bson:"verb"`
	Msg  string `bson:"msg"`
}

// The verbs of an ending.
const (
	endedDone    = "done"
	endedDropped = "dropped"
)

// Joined is what a join knows of the parts of an envelope.
type Joined struct {
	Parts   []JoinedPart  // those that arrived, in the order of the fork's branches
	Missing []MissingPart // those that the join went on without
	Count   int           // how many parts the fork made
	Closed  bool          // it waits for no more

	fork     bson.ObjectID
	at       string   // the join's queue
	branches []string // by index
	looks    int      // how often the missing parts were looked for
	size     int      // as stored, in bytes
	total    int      // of the whole, where that was asked for
}

// JoinedPart is a part as it arrived.
type JoinedPart struct {
	ID      bson.ObjectID
	Branch  string
	At      time.Time // when it was put to the others
	Headers map[string]string
	Payload bson.RawValue // see Decode
	Hops    []Hop

	index int
}

// Decode decodes the part's payload into v, as Envelope.Decode does.
func (p *JoinedPart) Decode(v any) error {
	if err := p.Payload.Unmarshal(v); err != nil {
		return fmt.Errorf("mongoq: cannot decode the payload of part %q into %T: %w", p.Branch, v, unquoted(err))
	}
	return nil
}

// MissingPart is a part that did not arrive.
type MissingPart struct {
	ID     bson.ObjectID
	Branch string
	Ended  bool     // a stage has ended it, by Done or Drop
	Dead   DeadKind // it died, and why; empty and not Ended: it is gone, removed or expired
	Msg    string   // the reason

	told bool // it said so itself
}

// Part gives the part of a branch, nil if it is missing.
func (j *Joined) Part(branch string) *JoinedPart {
	for i := range j.Parts {
		if j.Parts[i].Branch == branch {
			return &j.Parts[i]
		}
	}
	return nil
}

// has tells whether a part has arrived or told of its end.
func (j *Joined) has(id bson.ObjectID) bool {
	for i := range j.Parts {
		if j.Parts[i].ID == id {
			return true
		}
	}
	for _, m := range j.Missing {
		if m.ID == id && m.told {
			return true
		}
	}
	return false
}

// settled are the parts that the join does not wait for.
func (j *Joined) settled() map[bson.ObjectID]bool {
	ids := map[bson.ObjectID]bool{}
	for i := range j.Parts {
		ids[j.Parts[i].ID] = true
	}
	for _, m := range j.Missing {
		ids[m.ID] = true
	}
	return ids
}

// partID is the id of the i-th part: it follows from the fork, so that a repeated attempt makes no other.
func partID(of, fork bson.ObjectID, i int) bson.ObjectID {
	sum := sha256.Sum256(binary.BigEndian.AppendUint32(append(append([]byte("part"), of[:]...), fork[:]...), uint32(i)))
	return bson.ObjectID(sum[:12])
}

// readPipeline reads the fields that pipelines keep.
func (s *stored) readPipeline(key string, v bson.RawValue) bool {
	if key == "ways" {
		var ok bool
		s.Ways, ok = readEach(v, func(doc bson.Raw) JoinedPart {
			if p, ok := readJoinedPart(doc); ok {
				return *p
			}
			return JoinedPart{}
		})
		return ok
	}
	doc, ok := v.DocumentOK()
	if !ok {
		return false
	}
	switch key {
	case "loops":
		return bson.Unmarshal(doc, &s.Loops) == nil
	case "part":
		s.Part, ok = readPart(doc)
	case "join":
		s.Joined, ok = readJoined(doc)
	}
	return ok
}

func readPart(doc bson.Raw) (*Part, bool) {
	var d struct {
		Of, Fork     bson.ObjectID
		Branch, Join string
		I, N         int
		End          *ending
	}
	if bson.Unmarshal(doc, &d) != nil {
		return nil, false
	}
	return &Part{Of: d.Of, Branch: d.Branch, Index: d.I, Count: d.N, fork: d.Fork, join: d.Join, end: d.End}, true
}

func readJoined(doc bson.Raw) (*Joined, bool) {
	var d struct {
		Fork     bson.ObjectID
		At       string
		N        int
		Looks    int
		Total    int
		Branches []string
		Closed   time.Time
		Got      []bson.Raw
		Ended    []struct {
			ID     bson.ObjectID
			Branch string
			Ended  bool
			Dead   string
			Msg    string
			Told   bool
		}
	}
	if bson.Unmarshal(doc, &d) != nil || d.N != len(d.Branches) || d.Looks < 0 {
		return nil, false
	}
	j := &Joined{Count: d.N, Closed: !d.Closed.IsZero(), fork: d.Fork, at: d.At, branches: d.Branches, looks: d.Looks, size: len(doc), total: d.Total}
	byIndex := make([]*JoinedPart, d.N)
	for _, raw := range d.Got {
		p, ok := readJoinedPart(raw)
		if !ok || p.index < 0 || p.index >= d.N {
			return nil, false
		}
		byIndex[p.index] = p
	}
	for _, p := range byIndex {
		if p != nil {
			j.Parts = append(j.Parts, *p)
		}
	}
	for _, m := range d.Ended {
		j.Missing = append(j.Missing, MissingPart{ID: m.ID, Branch: m.Branch, Ended: m.Ended, Dead: DeadKind(m.Dead), Msg: m.Msg, told: m.Told})
	}
	return j, true
}

func readJoinedPart(doc bson.Raw) (*JoinedPart, bool) {
	e := read(doc) // its payload, headers and hops are stored as an envelope's
	p := &JoinedPart{Headers: e.Headers, Payload: e.Payload, Hops: e.Hops}
	var ok bool
	if p.ID, ok = doc.Lookup("id").ObjectIDOK(); !ok {
		return nil, false
	}
	p.Branch, _ = doc.Lookup("branch").StringValueOK()
	p.At, _ = doc.Lookup("at").TimeOK()
	p.index, ok = number(doc.Lookup("i"))
	return p, ok
}

// partDoc is the field part of a copy.
func partDoc(of, fork bson.ObjectID, i, n int, branch, join string) bson.D {
	d := bson.D{field("of", of), field("fork", fork), field("i", i), field("n", n), field("branch", branch)}
	if join != "" {
		d = append(d, field("join", join))
	}
	return d
}

// way is what stays of a part when the joined envelope goes on.
func (p *JoinedPart) way() bson.D {
	return bson.D{field("id", p.ID), field("i", p.index), field("branch", p.Branch), field("at", p.At), field("hops", hopDocs(p.Hops))}
}

func (m *MissingPart) doc() bson.D {
	return bson.D{
		field("id", m.ID), field("branch", m.Branch), field("ended", m.Ended), field("dead", string(m.Dead)),
		field("msg", cut(m.Msg)), field("told", m.told),
	}
}
