package mongoq_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-de459a48/mongoq"
)

// The program of the README.
func Example() {
	ctx := context.Background()
	db, drop := exampleDatabase()
	defer drop()
	check := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	send := func(mail string) error {
		fmt.Println("sending", mail)
		return nil
	}

	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	check(err)
	mails, err := store.Queue("mails", mongoq.QueueConfig{})
	check(err)

	_, err = mails.Push(ctx, "hello, Ada") // stored when this returns
	check(err)

	job, err := mails.Reserve(ctx) // waits for work; nobody else gets this job for 30 s
	check(err)
	var mail string
	check(job.Decode(&mail))
	if err := send(mail); err != nil {
		check(job.Rollback(ctx, err)) // again later, by the queue's backoff; after 25 retries a dead letter
		return
	}
	check(job.Commit(ctx)) // done
	// Output:
	// sending hello, Ada
}

// TestReadmeProgram holds the README to the example above: same lines, which compile and run.
func TestReadmeProgram(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("example_readme_test.go")
	require.NoError(t, err)

	between := func(text []byte, from, to string) string {
		_, rest, ok := bytes.Cut(text, []byte(from))
		require.True(t, ok, "%q is missing", from)
		body, _, ok := bytes.Cut(rest, []byte(to))
		require.True(t, ok, "%q is missing", to)
		return string(body)
	}
	body := between(source, "\n\n\tstore, err :=", "\t// Output:")
	require.Contains(t, between(readme, "```go\npackage main", "```"), strings.TrimSpace(body))
}
