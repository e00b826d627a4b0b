package mongoq

import (
	"crypto/rand"
	"encoding/hex"
	"maps"
	"strings"
)

// The headers of W3C Trace Context (https://www.w3.org/TR/trace-context/), by the names that it gives them.
const (
	headerTraceparent = "traceparent"
	headerTracestate  = "tracestate"
)

// traced has a move carry the trace context on: an envelope with a valid traceparent leaves a stage with a new span id
// in it, so that each hop is a span of its own and the parent of the next. What the handler sets itself stays as it is.
func traced(had map[string]string, p patch) patch {
	parent, ok := had[headerTraceparent]
	if !ok {
		return p
	}
	if p.set {
		if _, given := p.headers[headerTraceparent]; given {
			return p
		}
	}
	child, valid := childSpan(parent)
	if !valid && (!p.set || p.merge) {
		return p // what is no trace context is a header like any other
	}
	if !valid {
		child = parent
	}
	if !p.set {
		return patch{payload: p.payload, set: true, merge: true, headers: map[string]string{headerTraceparent: child}}
	}
	headers := maps.Clone(p.headers)
	if headers == nil {
		headers = map[string]string{}
	}
	headers[headerTraceparent] = child
	if state, ok := had[headerTracestate]; ok && headers[headerTracestate] == "" {
		headers[headerTracestate] = state
	}
	p.headers = headers
	return p
}

// childSpan is a traceparent of the same trace with a new span id. Of a later version of the format only what this one
// knows is passed on, as the standard says.
func childSpan(parent string) (string, bool) {
	version, rest, _ := strings.Cut(parent, "-")
	trace, rest, _ := strings.Cut(rest, "-")
	span, flags, _ := strings.Cut(rest, "-")
	if version != "00" {
		flags, _, _ = strings.Cut(flags, "-")
	}
	if !isHex(version, 2) || version == "ff" || !isHex(trace, 32) || !isHex(span, 16) || !isHex(flags, 2) ||
		strings.Trim(trace, "0") == "" || strings.Trim(span, "0") == "" {
		return "", false
	}
	var id [8]byte
	for id == [8]byte{} {
		_, _ = rand.Read(id[:]) // never fails
	}
	return "00-" + trace + "-" + hex.EncodeToString(id[:]) + "-" + flags, true
}

// isHex is true of n lower-case hexadecimal digits.
func isHex(s string, n int) bool {
	return len(s) == n && strings.Trim(s, "0123456789abcdef") == ""
}
