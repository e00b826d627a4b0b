package mongoq

import (
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"
)

// encode makes a BSON value of what the user gave.
func encode(what string, v any) (bson.RawValue, error) {
	if v == nil {
		return bson.RawValue{Type: bson.TypeNull}, nil
	}
	t, data, err := bson.MarshalValue(v)
	if err != nil {
		return bson.RawValue{}, invalid("%s must be encodable as BSON: %v", what, unquoted(err))
	}
	if err := wellFormed(bsoncore.Type(t), data, 0); err != nil {
		return bson.RawValue{}, invalid("%s must be valid BSON: %v", what, err)
	}
	return bson.RawValue{Type: t, Value: data}, nil
}

// deepest is how deep BSON may be nested: more is refused by MongoDB.
const deepest = 200

var (
	errMalformed = errors.New("a length or a type in it is wrong")
	errTooDeep   = fmt.Errorf("it is nested more than %d deep", deepest)
)

// wellFormed looks through a value to its last field: a bson.Raw is encoded as it is, and the server refuses a whole batch for
// one that is none.
func wellFormed(t bsoncore.Type, data []byte, depth int) error {
	v, rest, ok := bsoncore.ReadValue(data, t)
	switch {
	case !ok || len(rest) > 0:
		return errMalformed
	case depth > deepest:
		return errTooDeep
	}
	switch t {
	case bsoncore.TypeEmbeddedDocument, bsoncore.TypeArray:
	case bsoncore.TypeBoolean:
		if data[0] > 1 {
			return errMalformed
		}
		return nil
	case bsoncore.TypeCodeWithScope:
		code, scope, ok := v.CodeWithScopeOK()
		if !ok || len(data) != 4+4+len(code)+1+len(scope) {
			return errMalformed
		}
		return wellFormed(bsoncore.TypeEmbeddedDocument, scope, depth+1)
	default:
		return nil
	}
	_, rest, ok = bsoncore.ReadLength(data)
	for ok && len(rest) > 1 {
		var e bsoncore.Element
		if e, rest, ok = bsoncore.ReadElement(rest); !ok {
			break
		}
		field := e.Value()
		if err := wellFormed(field.Type, field.Data, depth+1); err != nil {
			return err
		}
	}
	if !ok || len(rest) != 1 || rest[0] != 0 {
		return errMalformed
	}
	return nil
}
