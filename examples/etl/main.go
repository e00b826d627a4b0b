// Command etl sends every Go file under GOROOT/src through a pipeline, and prints what it found: how many packages,
// files, lines and functions, and the longest function.
//
//	read -> parse -> count   -> summarise -> store
//	          |   -> longest ->
//	          `--> review --> parse, at most twice
//
// parse forks: two stages work on a file side by side, and summarise joins what they bring. A file that does not parse
// goes to review, which reads it anew and sends it back; the second time it is a dead letter, for people to look at.
// Each step is an atomic move: a process can be killed at any moment.
//
// Which files: all *.go files under GOROOT/src, tests and testdata included. Those whose folder is a package that
// `go list std` names are the standard library; the others are the go command and its tools (cmd) and test data. Some
// of the test data is broken on purpose.
//
// Results land in the collection files of the database mongoq_etl, one document for each file. The server is the one
// that MONGODB_URI names, a replica set, since forks need transactions; without it, a mongod is started for as long as
// the program runs.
//
//	go run ./examples/etl           runs it
//	go run ./examples/etl -check    and compares the summary with a plain walk of the same files and with go list std
//	go run ./examples/etl -kill     runs it in three processes that are killed at random, and compares
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// database is the example's own: it is dropped when a run begins.
const database = "mongoq_etl"

func main() {
	if told := os.Getenv(childVariable); told != "" {
		exit(work(told))
	}
	var cfg config
	flag.StringVar(&cfg.goroot, "goroot", "", "the `folder` whose src is read; default: what go env GOROOT says")
	flag.BoolVar(&cfg.check, "check", false, "compare the summary with a plain walk and with go list std; exit 1 if they differ")
	flag.BoolVar(&cfg.kill, "kill", false, "run the stages in processes that are killed at random, and check")
	flag.IntVar(&cfg.workers, "workers", 64, "goroutines of each stage")
	flag.Parse()
	exit(run(cfg, os.Stdout))
}

// exit ends the program.
func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "etl:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

type config struct {
	goroot  string
	check   bool
	kill    bool
	workers int
	uri     string // of the server, for worker processes
}

func run(cfg config, out io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if cfg.uri = os.Getenv("MONGODB_URI"); cfg.uri == "" {
		server, err := mongotest.Start(ctx, mongotest.Options{ReplicaSet: 1, Progress: func(what string) { fmt.Fprintln(out, what) }})
		if err != nil {
			return err
		}
		defer server.Stop()
		cfg.uri = server.URI()
	}
	client, err := mongo.Connect(options.Client().ApplyURI(cfg.uri))
	if err != nil {
		return err
	}
	defer disconnect(client)
	db := client.Database(database)
	if err := db.Drop(ctx); err != nil {
		return fmt.Errorf("dropping the database of the last run: %w", err)
	}
	return etl(ctx, db, cfg, out)
}

// etl runs the whole job on a database.
func etl(ctx context.Context, db *mongo.Database, cfg config, out io.Writer) error {
	if cfg.goroot == "" {
		root, err := goCommand(ctx, "", "env", "GOROOT")
		if err != nil {
			return err
		}
		cfg.goroot = strings.TrimSpace(root)
	}
	src := filepath.Join(cfg.goroot, "src")
	std, err := listStd(ctx, cfg.goroot)
	if err != nil {
		return err
	}
	files, err := walk(src, std)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d Go files under %s, %d packages in go list std\n", len(files), src, len(std))

	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if err != nil {
		return err
	}
	defer closeStore(store)
	p, err := newPipeline(store, src, db.Collection("files"), cfg.workers)
	if err != nil {
		return err
	}
	if cfg.kill {
		err = p.runKilled(ctx, files, childSpec{URI: cfg.uri, DB: db.Name(), Src: src, Workers: cfg.workers}, out)
	} else {
		err = p.run(ctx, files, out)
	}
	if err != nil {
		return err
	}
	sum, err := p.summarise(ctx)
	if err != nil {
		return err
	}
	sum.print(out)
	if !cfg.check && !cfg.kill {
		return nil
	}
	if err := p.check(ctx, sum, cfg.goroot); err != nil {
		return fmt.Errorf("check failed: %w", err)
	}
	fmt.Fprintln(out, "check: a plain walk and go list std say the same")
	return nil
}

func disconnect(client *mongo.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = client.Disconnect(ctx) // the program ends
}

// closeStore gives what is under way a moment to end, also after Ctrl-C.
func closeStore(store *mongoq.Store) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := store.Close(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "etl: closing the store:", err)
	}
}

// goCommand runs the go command, with another GOROOT if one is given.
func goCommand(ctx context.Context, goroot string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	if goroot != "" {
		cmd.Env = append(os.Environ(), "GOROOT="+goroot)
	}
	text, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if err != nil {
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return string(text), nil
}

// listStd asks the go command for the standard library: the import paths of its packages, and how many Go files each
// has. The path of a package is its folder's, from GOROOT/src on.
func listStd(ctx context.Context, goroot string) (map[string]int, error) {
	const format = "{{.ImportPath}} {{len .GoFiles}} {{len .CgoFiles}} {{len .IgnoredGoFiles}} {{len .TestGoFiles}} {{len .XTestGoFiles}}"
	text, err := goCommand(ctx, goroot, "list", "-f", format, "std")
	if err != nil {
		return nil, err
	}
	std := map[string]int{}
	for line := range strings.Lines(text) {
		var path string
		var built, cgo, ignored, tests, xtests int
		if _, err := fmt.Sscan(line, &path, &built, &cgo, &ignored, &tests, &xtests); err != nil {
			return nil, fmt.Errorf("go list std: line %q: %w", line, err)
		}
		std[path] = built + cgo + ignored + tests + xtests
	}
	return std, nil
}
