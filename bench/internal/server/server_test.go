package server

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheNewestPostgresIsTaken(t *testing.T) {
	t.Parallel()
	dirs := []string{"/pg/9.6/bin", "/pg/15/bin", "/pg/16/bin", "/pg/next/bin"}
	usable := func(string) bool { return true }
	require.Equal(t, "/pg/16/bin", newest(dirs, usable))
	require.Equal(t, "/pg/15/bin", newest(dirs, func(dir string) bool { return dir != "/pg/16/bin" }))
	require.Empty(t, newest(nil, usable))
}

func TestInfoField(t *testing.T) {
	t.Parallel()
	const info = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n"
	require.Equal(t, "7.0.15", infoField(info, "redis_version"))
	require.Empty(t, infoField(info, "version"))
}
