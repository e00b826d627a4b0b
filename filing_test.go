package mongoq

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// The driver tells of a document that was refused, though the command is ours and was done: filing relies on it.
func TestARefusedDocumentOfACommandIsAnError(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	insert := func() error {
		return db.RunCommand(t.Context(), bson.D{field("insert", "c"), field("documents", bson.A{bson.D{field("_id", 1)}})}).Err()
	}
	require.NoError(t, insert())
	require.True(t, hasCode(insert(), codeDuplicateKey))
}
