package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestTrade(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, trade(t.Context(), mongotest.Database(t, mongotest.ReplicaSet), &out))
	for _, line := range []string{
		"order of ada: placed", "order of cleo: aborted, kettle: sold out", "order of dan: aborted, teapot: sold out",
		"mail to ada: Thank you for ordering 2 teapot", "mail to eve:", "3 orders placed, 3 stored, 3 mails sent, 3 noted in their order",
	} {
		require.Contains(t, out.String(), line)
	}
	require.NotContains(t, out.String(), "mail to cleo")
	require.NotContains(t, out.String(), "mail to dan")
}
