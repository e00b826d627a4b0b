package figure

import (
	"fmt"
	"io"
	"slices"
)

// Ref names a figure. An empty Setting means the only one of that system and work.
type Ref struct{ Work, System, Setting string }

// Goal is something that has to be reached: the rate of Ours at least Least times that of Base; or, where there is a
// Value, that value of Ours at most Most.
type Goal struct {
	What, Against string

	Ours, Base Ref
	Least      float64

	Value func(Figure) *float64
	Most  float64
	Unit  string
}

const ours = "mongoq"

// Goals are the tables "Must reach" of the issues on speed and on workers.
var Goals = []Goal{
	ratio("pool draining 100,000 no-op jobs", "plain, 16 consumers", 15, Ref{"drain", ours, "64 workers"}, Ref{"drain", "plain", ""}),
	ratio("the same", "asynq, append-only file, its best concurrency", 1.5, Ref{"drain", ours, "64 workers"}, Ref{"drain", "asynq-aof", ""}),
	ratio("the same", "River, its bench settings", 1.2, Ref{"drain", ours, "64 workers"}, Ref{"drain", "river", ""}),
	ratio("the same", "keuss mongo, 16 consumers", 18, Ref{"drain", ours, "64 workers"}, Ref{"drain", "keuss-mongo", ""}),
	ratio("64 goroutines calling Push", "plain insertOne, 64", 2.5, Ref{"push", ours, "64 goroutines"}, Ref{"push", "plain", "64 goroutines"}),
	ratio("256 goroutines calling Push", "plain insertOne, 256", 5, Ref{"push", ours, "256 goroutines"}, Ref{"push", "plain", "256 goroutines"}),
	ratio("PushMany of 1,000", "raw insertMany of 1,000", 0.85, Ref{"pushmany", ours, ""}, Ref{"pushmany", "plain", ""}),
	ratio("64 goroutines: Reserve, then Commit", "plain, 64", 4, Ref{"reserve", ours, ""}, Ref{"reserve", "plain", ""}),
	ratio("one call at a time: push", "plain", 0.95, Ref{"single", ours, "push"}, Ref{"single", "plain", "push"}),
	ratio("one call at a time: reserve + commit", "plain", 0.95, Ref{"single", ours, "reserve+commit"}, Ref{"single", "plain", "reserve+commit"}),
	ratio("4 processes of 16 workers, in sum", "one process of 64", 0.8, Ref{"processes", ours, "4 processes x 16"}, Ref{"processes", ours, "1 process x 64"}),
	ratio("draining beside 500,000 delayed", "with none", 0.9, Ref{"backlog", ours, "500,000 delayed"}, Ref{"backlog", ours, "none"}),
	ratio("draining beside 500,000 in history", "with none", 0.9, Ref{"backlog", ours, "500,000 in history"}, Ref{"backlog", ours, "none"}),
	ratio("draining from a backlog of 500,000", "with none", 0.9, Ref{"backlog", ours, "500,000 waiting"}, Ref{"backlog", ours, "none"}),
	ratio("20 processes of one worker, in sum", "one process of 20", 0.5, Ref{"processes", ours, "20 processes x 1"}, Ref{"processes", ours, "1 process x 20"}),
	ratio("sustained, the last minute", "the first minute", 0.9, Ref{"sustained", ours, "last minute"}, Ref{"sustained", ours, "first minute"}),
	ratio("one consumer after 200,000 claims", "a fresh server", 0.9, Ref{"single", ours, "after 200,000 claims"}, Ref{"single", ours, "reserve+commit"}),
	ratio("200 queues, one worker each, total", "one queue", 0.5, Ref{"queues", ours, "200 queues x 1 worker"}, Ref{"queues", ours, "1 queue x 200 workers"}),
	ratio("three no-op stages, envelope-moves", "the pool's drain in the same run", 0.8, Ref{"pipeline", ours, "3 stages x 64 workers"}, Ref{"pipeline", ours, "drain, 64 workers"}),
	ratio("the same", "keuss pl-mongo, 16 consumers a stage", 10, Ref{"pipeline", ours, "3 stages x 64 workers"}, Ref{"pipeline", "keuss-pl", ""}),
	ratio("three stages, 500,000 waiting at another", "with none", 0.9, Ref{"pipeline", ours, "500,000 waiting at another stage"}, Ref{"pipeline", ours, "3 stages x 64 workers"}),

	ratio("forgetting 1,000,000 by a partition, server CPU", "by the TTL index", 100, Ref{"history", ours, "forget-partition"}, Ref{"history", ours, "forget-ttl"}),
	ratio("draining while a partition is dropped", "undisturbed", 0.95, Ref{"history", ours, "drain while it is forgotten, partition"}, Ref{"history", ours, "drain beside it, partition"}),
	ratio("draining with a TTL history", "with none", 0.85, Ref{"history", ours, "drain, ttl"}, Ref{"history", ours, "drain, no history"}),
	ratio("draining with a partitioned history", "with none", 0.6, Ref{"history", ours, "drain, partition"}, Ref{"history", ours, "drain, no history"}),

	limit("an empty queue's worker: server calls", 1, "a second", Ref{"idle", ours, "server calls"}, rateOf),
	limit("an empty queue's worker: client CPU", 2, "ms a second", Ref{"idle", ours, "client CPU"}, rateOf),
	limit("draining 500,000 jobs: resident memory", 80, "MiB", Ref{"memory", ours, ""}, func(f Figure) *float64 { return f.PeakRSS }),
	limit("push to start, idle, 20 a second: p50", 5, "ms", Ref{"latency", ours, "20 a second"}, func(f Figure) *float64 { return f.P50 }),
	limit("push to start, idle, 20 a second: p99", 20, "ms", Ref{"latency", ours, "20 a second"}, func(f Figure) *float64 { return f.P99 }),
	limit("push to start, 300 a second: p99", 20, "ms", Ref{"latency", ours, "300 a second"}, func(f Figure) *float64 { return f.P99 }),
	limit("delayed: start after it is due: p99", 10, "ms", Ref{"latency", ours, "delayed"}, func(f Figure) *float64 { return f.P99 }),
	limit("signals refused, 20 a second: p99", 1000, "ms", Ref{"latency", ours, "signals refused, 20 a second"}, func(f Figure) *float64 { return f.P99 }),
}

func ratio(what, against string, least float64, our, base Ref) Goal {
	return Goal{What: what, Against: against, Least: least, Ours: our, Base: base}
}

func limit(what string, most float64, unit string, our Ref, value func(Figure) *float64) Goal {
	return Goal{What: what, Against: "at most", Most: most, Unit: unit, Ours: our, Value: value}
}

func rateOf(f Figure) *float64 { return &f.Rate }

// Outcome is how a goal fared. A ratio is the median of those of the runs, which were made one soon after the other.
type Outcome struct {
	Goal      Goal
	Measured  float64
	Low, High float64 // of the ratios
	Runs      int     // that have a ratio
	Missing   bool    // one side was not measured
	OK        bool
}

// Judge compares the figures with the goals, and leaves out those whose work nobody asked for. What is named as left is
// shown as not measured.
func Judge(goals []Goal, figures []Figure, left []string) []Outcome {
	var all []Outcome
	for _, g := range goals {
		if !ran(figures, g.Ours.Work) && !slices.Contains(left, g.Ours.Work) {
			continue
		}
		o := Outcome{Goal: g}
		ours, okOurs := find(figures, g.Ours)
		if g.Value != nil {
			v := (*float64)(nil)
			if okOurs {
				v = g.Value(ours)
			}
			if o.Missing = v == nil; !o.Missing {
				o.Measured, o.OK = *v, *v <= g.Most
			}
		} else {
			base, okBase := find(figures, g.Base)
			ratios := ratiosOf(ours, base)
			if o.Missing = !okOurs || !okBase || len(ratios) == 0; !o.Missing {
				o.Measured, o.Runs = Median(ratios), len(ratios)
				o.Low, o.High = slices.Min(ratios), slices.Max(ratios)
				o.OK = o.Measured >= g.Least
			}
		}
		all = append(all, o)
	}
	return all
}

// ratiosOf are those of the runs that both have.
func ratiosOf(ours, base Figure) []float64 {
	var all []float64
	for i := range min(len(ours.rates), len(base.rates)) {
		if base.rates[i] > 0 {
			all = append(all, ours.rates[i]/base.rates[i])
		}
	}
	return all
}

func ran(figures []Figure, work string) bool {
	for _, f := range figures {
		if f.Work == work {
			return true
		}
	}
	return false
}

// find gives the first figure of that name.
func find(figures []Figure, r Ref) (Figure, bool) {
	for _, f := range figures {
		if f.Work == r.Work && f.System == r.System && (r.Setting == "" || f.Setting == r.Setting) {
			return f, true
		}
	}
	return Figure{}, false
}

// WriteOutcomes writes how the goals fared.
func WriteOutcomes(w io.Writer, outcomes []Outcome) error {
	rows := [][]string{{"must reach", "against", "required", "measured", "from", "to", ""}}
	for _, o := range outcomes {
		required, measured := fmt.Sprintf("%gx", o.Goal.Least), times(o.Measured)
		from, to := times(o.Low), times(o.High)
		if o.Runs < 2 {
			from, to = "", ""
		}
		if o.Goal.Value != nil {
			required = fmt.Sprintf("%g %s", o.Goal.Most, o.Goal.Unit)
			measured = fmt.Sprintf("%s %s", Number(o.Measured), o.Goal.Unit)
		}
		verdict := "short"
		switch {
		case o.Missing:
			measured, verdict = "-", "not measured"
		case o.OK:
			verdict = "ok"
		}
		rows = append(rows, []string{o.Goal.What, o.Goal.Against, required, measured, from, to, verdict})
	}
	return writeRows(w, rows, func(column int) bool { return column >= 2 && column <= 5 })
}

// times writes a ratio, so that one that is short by little does not look as if it were not.
func times(ratio float64) string {
	if ratio < 1 {
		return fmt.Sprintf("%.3fx", ratio)
	}
	return fmt.Sprintf("%.2fx", ratio)
}
