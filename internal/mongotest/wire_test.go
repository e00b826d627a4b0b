package mongotest

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
)

func newMessage(opcode int32, body ...[]byte) message {
	m := make(message, headerLen)
	for _, b := range body {
		m = append(m, b...)
	}
	for at, v := range map[int]int32{0: int32(len(m)), 4: 11, 8: 22, 12: opcode} {
		binary.LittleEndian.PutUint32(m[at:], uint32(v))
	}
	return m
}

func TestCommand(t *testing.T) {
	t.Parallel()
	doc, err := bson.Marshal(bson.D{{Key: "update", Value: "c"}, {Key: "$db", Value: "d"}})
	require.NoError(t, err)
	require.Equal(t, "c", firstText(doc))
	for n := range doc {
		require.Contains(t, []string{"", "c"}, firstText(doc[:n]))
	}
	document := append([]byte{0}, doc...)
	sequence := append([]byte{1}, binary.LittleEndian.AppendUint32(nil, 4+8+uint32(len(doc)))...)
	sequence = append(append(sequence, "updates\x00"...), doc...)
	flags := func(f uint32) []byte { return binary.LittleEndian.AppendUint32(nil, f) }

	for name, c := range map[string]struct {
		message message
		want    string
	}{
		"document":             {newMessage(opMsg, flags(0), document), "update"},
		"document, sequence":   {newMessage(opMsg, flags(0), document, sequence), "update"},
		"sequence, document":   {newMessage(opMsg, flags(0), sequence, document), "update"},
		"checksum":             {newMessage(opMsg, flags(flagChecksum), sequence, document, flags(0)), "update"},
		"no answer is wanted":  {newMessage(opMsg, flags(flagMoreToCome), document), ""},
		"compressed":           {newMessage(2012, flags(0), document), ""},
		"no section":           {newMessage(opMsg, flags(0)), ""},
		"no body":              {newMessage(opMsg), ""},
		"empty document":       {newMessage(opMsg, flags(0), []byte{0, 5, 0, 0, 0, 0}), ""},
		"cut document":         {newMessage(opMsg, flags(0), document[:8]), ""},
		"cut sequence":         {newMessage(opMsg, flags(0), sequence[:3]), ""},
		"sequence too long":    {newMessage(opMsg, flags(0), sequence[:20]), ""},
		"sequence of length 0": {newMessage(opMsg, flags(0), []byte{1, 0, 0, 0, 0}), ""},
	} {
		require.Equal(t, c.want, c.message.command(), name)
		got, err := readMessage(bytes.NewReader(c.message))
		require.NoError(t, err)
		require.Equal(t, c.message, got)
		require.EqualValues(t, 11, got.requestID())
		require.EqualValues(t, 22, got.responseTo())
	}
}

func TestReadMessage(t *testing.T) {
	t.Parallel()
	m := newMessage(opMsg, make([]byte, 10))
	_, err := readMessage(bytes.NewReader(nil))
	require.ErrorIs(t, err, io.EOF)
	_, err = readMessage(bytes.NewReader(m[:20]))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	for _, n := range []int32{-1, 15, maxMessage + 1} {
		binary.LittleEndian.PutUint32(m, uint32(n))
		_, err = readMessage(bytes.NewReader(m))
		require.ErrorContains(t, err, "not a MongoDB message")
	}
}

func FuzzCommand(f *testing.F) {
	f.Add([]byte(newMessage(opMsg, make([]byte, 20))))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readMessage(bytes.NewReader(b))
		if err == nil {
			_ = m.command()
		}
	})
}
