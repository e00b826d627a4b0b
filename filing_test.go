package mongoq

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// A command that is sent as it is tells of a refused document in its answer only.
func TestARefusedWriteIsAnError(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	insert := func() error {
		raw, err := db.RunCommand(t.Context(), bson.D{field("insert", "c"), field("documents", bson.A{bson.D{field("_id", 1)}})}).Raw()
		require.NoError(t, err)
		return refusedWrite(raw)
	}
	require.NoError(t, insert())
	require.True(t, hasCode(insert(), codeDuplicateKey))
}
