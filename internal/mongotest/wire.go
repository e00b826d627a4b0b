package mongotest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// What this package knows of MongoDB's wire protocol (MongoDB manual, "Wire Protocol"):
// a message is a header of four little-endian int32 (length of all, request id, id of the
// request it answers, opcode), then the body. A command is an OP_MSG: flags, then
// sections, of which the one of kind 0 is a BSON document whose first key names the command.
const (
	headerLen  = 16
	maxMessage = 64 << 20 // the server's own limit is 48,000,000 bytes
	opMsg      = 2013

	flagChecksum   = 1 << 0 // the last four bytes are a checksum
	flagMoreToCome = 1 << 1 // in a request: no answer is wanted
)

// A message is one message of the wire protocol, header included.
type message []byte

func (m message) requestID() int32  { return m.int32(4) }
func (m message) responseTo() int32 { return m.int32(8) }

func (m message) int32(at int) int32 { return int32(binary.LittleEndian.Uint32(m[at:])) }

// readMessage reads one whole message.
func readMessage(r io.Reader) (message, error) {
	m := make(message, headerLen)
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, err
	}
	n := m.int32(0)
	if n < headerLen || n > maxMessage {
		return nil, fmt.Errorf("not a MongoDB message: its length is %d (TLS does not work here)", n)
	}
	m = append(m, make([]byte, n-headerLen)...)
	if _, err := io.ReadFull(r, m[headerLen:]); err != nil {
		return nil, err
	}
	return m, nil
}

// command is the name of the command in a request, or "" if it is none that wants an
// answer, or a compressed one.
func (m message) command() string { return firstKey(m.body()) }

// target is the collection that a command is about, if it is about one.
func (m message) target() string { return firstText(m.body()) }

// body is the document of a command that wants an answer; nil: it is none.
func (m message) body() []byte {
	if len(m) < headerLen+4 || m.int32(12) != opMsg {
		return nil
	}
	flags := m.int32(headerLen)
	if flags&flagMoreToCome != 0 {
		return nil
	}
	sections := m[headerLen+4:]
	if flags&flagChecksum != 0 && len(sections) >= 4 {
		sections = sections[:len(sections)-4]
	}
	for len(sections) > 0 {
		kind := sections[0]
		sections = sections[1:]
		if kind == 0 {
			return sections
		}
		// Kind 1, a sequence of documents, begins with its own length.
		if len(sections) < 4 {
			return nil
		}
		n := sections.int32(0)
		if n < 4 || int(n) > len(sections) {
			return nil
		}
		sections = sections[n:]
	}
	return nil
}

// firstKey is the first key of a BSON document: int32 length, then a type byte and the
// key, which ends with a zero byte.
func firstKey(doc []byte) string {
	const at = 5
	if len(doc) <= at {
		return ""
	}
	key, _, ok := bytes.Cut(doc[at:], []byte{0})
	if !ok {
		return ""
	}
	return string(key)
}

// firstText is the value of a document's first key, if that is a string: after the key an
// int32 length, which counts the zero byte at the end.
func firstText(doc []byte) string {
	const kind, text = 4, 2
	if len(doc) <= kind || doc[kind] != text {
		return ""
	}
	value := doc[min(kind+1+len(firstKey(doc))+1, len(doc)):]
	if len(value) < 4 {
		return ""
	}
	n := int(int32(binary.LittleEndian.Uint32(value)))
	if n < 1 || n > len(value)-4 {
		return ""
	}
	return string(value[4 : 4+n-1])
}
