package mongoq_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The tests that the documentation names are there.
func TestTheDocumentationNamesTestsThatExist(t *testing.T) {
	t.Parallel()
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	for _, pattern := range []string{"*_test.go", "internal/*/*_test.go", "pipefile/*_test.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, name := range files {
			text, err := os.ReadFile(name) //nolint:gosec // a file of this repository
			require.NoError(t, err)
			for _, m := range declared.FindAllSubmatch(text, -1) {
				there[string(m[1])] = true
			}
		}
	}
	pages, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	named := 0
	for _, page := range pages {
		text, err := os.ReadFile(page) //nolint:gosec // the same
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w+)`").FindAllSubmatch(text, -1) {
			named++
			require.True(t, there[string(m[1])], "%s names %s", page, m[1])
		}
	}
	require.NotZero(t, named)
}
