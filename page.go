package mongoq

import (
	"encoding/base64"
	"encoding/binary"
	"hash/crc32"
	"iter"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

const (
	// defaultPage is how many envelopes a page has, unless told otherwise; largestPage how many it may have.
	defaultPage = 50
	largestPage = 1000
)

// Page is a part of a list.
type Page struct {
	Envelopes []*Envelope
	Next      string // the Cursor of the page that follows; empty: there was no more
}

// The lists that have pages; a cursor belongs to one of them.
const (
	listHistory = 'h'
	listDead    = 'd'
)

// place is where an envelope stands in a list: by its time and its id, the latest first.
type place struct {
	at   time.Time
	id   bson.ObjectID
	kind string // of a dead letter: those of one kind stand together
}

// cursor is the place as users hand it from page to page: the list, the place and a checksum, in base64.
func (p place) cursor(list byte) string {
	b := binary.BigEndian.AppendUint64([]byte{list}, uint64(p.at.UnixMilli()))
	b = append(append(b, p.id[:]...), p.kind...)
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b)))
}

// placeOf reads a cursor.
func placeOf(list byte, cursor string) (p place, err error) {
	const least = 1 + 8 + 12
	b, err := base64.RawURLEncoding.Strict().DecodeString(cursor)
	end := len(b) - 4
	if err != nil || end < least || crc32.ChecksumIEEE(b[:end]) != binary.BigEndian.Uint32(b[end:]) {
		return p, invalid("Cursor must be the Next of a page, got %.60q", cursor)
	}
	if b[0] != list {
		return p, invalid("Cursor must be the Next of a page of the same list, got that of another: %q", cursor)
	}
	p.at = time.UnixMilli(int64(binary.BigEndian.Uint64(b[1:])))
	copy(p.id[:], b[9:])
	p.kind = string(b[least:end])
	return p, nil
}

// pageOf makes a page of the first n of a list that gives one more if there is one.
func pageOf(list iter.Seq2[*Envelope, error], n int, cursor func(*Envelope) string) (*Page, error) {
	p := &Page{}
	for e, err := range list {
		if err != nil {
			return nil, err
		}
		if len(p.Envelopes) == n {
			p.Next = cursor(p.Envelopes[n-1])
			break
		}
		p.Envelopes = append(p.Envelopes, e)
	}
	return p, nil
}

// merged makes one list of several, each of which is in order.
func merged(lists []iter.Seq2[*Envelope, error], before func(a, b *Envelope) bool) iter.Seq2[*Envelope, error] {
	if len(lists) == 1 {
		return lists[0]
	}
	return func(yield func(*Envelope, error) bool) {
		heads := make([]*Envelope, len(lists))
		nexts := make([]func() (*Envelope, error, bool), len(lists))
		for i, list := range lists {
			next, stop := iter.Pull2(list)
			defer stop()
			nexts[i] = next
		}
		advance := func(i int) error {
			e, err, ok := nexts[i]()
			if heads[i] = e; !ok {
				heads[i] = nil
			}
			return err
		}
		for i := range lists {
			if err := advance(i); err != nil {
				yield(nil, err)
				return
			}
		}
		for {
			first := -1
			for i, e := range heads {
				if e != nil && (first < 0 || before(e, heads[first])) {
					first = i
				}
			}
			if first < 0 || !yield(heads[first], nil) {
				return
			}
			if err := advance(first); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// limited is a list's first n; 0 means all.
func limited(list iter.Seq2[*Envelope, error], n int) iter.Seq2[*Envelope, error] {
	if n == 0 {
		return list
	}
	return func(yield func(*Envelope, error) bool) {
		left := n
		for e, err := range list {
			if !yield(e, err) || err != nil {
				return
			}
			if left--; left == 0 {
				return
			}
		}
	}
}
