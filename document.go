package mongoq

import (
	"encoding/binary"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// document is a BSON document in the making. A pusher makes one for each envelope, of few types: written by hand, that
// takes a fifth of the time that it takes from a bson.D.
type document []byte

func newDocument(size int) document { return make(document, 4, size) }

// resumed is a document to which more is added.
func resumed(raw bson.Raw, more int) document {
	return append(make(document, 0, len(raw)+max(more, 0)), raw[:len(raw)-1]...)
}

func (d document) element(t bson.Type, name string) document {
	d = append(d, byte(t))
	d = append(d, name...)
	return append(d, 0)
}

func (d document) objectID(name string, id bson.ObjectID) document {
	return append(d.element(bson.TypeObjectID, name), id[:]...)
}

func (d document) text(name, s string) document {
	d = binary.LittleEndian.AppendUint32(d.element(bson.TypeString, name), uint32(len(s)+1))
	d = append(d, s...)
	return append(d, 0)
}

func (d document) date(name string, t time.Time) document {
	return binary.LittleEndian.AppendUint64(d.element(bson.TypeDateTime, name), uint64(t.UnixMilli()))
}

func (d document) number(name string, n int32) document {
	return binary.LittleEndian.AppendUint32(d.element(bson.TypeInt32, name), uint32(n))
}

func (d document) binary(name string, b []byte) document {
	d = binary.LittleEndian.AppendUint32(d.element(bson.TypeBinary, name), uint32(len(b)))
	d = append(d, bson.TypeBinaryGeneric)
	return append(d, b...)
}

func (d document) value(name string, v bson.RawValue) document {
	return append(d.element(v.Type, name), v.Value...)
}

func (d document) flag(name string, yes bool) document {
	b := byte(0)
	if yes {
		b = 1
	}
	return append(d.element(bson.TypeBoolean, name), b)
}

func (d document) long(name string, n int64) document {
	return binary.LittleEndian.AppendUint64(d.element(bson.TypeInt64, name), uint64(n))
}

func (d document) array(name string, docs []bson.Raw) document {
	d = d.element(bson.TypeArray, name)
	at := len(d)
	d = append(d, 0, 0, 0, 0)
	for i, doc := range docs {
		d = append(d, byte(bson.TypeEmbeddedDocument))
		d = append(strconv.AppendInt(d, int64(i), 10), 0)
		d = append(d, doc...)
	}
	d = append(d, 0)
	binary.LittleEndian.PutUint32(d[at:], uint32(len(d)-at))
	return d
}

// end gives the document.
func (d document) end() bson.Raw {
	d = append(d, 0)
	binary.LittleEndian.PutUint32(d, uint32(len(d)))
	return bson.Raw(d)
}
