package task

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// payloadSize is the size of every job's payload, in bytes, all of them printable.
const payloadSize = 100

// payloads are random, since what repeats would be compressed away by some servers and not by others.
var payloads = func() []string {
	all := make([]string, 1024)
	for i := range all {
		var b [payloadSize / 2]byte
		_, _ = rand.Read(b[:])
		all[i] = hex.EncodeToString(b[:])
	}
	return all
}()

func payload(n int) string { return payloads[n%len(payloads)] }

// stamped is a payload that tells a time.
func stamped(t time.Time) string {
	head := fmt.Sprintf("%d ", t.UnixNano())
	return head + payloads[0][len(head):]
}

// readStamp reads the time of a stamped payload.
func readStamp(s string) (time.Time, error) {
	head, _, _ := strings.Cut(s, " ")
	ns, err := strconv.ParseInt(head, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("payload without a time: %w", err)
	}
	return time.Unix(0, ns), nil
}
