package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheScriptsAreUnpacked(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, unpack(dir))
	for _, name := range []string{"package.json", "package-lock.json", "link.js", "keuss.js", "mongodb-queue.js"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.NotEmpty(t, text)
	}
	one, err := digest()
	require.NoError(t, err)
	require.Len(t, one, 16)
}

// The lock file pins what each package holds, not where it comes from: that is the user's npm's.
func TestTheLockPinsContentsAndNames(t *testing.T) {
	t.Parallel()
	text, err := peers.ReadFile("peers/package-lock.json")
	require.NoError(t, err)
	var lock struct {
		Packages map[string]struct {
			Resolved  string `json:"resolved"`
			Integrity string `json:"integrity"`
		} `json:"packages"`
	}
	require.NoError(t, json.Unmarshal(text, &lock))
	require.Contains(t, lock.Packages, "node_modules/keuss")
	for name, p := range lock.Packages {
		if name == "" {
			continue // the bench's own
		}
		require.NotEmpty(t, p.Integrity, name)
		require.Empty(t, p.Resolved, name)
	}
}
