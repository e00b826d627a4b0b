package pipefile_test

import (
	"context"
	"fmt"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
	"github.com/seed-de459a48/mongoq/pipefile"
)

func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	client, end, err := mongotest.Connect(ctx)
	check(err)
	defer end()
	store, err := mongoq.Open(ctx, client.Database("pipefile_example"), mongoq.Config{})
	check(err)

	f, err := pipefile.Parse([]byte(`
pipeline: greetings
stages:
  - {name: greet, next: print}
  - name: print
    queue: {lease: 10s, retry: {retries: 3}}
    worker: {concurrency: 2}
`))
	check(err)
	p, err := f.Build(store, pipefile.Handlers{
		"greet": mongoq.Transform(func(_ context.Context, name string) (string, error) { return "hello, " + name, nil }),
		"print": mongoq.Sink(func(_ context.Context, text string) error {
			fmt.Println(text)
			stop()
			return nil
		}),
	})
	check(err)
	_, err = p.Push(ctx, "Ada")
	check(err)
	check(p.Run(ctx))
	check(store.Close(context.Background()))
	// Output: hello, Ada
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
