package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestCallAll(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		var out bytes.Buffer
		require.NoError(t, callAll(t.Context(), db, &out))
		for _, line := range []string{
			`/flaky, failures so far: 0: 503 Service Unavailable`, `/flaky, failures so far: [1-5]: answered`,
			`/busy, failures so far: 0: 429 Too Many Requests`, `/busy, failures so far: 1: answered`,
			`/closed, failures so far: 0: snoozed for 300ms`, `/closed, failures so far: 0: answered`,
			`/broken: kind "retries" after 6 failures, the last: 500 Internal Server Error`,
			`/gone: kind "permanent" after 1 failures, the last: 410 Gone`,
		} {
			require.Regexp(t, line, out.String())
		}
	})
}
