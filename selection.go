package mongoq

import (
	"maps"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// HistoryOption is an option of History.List, Page and Count.
type HistoryOption interface{ applyHistory(*selection) error }

// selection says which envelopes of a list are meant. The zero value means all.
type selection struct {
	since, until time.Time
	ids          []bson.ObjectID
	some         bool // only those ids
	headers      map[string]string
	outcome      Outcome
	limit        int // 0: not given
	cursor       string
}

// check looks at what no option can see by itself.
func (s *selection) check() error {
	if !s.since.IsZero() && !s.until.IsZero() && !s.until.After(s.since) {
		return invalid("Until must be after Since, got %v and %v", s.until, s.since)
	}
	return nil
}

// pageSize is how many envelopes a page has.
func (s *selection) pageSize() (int, error) {
	switch {
	case s.limit == 0:
		return defaultPage, nil
	case s.limit > largestPage:
		return 0, invalid("Limit of a page must be 1 to %d, got %d", largestPage, s.limit)
	}
	return s.limit, nil
}

// span is the condition on a field that is the list's time. What is no date is in no span.
func (s *selection) span() bson.D {
	d := op("$type", "date")
	if !s.since.IsZero() {
		d = append(d, field("$gte", s.since))
	}
	if !s.until.IsZero() {
		d = append(d, field("$lt", s.until))
	}
	return d
}

// spanBelow is the span as far as it lies before a time.
func (s *selection) spanBelow(at time.Time) bson.D {
	below := *s
	if below.until.IsZero() || at.Before(below.until) {
		below.until = at
	}
	return below.span()
}

// tests are the conditions that no index serves.
func (s *selection) tests() bson.D {
	var all bson.A
	for _, k := range sortedKeys(s.headers) {
		all = append(all, op("$eq", bson.A{
			op("$getField", bson.D{field("field", literal(k)), field("input", "$headers")}), literal(s.headers[k]),
		}))
	}
	dropped := isType("result.dropped", "string")
	switch s.outcome {
	case OutcomeDone:
		all = append(all, op("$not", bson.A{dropped}))
	case OutcomeDropped:
		all = append(all, dropped)
	}
	if all == nil {
		return nil
	}
	return op("$expr", op("$and", all))
}

// selecting is an option that is part of a selection.
type selecting func(*selection) error

func (o selecting) applyHistory(s *selection) error { return o(s) }

// Since leaves out what was committed before t. The rule: t lies in the years 1970 to 9999.
func Since(t time.Time) interface {
	HistoryOption
	ReplayOption
} {
	return selecting(func(s *selection) error {
		at, err := moment("Since", t)
		s.since = at
		return err
	})
}

// Until leaves out what was committed at t or after it. The rule: t lies in the years 1970 to 9999, and after Since.
func Until(t time.Time) interface {
	HistoryOption
	ReplayOption
} {
	return selecting(func(s *selection) error {
		at, err := moment("Until", t)
		s.until = at
		return err
	})
}

// Header leaves out what has not this header with this value; given more than once, all of them must match. No index
// serves it: every envelope of the time span is read until there are enough. The rule is that of Headers.
func Header(key, value string) interface {
	HistoryOption
	ReplayOption
} {
	return selecting(func(s *selection) error {
		m := maps.Clone(s.headers)
		if m == nil {
			m = map[string]string{}
		}
		m[key] = value
		s.headers = m
		return headersOption{m: m}.check()
	})
}

// WithOutcome leaves out what ended otherwise. No index serves it: every envelope of the time span is read until there
// are enough. The rule: OutcomeDone or OutcomeDropped.
func WithOutcome(o Outcome) interface {
	HistoryOption
	ReplayOption
} {
	return selecting(func(s *selection) error {
		s.outcome = o
		if o != OutcomeDone && o != OutcomeDropped {
			return invalid("WithOutcome must be OutcomeDone or OutcomeDropped, got %q", o)
		}
		return nil
	})
}

// Limit is how many envelopes a call gives, counts or replays at the most. A page has 50 by default, the others have no
// limit.
// The rule: n >= 1; of a page, at most 1,000.
func Limit(n int) interface {
	HistoryOption
	ReplayOption
} {
	return selecting(func(s *selection) error {
		s.limit = n
		if n < 1 {
			return invalid("Limit must be >= 1, got %d", n)
		}
		return nil
	})
}

// Cursor begins where a page ended: it is that page's Next. An empty one begins at the front. It holds a place and
// nothing else: give the other options again. It does not age, and outlives the envelope it was made of.
func Cursor(next string) HistoryOption {
	return selecting(func(s *selection) error {
		s.cursor = next
		return nil
	})
}

// moment is a time as it is stored, to the millisecond; a part of one counts as a whole.
func moment(what string, t time.Time) (time.Time, error) {
	t = t.UTC()
	if t.Year() < 1970 || t.Year() > 9999 {
		return t, invalid("%s must lie in the years 1970 to 9999, got %v", what, t)
	}
	if cut := t.Truncate(time.Millisecond); cut.Before(t) {
		t = cut.Add(time.Millisecond)
	}
	return t, nil
}
