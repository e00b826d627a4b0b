package system

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func names(systems []System) []string {
	var all []string
	for _, s := range systems {
		all = append(all, s.Name)
	}
	return all
}

func TestChoose(t *testing.T) {
	t.Parallel()
	all, err := Choose("all")
	require.NoError(t, err)
	require.Equal(t, []string{
		"mongoq", "plain", "keuss-mongo", "keuss-bucket", "keuss-pl", "mongodb-queue", "river", "asynq-aof", "asynq-noaof",
	}, names(all))

	none, err := Choose("none")
	require.NoError(t, err)
	require.Equal(t, []string{"mongoq"}, names(none))

	some, err := Choose("river, plain")
	require.NoError(t, err)
	require.Equal(t, []string{"mongoq", "plain", "river"}, names(some))

	_, err = Choose("plain,kafka")
	require.ErrorContains(t, err, `"kafka"`)
}

func TestEverySystemStatesItsDurability(t *testing.T) {
	t.Parallel()
	for _, s := range All {
		require.NotEmpty(t, s.Durability, s.Name)
		require.NotEmpty(t, s.Client, s.Name)
		require.NotNil(t, s.Start, s.Name)
		require.NotNil(t, s.Missing, s.Name)
	}
}
