package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLedgersAreReadInTheOrderOfTime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, err := openLedger(dir, "a")
	require.NoError(t, err)
	b, err := openLedger(dir, "b")
	require.NoError(t, err)
	a.write(entry{What: notePush, Key: "1"})
	b.write(entry{What: noteClaim, Key: "1", Part: &part{Of: "x", Index: 1, Count: 2}})
	a.write(entry{What: notePushed, Key: "1", Result: resultOK})
	require.NoError(t, a.close())
	require.NoError(t, b.close())

	all, err := readLedgers(dir)
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Equal(t, []string{notePush, noteClaim, notePushed}, []string{all[0].What, all[1].What, all[2].What})
	require.Equal(t, "b", all[1].Proc)
	require.Equal(t, &part{Of: "x", Index: 1, Count: 2}, all[1].Part)
}

func TestALedgerMayEndInATornLine(t *testing.T) {
	t.Parallel()
	got, err := readLedger(strings.NewReader("{\"e\":\"push\"}\n{\"e\":\"pus"), "p")
	require.NoError(t, err)
	require.Len(t, got, 1)

	_, err = readLedger(strings.NewReader("{\"e\":\"pus\n{\"e\":\"push\"}\n"), "p")
	require.ErrorContains(t, err, "line 1")
}

func TestALedgerIsNeverContinued(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "p"+ledgerSuffix), nil, 0o600))
	_, err := openLedger(dir, "p")
	require.Error(t, err)
}
