package mongoq_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

func TestPipelinePictures(t *testing.T) {
	t.Parallel()
	db := mongotest.Database(t, mongotest.ReplicaSet)
	p := newPipeline(t, openStore(t, db),
		&mongoq.Stage{Name: "read", Handler: forward, Next: `sp"lit`},
		&mongoq.Stage{Name: `sp"lit`, Handler: forward, Fork: []string{"a", "b"}, Choice: []string{"out"}, Back: []mongoq.Back{{To: "read", Limit: 2}}},
		&mongoq.Stage{Name: "a", Handler: forward, Next: "join"}, &mongoq.Stage{Name: "b", Handler: forward, Next: "join"},
		&mongoq.Stage{Name: "join", Handler: forward, Join: &mongoq.Join{Of: `sp"lit`}, Next: "out"},
		&mongoq.Stage{Name: "out", Handler: forward},
	)
	require.Equal(t, `flowchart LR
    s0["read"]
    s1[/"sp&quot;lit"\]
    s2["a"]
    s3["b"]
    s4[["join"]]
    s5(["out"])
    s0 --> s1
    s1 -->|"choice"| s5
    s1 -->|"fork"| s2
    s1 -->|"fork"| s3
    s1 -.->|"back, at most 2"| s0
    s2 --> s4
    s3 --> s4
    s4 --> s5
`, p.Mermaid())
	require.Equal(t, `digraph "p" {
    rankdir=LR;
    node [shape=box];
    "read" [label="read"];
    "sp\"lit" [label="sp\"lit", shape=trapezium];
    "a" [label="a"];
    "b" [label="b"];
    "join" [label="join", shape=invtrapezium];
    "out" [label="out", style=rounded];
    "read" -> "sp\"lit";
    "sp\"lit" -> "out" [label="choice"];
    "sp\"lit" -> "a" [label="fork"];
    "sp\"lit" -> "b" [label="fork"];
    "sp\"lit" -> "read" [label="back, at most 2", style=dashed];
    "a" -> "join";
    "b" -> "join";
    "join" -> "out";
}
`, p.DOT())

	_, err := p.PushMany(t.Context(), ints(3))
	require.NoError(t, err)
	stop := runPipeline(t, p, "read")
	var st mongoq.PipelineStats
	require.Eventually(t, func() bool {
		st, err = p.Stats(t.Context())
		return err == nil && st.Stages[0].Out == 3 && st.Stages[1].Waiting == 3
	}, late, 5*time.Millisecond)
	stop()
	require.EqualValues(t, 3, st.Live())
	require.Positive(t, st.Stages[1].Oldest)
	require.Contains(t, p.Mermaid(st), `s1[/"sp&quot;lit<br/>waiting 3, working 0<br/>in 0, out 0, 0/s"\]`)
	require.Contains(t, p.Mermaid(st), `s0 -->|"3"| s1`)
	require.Contains(t, p.DOT(st), `"sp\"lit" [label="sp\"lit\nwaiting 3, working 0\nin 0, out 0, 0/s", shape=trapezium];`)
	require.Contains(t, p.DOT(st), `"read" -> "sp\"lit" [label="3"];`)
	require.Eventually(t, func() bool {
		st, err = p.Stats(t.Context())
		return err == nil && st.Stages[0].Rate > 0
	}, late, 50*time.Millisecond)
}
