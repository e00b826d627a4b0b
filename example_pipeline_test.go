package mongoq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/cenkalti/backoff/v4"

	"github.com/seed-de459a48/mongoq"
)

// examplePipeline runs an example's pipeline on what is pushed, until its last stage calls stop or ctx ends.
func examplePipeline(payloads []any, stages func(stop func()) []*mongoq.Stage) (p *mongoq.Pipeline, run func(), done func()) {
	store, done := exampleStore()
	ctx, stop := context.WithCancel(context.Background())
	p, err := mongoq.NewPipeline(store, "example", stages(stop)...)
	if err == nil {
		_, err = p.PushMany(ctx, payloads)
	}
	if err != nil {
		panic(err)
	}
	return p, func() {
		if err := p.Run(ctx); err != nil {
			panic(err)
		}
	}, done
}

// Stages are joined by links. What a Transform returns is the payload that the next stage gets, changed in the same
// write that moves the envelope.
func ExampleNewPipeline() {
	store, done := exampleStore()
	defer done()
	ctx, stop := context.WithCancel(context.Background()) // in a program: signal.NotifyContext
	defer stop()

	upper := func(_ context.Context, s string) (string, error) { return strings.ToUpper(s), nil }
	show := func(_ context.Context, s string) error {
		fmt.Println(s)
		stop() // somebody presses Ctrl-C
		return nil
	}
	p, err := mongoq.NewPipeline(store, "shout",
		&mongoq.Stage{Name: "upper", Handler: mongoq.Transform(upper), Next: "print"},
		&mongoq.Stage{Name: "print", Handler: mongoq.Sink(show), Worker: mongoq.WorkerConfig{Concurrency: 4}},
	)
	if err != nil {
		panic(err)
	}
	if _, err := p.Push(ctx, "hello"); err != nil {
		panic(err)
	}
	// Works until ctx ends, and then stops the stages in the order of the flow. Run(ctx, "print") runs that stage only.
	if err := p.Run(ctx); err != nil {
		panic(err)
	}
	// Output: HELLO
}

// What cannot work is refused when the pipeline is built, by the stage and the field.
func ExampleStageError() {
	store, done := exampleStore()
	defer done()
	work := mongoq.Sink(func(context.Context, string) error { return nil })
	_, err := mongoq.NewPipeline(store, "etl",
		&mongoq.Stage{Name: "read", Handler: work, Next: "prase"},
		&mongoq.Stage{Name: "parse", Handler: work},
	)
	fmt.Println(err)
	var wrong *mongoq.StageError
	fmt.Println(errors.As(err, &wrong), wrong.Stage, wrong.Field)
	// Output:
	// mongoq: pipeline "etl", stage "read", Next: mongoq: invalid option: a link must lead to a stage of the pipeline, there is no "prase"
	// true read Next
}

// A choice: the handler names the stage that the envelope goes to.
func ExampleGoTo() {
	end := func(name string, stop func()) *mongoq.Stage {
		return &mongoq.Stage{Name: name, Handler: mongoq.Sink(func(_ context.Context, n int) error {
			fmt.Println(n, "is", name)
			stop()
			return nil
		})}
	}
	_, run, done := examplePipeline([]any{7}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{
			{Name: "sort", Choice: []string{"even", "odd"}, Handler: mongoq.Step(
				func(_ context.Context, _ *mongoq.Reservation, n int) (mongoq.Route, error) {
					if n%2 == 0 {
						return mongoq.GoTo("even"), nil
					}
					return mongoq.GoTo("odd", mongoq.AddHeaders(map[string]string{"sorted": "yes"})), nil
				})},
			end("even", stop), end("odd", stop),
		}
	})
	defer done()
	run()
	// Output: 7 is odd
}

// A loop: back to an earlier stage, a limited number of times. At the limit the envelope is a dead letter.
func ExampleBack() {
	p, run, done := examplePipeline([]any{1}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{
			{Name: "double", Next: "look", Handler: mongoq.Transform(
				func(_ context.Context, n int) (int, error) { return 2 * n, nil })},
			{Name: "look", Back: []mongoq.Back{{To: "double", Limit: 3}}, Handler: mongoq.Step(
				func(_ context.Context, r *mongoq.Reservation, n int) (mongoq.Route, error) {
					fmt.Println(n)
					return mongoq.GoTo("double"), nil
				}), Worker: mongoq.WorkerConfig{OnEvent: func(e mongoq.Event) {
				if e.Kind == mongoq.EventDeadLettered {
					stop()
				}
			}}},
		}
	})
	defer done()
	run()
	look, err := p.Queue("look")
	if err != nil {
		panic(err)
	}
	for e, err := range look.DeadLetters().List(context.Background()) {
		if err != nil {
			panic(err)
		}
		fmt.Println(e.Dead.Kind+":", e.Dead.Msg)
	}
	// Output:
	// 2
	// 4
	// 8
	// 16
	// hops: it went back from "look" to "double" 3 times, which is the limit
}

// A fork makes a copy for each branch, all or none; a join waits for them, and its handler sees what they brought.
func ExampleMerge() {
	_, run, done := examplePipeline([]any{"to be or not to be"}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{
			{Name: "split", Fork: []string{"words", "letters"}, Handler: mongoq.Transform(
				func(_ context.Context, s string) (string, error) { return s, nil })},
			{Name: "words", Next: "report", Handler: mongoq.Transform(
				func(_ context.Context, s string) (int, error) { return len(strings.Fields(s)), nil })},
			{Name: "letters", Next: "report", Handler: mongoq.Transform(
				func(_ context.Context, s string) (int, error) { return len(strings.ReplaceAll(s, " ", "")), nil })},
			{Name: "report", Join: &mongoq.Join{Of: "split"}, Handler: mongoq.Merge(
				func(_ context.Context, whole string, parts *mongoq.Joined) (string, error) {
					defer stop()
					var words, letters int
					if err := errors.Join(parts.Part("words").Decode(&words), parts.Part("letters").Decode(&letters)); err != nil {
						return "", err
					}
					_, err := fmt.Printf("%q: %d words, %d letters\n", whole, words, letters)
					return whole, err
				})},
		}
	})
	defer done()
	run()
	// Output: "to be or not to be": 6 words, 13 letters
}

// The copies of a fork may differ, and what waits at the join need not be what they carry.
func ExampleFork() {
	show := func(name string) mongoq.StageHandler {
		return mongoq.Step(func(_ context.Context, r *mongoq.Reservation, s string) (mongoq.Route, error) {
			return mongoq.Forward(mongoq.Payload(name + " got " + s)), nil
		})
	}
	_, run, done := examplePipeline([]any{"a large text"}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{
			{Name: "split", Fork: []string{"a", "b"}, Handler: mongoq.Step(
				func(_ context.Context, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
					return mongoq.Fork().Branch("b", mongoq.Payload("its own")).Whole(mongoq.Payload("a title")), nil
				})},
			{Name: "a", Handler: show("a"), Next: "join"},
			{Name: "b", Handler: show("b"), Next: "join"},
			{Name: "join", Join: &mongoq.Join{Of: "split"}, Handler: mongoq.Merge(
				func(_ context.Context, title string, parts *mongoq.Joined) (string, error) {
					defer stop()
					fmt.Println(title)
					for i := range parts.Parts {
						var s string
						if err := parts.Parts[i].Decode(&s); err != nil {
							return "", err
						}
						fmt.Println(s)
					}
					return title, nil
				})},
		}
	})
	defer done()
	run()
	// Output:
	// a title
	// a got a large text
	// b got its own
}

// With GoOn a join goes on without a part that died, and knows why.
func ExampleJoin() {
	pass := mongoq.Transform(func(_ context.Context, s string) (string, error) { return s, nil })
	_, run, done := examplePipeline([]any{"x"}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{
			{Name: "split", Fork: []string{"good", "bad"}, Handler: pass},
			{Name: "good", Next: "join", Handler: pass},
			{Name: "bad", Next: "join", Handler: mongoq.Transform(func(context.Context, string) (string, error) {
				return "", backoff.Permanent(errors.New("no such page"))
			})},
			{Name: "join", Join: &mongoq.Join{Of: "split", OnDead: mongoq.GoOn}, Handler: mongoq.Merge(
				func(_ context.Context, whole string, parts *mongoq.Joined) (string, error) {
					defer stop()
					m := parts.Missing[0]
					_, err := fmt.Println(len(parts.Parts), "part;", m.Branch, "is missing,", m.Dead+":", m.Msg)
					return whole, err
				})},
		}
	})
	defer done()
	run()
	// Output: 1 part; bad is missing, permanent: no such page
}

// What a stage drops is gone, or in its history with the reason.
func ExampleDrop() {
	p, run, done := examplePipeline([]any{"spam"}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{{
			Name: "filter", Queue: mongoq.QueueConfig{Retention: mongoq.KeepForever},
			Handler: mongoq.Step(func(_ context.Context, _ *mongoq.Reservation, s string) (mongoq.Route, error) {
				defer stop()
				return mongoq.Drop("nobody wants " + s), nil
			}),
		}}
	})
	defer done()
	run()
	filter, err := p.Queue("filter")
	if err != nil {
		panic(err)
	}
	for e, err := range filter.History().List(context.Background()) {
		if err != nil {
			panic(err)
		}
		fmt.Println(e.Result)
	}
	// Output: {"dropped": "nobody wants spam"}
}

// The figures of each stage, and the pipeline as a picture with them.
func ExamplePipeline_Mermaid() {
	p, run, done := examplePipeline([]any{"x"}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{
			{Name: "read", Next: "store", Handler: mongoq.Transform(func(_ context.Context, s string) (string, error) { return s, nil })},
			{Name: "store", Handler: mongoq.Sink(func(context.Context, string) error { stop(); return nil })},
		}
	})
	defer done()
	fmt.Print(p.Mermaid()) // the shape alone
	run()
	stats, err := p.Stats(context.Background())
	if err != nil {
		panic(err)
	}
	for i := range stats.Stages {
		stats.Stages[i].Rate = 0 // not the same each time
	}
	fmt.Print(p.Mermaid(stats))
	// Output:
	// flowchart LR
	//     s0["read"]
	//     s1(["store"])
	//     s0 --> s1
	// flowchart LR
	//     s0["read<br/>waiting 0, working 0<br/>in 1, out 1, 0/s"]
	//     s1(["store<br/>waiting 0, working 0<br/>in 1, out 1, 0/s"])
	//     s0 -->|"1"| s1
}

// DOT is for Graphviz.
func ExamplePipeline_DOT() {
	p, _, done := examplePipeline([]any{"x"}, func(func()) []*mongoq.Stage {
		pass := mongoq.Transform(func(_ context.Context, s string) (string, error) { return s, nil })
		return []*mongoq.Stage{
			{Name: "try", Handler: pass, Next: "look"},
			{Name: "look", Handler: pass, Back: []mongoq.Back{{To: "try", Limit: 3}}},
		}
	})
	defer done()
	fmt.Print(p.DOT())
	// Output:
	// digraph "example" {
	//     rankdir=LR;
	//     node [shape=box];
	//     "try" [label="try"];
	//     "look" [label="look"];
	//     "try" -> "look";
	//     "look" -> "try" [label="back, at most 3", style=dashed];
	// }
}

// Stats are of each stage: what this process has done, and what waits.
func ExamplePipeline_Stats() {
	p, run, done := examplePipeline([]any{"a", "b", "c"}, func(stop func()) []*mongoq.Stage {
		return []*mongoq.Stage{{
			Name: "one", Worker: mongoq.WorkerConfig{Concurrency: 1},
			Handler: mongoq.Sink(func(_ context.Context, s string) error {
				if s == "c" {
					stop()
				}
				return nil
			}),
		}}
	})
	defer done()
	run()
	stats, err := p.Stats(context.Background())
	if err != nil {
		panic(err)
	}
	st := stats.Stages[0]
	fmt.Println(st.Stage, "in", st.In, "out", st.Out, "waiting", st.Waiting, "dead", st.Dead)
	// Output: one in 3 out 3 waiting 0 dead 0
}

// Trace follows an envelope by its id.
func ExamplePipeline_Trace() {
	store, done := exampleStore()
	defer done()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	p, err := mongoq.NewPipeline(store, "example",
		&mongoq.Stage{Name: "read", Next: "store", Handler: mongoq.Transform(func(_ context.Context, s string) (string, error) { return s, nil })},
		&mongoq.Stage{Name: "store", Queue: mongoq.QueueConfig{Retention: mongoq.KeepForever},
			Handler: mongoq.Sink(func(context.Context, string) error { stop(); return nil })},
	)
	if err != nil {
		panic(err)
	}
	id, err := p.Push(ctx, "x")
	if err != nil {
		panic(err)
	}
	if err := p.Run(ctx); err != nil {
		panic(err)
	}
	t, err := p.Trace(context.Background(), id)
	if err != nil {
		panic(err)
	}
	fmt.Println(t.State)
	for _, s := range t.Steps {
		fmt.Println(s.Stage, !s.In.IsZero() && !s.Out.Before(s.In))
	}
	// Output:
	// done
	// read true
	// store true
}
