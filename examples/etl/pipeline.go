package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
)

// pipeline is the stages, and where their results go.
type pipeline struct {
	*mongoq.Pipeline

	src    string
	files  *mongo.Collection // the results
	review *mongoq.Queue     // whose dead letters are for people to look at
	began  time.Time
}

func newPipeline(store *mongoq.Store, src string, files *mongo.Collection, workers int) (*pipeline, error) {
	p := &pipeline{src: src, files: files}
	queue := mongoq.QueueConfig{
		Lease: 5 * time.Second, // what a killed process held goes on after that
		// A file that cannot be read now may be readable in a moment. After twenty retries it is a dead letter; so is
		// one whose processes are killed again and again.
		Retry: func() backoff.BackOff {
			return backoff.WithMaxRetries(backoff.NewConstantBackOff(200*time.Millisecond), 20)
		},
	}
	stage := func(st mongoq.Stage) *mongoq.Stage {
		st.Queue, st.Worker.Concurrency = queue, workers
		return &st
	}
	var err error
	p.Pipeline, err = mongoq.NewPipeline(store, "etl",
		stage(mongoq.Stage{Name: "read", Handler: mongoq.Transform(p.read), Next: "parse"}),
		stage(mongoq.Stage{
			Name: "parse", Handler: mongoq.Step(parse),
			Fork: []string{"count", "longest"}, Choice: []string{"review"},
		}),
		stage(mongoq.Stage{
			Name: "review", Handler: mongoq.Step(p.again),
			Back: []mongoq.Back{{To: "parse", Limit: 2}},
		}),
		stage(mongoq.Stage{Name: "count", Handler: mongoq.Transform(count), Next: "summarise"}),
		stage(mongoq.Stage{Name: "longest", Handler: mongoq.Transform(measure), Next: "summarise"}),
		stage(mongoq.Stage{
			Name: "summarise", Join: &mongoq.Join{Of: "parse"}, Handler: mongoq.Merge(summarise), Next: "store",
		}),
		stage(mongoq.Stage{Name: "store", Handler: mongoq.Sink(p.store)}),
	)
	if err != nil {
		return nil, err
	}
	p.review, err = p.Queue("review")
	return p, err
}

// read puts the file's text into the envelope.
func (p *pipeline) read(_ context.Context, f File) (Source, error) {
	text, err := os.ReadFile(filepath.Join(p.src, filepath.FromSlash(f.Path)))
	return Source{File: f, Text: text}, err
}

// parse puts what is in the file in the place of its text, and has two stages work on it side by side. A file that does
// not parse is for review.
func parse(_ context.Context, _ *mongoq.Reservation, s Source) (mongoq.Route, error) {
	o, broken := outline(s)
	if broken != nil {
		why := mongoq.AddHeaders(map[string]string{"error": broken.Error()})
		return mongoq.GoTo("review", mongoq.Payload(s.File), why), nil //nolint:nilerr // an answer, not a failure
	}
	// The original waits at the join for its parts: there it needs its name only.
	return mongoq.Fork(mongoq.Payload(o)).Whole(mongoq.Payload(s.File)), nil
}

// again reads a file anew that did not parse: it may have been caught half written. When it has gone back twice, the
// link's limit makes a dead letter of it, with the reason.
func (p *pipeline) again(ctx context.Context, _ *mongoq.Reservation, f File) (mongoq.Route, error) {
	s, err := p.read(ctx, f)
	return mongoq.GoTo("parse", mongoq.Payload(s)), err
}

func count(_ context.Context, o Outline) (Counts, error) {
	return Counts{Lines: o.Lines, Functions: len(o.Functions)}, nil
}

func measure(_ context.Context, o Outline) (Function, error) { return longest(o), nil }

// summarise makes one payload of the parts.
func summarise(_ context.Context, f File, parts *mongoq.Joined) (Facts, error) {
	var c Counts
	facts := Facts{File: f}
	err := errors.Join(parts.Part("count").Decode(&c), parts.Part("longest").Decode(&facts.Longest))
	facts.Lines, facts.Functions = c.Lines, c.Functions
	return facts, err
}

// store is the last stage. Delivery is at least once: an envelope that comes a second time puts the same content in the
// place of its own document, since the document's key is the file.
func (p *pipeline) store(ctx context.Context, f Facts) error {
	_, err := p.files.ReplaceOne(ctx, bson.D{{Key: "_id", Value: f.Path}}, f, options.Replace().SetUpsert(true))
	return err
}

// push stores the files in the queue of the first stage.
func (p *pipeline) push(ctx context.Context, files []File) error {
	p.began = time.Now()
	payloads := make([]any, len(files))
	for i, f := range files {
		payloads[i] = f
	}
	if _, err := p.PushMany(ctx, payloads); err != nil {
		return fmt.Errorf("push: %w", err)
	}
	return nil
}

// run pushes the files, and works until the stages are empty.
func (p *pipeline) run(ctx context.Context, files []File, out io.Writer) error {
	if err := p.push(ctx, files); err != nil {
		return err
	}
	working, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- p.Run(working) }()
	stats, err := p.watch(ctx, out)
	stop()
	if err := errors.Join(err, <-ended); err != nil {
		return err
	}
	var steps int64
	for _, st := range stats.Stages {
		steps += st.Out
	}
	took := time.Since(p.began)
	fmt.Fprintf(out, "\n%s steps in %.1f s: %.0f a second\n", grouped(int(steps)), took.Seconds(), float64(steps)/took.Seconds())
	fmt.Fprintf(out, "\nthe pipeline, as Mermaid shows it:\n\n%s", p.Mermaid(stats))
	return nil
}

// watch prints a line a second until the stages are empty.
func (p *pipeline) watch(ctx context.Context, out io.Writer) (mongoq.PipelineStats, error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		empty, err := p.Empty(ctx)
		if err != nil {
			return mongoq.PipelineStats{}, err
		}
		stats, err := p.Stats(ctx)
		if err != nil {
			return stats, err
		}
		var line strings.Builder
		dead := int64(0)
		for _, st := range stats.Stages {
			fmt.Fprintf(&line, "  %s %d+%d", st.Stage, st.Waiting, st.Working)
			if st.Stage != "review" {
				dead += st.Dead
			}
		}
		fmt.Fprintf(out, "%3.0f s, waiting+working:%s\n", time.Since(p.began).Seconds(), line.String())
		if empty {
			if dead > 0 {
				return stats, fmt.Errorf("%d files could not be handled: look into the dead-letter queues", dead)
			}
			return stats, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return stats, context.Cause(ctx)
		}
	}
}
