package mongoq

import (
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

type (
	// HistoryOption is an option of History.List, Page and Count.
	HistoryOption interface{ applyHistory(*selection) error }
	// DeadLetterOption is an option of DeadLetters.List, Page and Count.
	DeadLetterOption interface{ applyDeadLetter(*selection) error }
	// PurgeOption is an option of DeadLetters.Purge.
	PurgeOption interface{ applyPurge(*redriveSettings) error }

	// SelectOption says which envelopes are meant, of the history or of the dead letters. It is an option of each call
	// that reads them, and of ReplayMany, SetRetention, DeadLetters.Redrive and DeadLetters.Purge.
	SelectOption interface {
		HistoryOption
		DeadLetterOption
		ReplayOption
		RedriveOption
		PurgeOption
		RetentionOption
	}
)

// selection says which envelopes of a list are meant. The zero value means all.
type selection struct {
	since, until time.Time
	ids          []bson.ObjectID
	some         bool // only those ids
	headers      map[string]string
	outcome      Outcome
	kinds        []DeadKind
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

// where makes one condition of tests; none of none.
func where(tests bson.A) bson.D {
	switch len(tests) {
	case 0:
		return nil
	case 1:
		return op("$expr", tests[0])
	}
	return op("$expr", op("$and", tests))
}

// tests are the conditions that no index serves.
func (s *selection) tests() (all bson.A) {
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
	return all
}

// selecting is an option that is part of a selection.
type selecting func(*selection) error

func (o selecting) applyHistory(s *selection) error       { return o(s) }
func (o selecting) applyDeadLetter(s *selection) error    { return o(s) }
func (o selecting) applyReplay(s *replaySettings) error   { return o(&s.selection) }
func (o selecting) applyRedrive(s *redriveSettings) error { return o(&s.selection) }
func (o selecting) applyPurge(s *redriveSettings) error   { return o(&s.selection) }

func (o selecting) applyRetention(s *retentionSettings) error { return o(&s.selection) }

// IDs restricts the call to these envelopes; ids that are not there are passed over. Given more than once, all of them
// count.
func IDs(ids ...bson.ObjectID) SelectOption {
	return selecting(func(s *selection) error {
		s.ids, s.some = append(slices.Clone(s.ids), ids...), true
		return nil
	})
}

// Since leaves out what was committed, or of dead letters what died, before t. The rule: t lies in the years 1970 to 9999.
func Since(t time.Time) SelectOption {
	return selecting(func(s *selection) error {
		at, err := moment("Since", t)
		s.since = at
		return err
	})
}

// Until leaves out what was committed, or of dead letters what died, at t or after it. The rule: t lies in the years 1970 to 9999, and after Since.
func Until(t time.Time) SelectOption {
	return selecting(func(s *selection) error {
		at, err := moment("Until", t)
		s.until = at
		return err
	})
}

// Header leaves out what has not this header with this value; given more than once, all of them must match. No index
// serves it: every envelope of the time span is read until there are enough. The rule is that of Headers.
func Header(key, value string) SelectOption {
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
	RetentionOption
} {
	return selecting(func(s *selection) error {
		s.outcome = o
		if o != OutcomeDone && o != OutcomeDropped {
			return invalid("WithOutcome must be OutcomeDone or OutcomeDropped, got %q", o)
		}
		return nil
	})
}

// Limit is how many envelopes a call is about at the most. A page has 50 by default, the others have no
// limit.
// The rule: n >= 1; of a page, at most 1,000.
func Limit(n int) SelectOption {
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
func Cursor(next string) interface {
	HistoryOption
	DeadLetterOption
} {
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
