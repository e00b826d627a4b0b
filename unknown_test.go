package mongoq

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// A second call, after an answer that was lost, may know no cause.
func TestAnUnknownOutcomeWithoutACauseIsAnErrorThatCanBeRead(t *testing.T) {
	t.Parallel()
	err := unknown(nil, nil)
	require.ErrorIs(t, err, ErrOutcomeUnknown)
	require.NotContains(t, err.Error(), "%!")
	require.ErrorIs(t, unknown(nil, io.EOF), io.EOF)
}
