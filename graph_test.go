package mongoq_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// Each mistake in a graph is refused when it is built, by the stage and the field.
func TestPipelineIsCheckedWhenItIsBuilt(t *testing.T) {
	t.Parallel()
	store := openStore(t, mongotest.Database(t, mongotest.ReplicaSet))
	stage := func(name string, change ...func(*mongoq.Stage)) *mongoq.Stage {
		st := &mongoq.Stage{Name: name, Handler: forward}
		for _, c := range change {
			c(st)
		}
		return st
	}
	next := func(name string) func(*mongoq.Stage) { return func(st *mongoq.Stage) { st.Next = name } }
	choice := func(names ...string) func(*mongoq.Stage) { return func(st *mongoq.Stage) { st.Choice = names } }
	fork := func(names ...string) func(*mongoq.Stage) { return func(st *mongoq.Stage) { st.Fork = names } }
	back := func(to string, limit int) func(*mongoq.Stage) {
		return func(st *mongoq.Stage) { st.Back = append(st.Back, mongoq.Back{To: to, Limit: limit}) }
	}
	join := func(of string) func(*mongoq.Stage) {
		return func(st *mongoq.Stage) { st.Join = &mongoq.Join{Of: of} }
	}
	bad := []struct {
		stage, field, rule string
		stages             []*mongoq.Stage
	}{
		{"", "Name", "must not be empty", []*mongoq.Stage{stage("a"), stage("")}},
		{"a", "Name", "no two stages may have the same name", []*mongoq.Stage{stage("a", next("b")), stage("b"), stage("a")}},
		{"b", "Handler", "needs a handler, got nil", []*mongoq.Stage{stage("a", next("b")), {Name: "b"}}},
		{"b", "Handler", "needs a handler, got nil", []*mongoq.Stage{
			stage("a", next("b")), {Name: "b", Handler: mongoq.Transform[int, int](nil)},
		}},
		{"a", "Queue", `would go to "p.b"`, []*mongoq.Stage{
			{Name: "a", Next: "b", Handler: forward, Queue: mongoq.QueueConfig{DeadLetter: "p.b"}}, stage("b"),
		}},
		{"a", "Queue", `would go to "p.a.dead"`, []*mongoq.Stage{stage("a", next("a.dead")), stage("a.dead")}},
		{"j", "Back", `only a part of the fork "f" may go back to "a"`, []*mongoq.Stage{
			stage("f", fork("a", "b")), stage("a", next("j")), stage("b", next("j")), stage("j", join("f"), back("a", 2)),
		}},
		{"e", "Back", `only a part of the fork "f" may go back to "j"`, []*mongoq.Stage{
			stage("f", fork("a", "b")), stage("a", next("j")), stage("b", next("j")), stage("j", join("f"), next("e")), stage("e", back("j", 2)),
		}},
		{"a", "Next", `there is no "x"`, []*mongoq.Stage{stage("a", next("x"))}},
		{"a", "Choice", `there is no "x"`, []*mongoq.Stage{stage("a", choice("b", "x")), stage("b")}},
		{"a", "Fork", `there is no "x"`, []*mongoq.Stage{stage("a", fork("b", "x")), stage("b")}},
		{"a", "Back", `there is no "x"`, []*mongoq.Stage{stage("a", back("x", 1))}},
		{"b", "Join", `there is no "x"`, []*mongoq.Stage{stage("a", next("b")), stage("b", join("x"))}},
		{"a", "Choice", `"b" does twice`, []*mongoq.Stage{stage("a", choice("b", "b")), stage("b")}},
		{"a", "Fork", `"b" does twice`, []*mongoq.Stage{stage("a", fork("b", "b")), stage("b")}},
		{"a", "Fork", `at least two stages, got "b" only`, []*mongoq.Stage{stage("a", fork("b")), stage("b")}},
		{"c", "Name", "no link leads to this one", []*mongoq.Stage{stage("a", next("b")), stage("b"), stage("c", next("b"))}},
		{"b", "Back", "a -> b -> a", []*mongoq.Stage{stage("a", next("b")), stage("b", next("a"))}},
		{"a", "Back", "a -> a", []*mongoq.Stage{stage("a", choice("a"))}},
		{"b", "Back", "Limit must be >= 1, got 0", []*mongoq.Stage{stage("a", next("b")), stage("b", back("a", 0))}},
		{"c", "Back", `"b" does not lead to "c"`, []*mongoq.Stage{stage("a", choice("b", "c")), stage("b"), stage("c", back("b", 1))}},
		{"a", "Back", `"b" is a stage that Next or Choice lead to`, []*mongoq.Stage{stage("a", next("b"), back("b", 1)), stage("b")}},
		{"b", "Join", `must name a stage that forks, "a" does not`, []*mongoq.Stage{stage("a", next("b")), stage("b", join("a"))}},
		{"a", "Fork", `every branch must lead to the join "j", "c" does not`, []*mongoq.Stage{
			stage("a", fork("b", "c")), stage("b", next("j")), stage("c"), stage("j", join("a")),
		}},
		{"j", "Join", `through its fork "a" only`, []*mongoq.Stage{
			stage("a", fork("b", "c"), next("j")), stage("b", next("j")), stage("c", next("j")), stage("j", join("a")),
		}},
		{"k", "Join", `"a" has another`, []*mongoq.Stage{
			stage("a", fork("b", "c")), stage("b", next("j")), stage("c", next("j")), stage("j", join("a"), next("k")), stage("k", join("a")),
		}},
		{"b", "Back", `must not go back before it, to "a"`, []*mongoq.Stage{
			stage("a", fork("b", "c")), stage("b", next("j"), back("a", 2)), stage("c", next("j")), stage("j", join("a")),
		}},
		{"b", "Fork", `needs a join of its own before "j"`, []*mongoq.Stage{
			stage("a", fork("b", "c")), stage("b", fork("d", "e")), stage("c", next("j")),
			stage("d", next("j")), stage("e", next("j")), stage("j", join("a")),
		}},
		{"b", "Queue", "needs a dead-letter queue", []*mongoq.Stage{
			stage("a", next("b")), stage("b", func(st *mongoq.Stage) { st.Queue.DeadLetter = mongoq.NoDeadLetter }),
		}},
		{"a", "Queue", "Lease must be >= 1ms", []*mongoq.Stage{stage("a", func(st *mongoq.Stage) { st.Queue.Lease = 1 })}},
		{"a", "Worker", "Concurrency must be >= 1, got -1", []*mongoq.Stage{stage("a", func(st *mongoq.Stage) { st.Worker.Concurrency = -1 })}},
		{"a", "Worker", "serves its queue only", []*mongoq.Stage{stage("a", func(st *mongoq.Stage) { st.Worker.Also = make([]mongoq.Source, 1) })}},
		{"j", "Join", "OnDead must be FailWhole or GoOn, got 7", []*mongoq.Stage{
			stage("a", fork("b", "j")), stage("b", next("j")), stage("j", func(st *mongoq.Stage) { st.Join = &mongoq.Join{Of: "a", OnDead: 7} }),
		}},
	}
	for _, b := range bad {
		_, err := mongoq.NewPipeline(store, "p", b.stages...)
		require.ErrorIs(t, err, mongoq.ErrInvalidOption, b.rule)
		require.ErrorContains(t, err, b.rule)
		var wrong *mongoq.StageError
		require.ErrorAs(t, err, &wrong, b.rule)
		require.Equal(t, []string{"p", b.stage, b.field}, []string{wrong.Pipeline, wrong.Stage, wrong.Field}, b.rule)
	}
	for rule, build := range map[string]func() (*mongoq.Pipeline, error){
		"needs a store":      func() (*mongoq.Pipeline, error) { return mongoq.NewPipeline(nil, "p", stage("a")) },
		"name must not":      func() (*mongoq.Pipeline, error) { return mongoq.NewPipeline(store, "", stage("a")) },
		"at least one stage": func() (*mongoq.Pipeline, error) { return mongoq.NewPipeline(store, "p") },
		`number 2 of "p" is`: func() (*mongoq.Pipeline, error) { return mongoq.NewPipeline(store, "p", stage("a"), nil) },
		"not begin with '$'": func() (*mongoq.Pipeline, error) { return mongoq.NewPipeline(store, "$p", stage("a")) },
	} {
		_, err := build()
		require.ErrorIs(t, err, mongoq.ErrInvalidOption, rule)
		require.ErrorContains(t, err, rule)
	}

	good := [][]*mongoq.Stage{
		{stage("a", fork("b", "j")), stage("b", next("j")), stage("j", join("a"))},
		{ // a fork in a fork; a loop around both
			stage("a", fork("b", "c")), stage("b", fork("d", "e")), stage("c", next("j"), back("c", 3)),
			stage("d", next("k")), stage("e", next("k")), stage("k", join("b"), next("j")), stage("j", join("a"), back("a", 2)),
		},
		{stage("a", fork("b", "c")), stage("b"), stage("c")}, // no join
		{stage("a", next("b")), stage("c", next("b"), func(st *mongoq.Stage) { st.Entry = true }), stage("b")},
	}
	for _, stages := range good {
		_, err := mongoq.NewPipeline(store, "p", stages...)
		require.NoError(t, err)
	}
	p := newPipeline(t, store, stage("a", next("b")), stage("b"))
	_, err := p.Queue("x")
	require.ErrorContains(t, err, `pipeline "p" has no stage "x"`)
	require.ErrorContains(t, p.Run(t.Context(), "a", "x"), `pipeline "p" has no stage "x"`)
}

// A server without transactions cannot fork: that is said when the pipeline is built, not when the first one forks.
func TestPipelineForkNeedsTransactions(t *testing.T) {
	t.Parallel()
	mongotest.Each(t, func(t *testing.T, db *mongo.Database) {
		_, err := mongoq.NewPipeline(openStore(t, db), "p",
			&mongoq.Stage{Name: "a", Handler: forward, Fork: []string{"b", "c"}},
			&mongoq.Stage{Name: "b", Handler: forward}, &mongoq.Stage{Name: "c", Handler: forward})
		if kindOf(t, db) == mongotest.ReplicaSet {
			require.NoError(t, err)
			return
		}
		require.ErrorIs(t, err, mongoq.ErrInvalidOption)
		require.ErrorContains(t, err, `stage "a", Fork`)
		require.ErrorContains(t, err, "this one is a standalone")
	})
}
