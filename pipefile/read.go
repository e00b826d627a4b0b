package pipefile

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/seed-de459a48/mongoq"
	"go.yaml.in/yaml/v4"
)

// field reads one field of a mapping.
type field struct {
	read func(*yaml.Node) error
	name string // of mongoq.Stage, for lines
}

// mapping reads a mapping whose fields are known, each at most once. It gives the lines of those that are there.
func (f *File) mapping(n *yaml.Node, what string, fields map[string]field) (map[string]int, error) {
	n = resolved(n)
	if n.Kind != yaml.MappingNode {
		return nil, f.wrong(n.Line, "%s must be a mapping", what)
	}
	lines := map[string]int{"": n.Line}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		known, ok := fields[key.Value]
		if !ok {
			return nil, f.wrong(key.Line, "%s has no field %q, but %q", what, key.Value, slices.Sorted(maps.Keys(fields)))
		}
		if seen[key.Value] {
			return nil, f.wrong(key.Line, "%s must have %q once", what, key.Value)
		}
		seen[key.Value] = true
		if known.name != "" {
			lines[known.name] = key.Line
		}
		if err := known.read(value); err != nil {
			return nil, err
		}
	}
	return lines, nil
}

// resolved follows an alias.
func resolved(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func (f *File) read(root *yaml.Node) error {
	var stages *yaml.Node
	_, err := f.mapping(root, "a pipeline", map[string]field{
		"pipeline": {read: f.text("pipeline", &f.Name)},
		"stages":   {read: func(n *yaml.Node) error { stages = n; return nil }},
	})
	if err != nil {
		return err
	}
	if f.Name == "" {
		return f.wrong(root.Line, "a file must name its pipeline: \"pipeline: name\"")
	}
	if stages == nil {
		return f.wrong(root.Line, "a pipeline needs stages")
	}
	return f.each(stages, "stages", f.stage)
}

func (f *File) stage(n *yaml.Node) error {
	var st mongoq.Stage
	handler := ""
	lines, err := f.mapping(n, "a stage", map[string]field{
		"name":    {name: "Name", read: f.text("name", &st.Name)},
		"handler": {name: "Handler", read: f.text("handler", &handler)},
		"next":    {name: "Next", read: f.text("next", &st.Next)},
		"choice":  {name: "Choice", read: f.texts("choice", &st.Choice)},
		"fork":    {name: "Fork", read: f.texts("fork", &st.Fork)},
		"entry":   {name: "Entry", read: f.truth("entry", &st.Entry)},
		"back": {name: "Back", read: func(n *yaml.Node) error {
			return f.each(n, "back", func(n *yaml.Node) error {
				var b mongoq.Back
				_, err := f.mapping(n, "a link back", map[string]field{
					"to": {read: f.text("to", &b.To)}, "limit": {read: f.number("limit", &b.Limit)},
				})
				st.Back = append(st.Back, b)
				return err
			})
		}},
		"join": {name: "Join", read: func(n *yaml.Node) error {
			st.Join = &mongoq.Join{}
			_, err := f.mapping(n, "a join", map[string]field{
				"of": {read: f.text("of", &st.Join.Of)},
				"onDead": {read: f.oneOf("onDead", map[string]func(){
					"failWhole": func() { st.Join.OnDead = mongoq.FailWhole },
					"goOn":      func() { st.Join.OnDead = mongoq.GoOn },
				})},
			})
			return err
		}},
		"queue":  {name: "Queue", read: func(n *yaml.Node) error { return f.queue(n, &st.Queue) }},
		"worker": {name: "Worker", read: func(n *yaml.Node) error { return f.worker(n, &st.Worker) }},
	})
	if err != nil {
		return err
	}
	if handler == "" {
		handler = st.Name
	}
	f.Stages = append(f.Stages, st)
	f.handlers = append(f.handlers, handler)
	f.lines = append(f.lines, lines)
	return nil
}

func (f *File) queue(n *yaml.Node, q *mongoq.QueueConfig) error {
	_, err := f.mapping(n, "a queue", map[string]field{
		"lease":        {read: f.duration("lease", &q.Lease)},
		"delay":        {read: f.duration("delay", &q.Delay)},
		"ttl":          {read: f.duration("ttl", &q.TTL)},
		"pollInterval": {read: f.duration("pollInterval", &q.PollInterval)},
		"deadLetter":   {read: f.text("deadLetter", &q.DeadLetter)},
		"retention": {read: func(n *yaml.Node) error {
			if resolved(n).Value == "forever" {
				q.Retention = mongoq.KeepForever
				return nil
			}
			return f.duration("retention", &q.Retention)(n)
		}},
		"onExpire": {read: f.oneOf("onExpire", map[string]func(){
			"discard":      func() { q.OnExpire = mongoq.Discard },
			"toDeadLetter": func() { q.OnExpire = mongoq.ToDeadLetter },
		})},
		"durableClaims": {read: f.truth("durableClaims", &q.DurableClaims)},
		"retry":         {read: func(n *yaml.Node) error { return f.retry(n, q) }},
	})
	return err
}

// retry reads a policy: initial, then each wait factor times the one before, up to max, jitter to either side; after
// retries of them the dead-letter queue.
func (f *File) retry(n *yaml.Node, q *mongoq.QueueConfig) error {
	initial, longest := time.Second, time.Hour
	factor, jitter, retries := 2.0, 0.25, 25 // as mongoq.DefaultRetry
	_, err := f.mapping(n, "a retry", map[string]field{
		"initial": {read: f.duration("initial", &initial)},
		"max":     {read: f.duration("max", &longest)},
		"factor":  {read: f.decimal("factor", &factor)},
		"jitter":  {read: f.decimal("jitter", &jitter)},
		"retries": {read: f.number("retries", &retries)},
	})
	line := resolved(n).Line
	switch {
	case err != nil:
		return err
	case initial < 0 || longest < initial:
		return f.wrong(line, "a retry needs 0 <= initial <= max, got %v and %v", initial, longest)
	case factor < 1:
		return f.wrong(line, "factor must be >= 1, got %v", factor)
	case jitter < 0 || jitter > 1:
		return f.wrong(line, "jitter must be 0 to 1, got %v", jitter)
	case retries < 0:
		return f.wrong(line, "retries must be >= 0, got %d", retries)
	}
	q.Retry = func() backoff.BackOff {
		b := backoff.NewExponentialBackOff(
			backoff.WithInitialInterval(initial), backoff.WithMultiplier(factor), backoff.WithRandomizationFactor(jitter),
			backoff.WithMaxInterval(longest), backoff.WithMaxElapsedTime(0))
		return backoff.WithMaxRetries(b, uint64(retries))
	}
	return nil
}

func (f *File) worker(n *yaml.Node, w *mongoq.WorkerConfig) error {
	_, err := f.mapping(n, "a worker", map[string]field{
		"concurrency":  {read: f.number("concurrency", &w.Concurrency)},
		"timeout":      {read: f.duration("timeout", &w.Timeout)},
		"drainTimeout": {read: f.duration("drainTimeout", &w.DrainTimeout)},
		"noHeartbeat":  {read: f.truth("noHeartbeat", &w.NoHeartbeat)},
	})
	return err
}

func (f *File) each(n *yaml.Node, what string, one func(*yaml.Node) error) error {
	n = resolved(n)
	if n.Kind != yaml.SequenceNode {
		return f.wrong(n.Line, "%s must be a list", what)
	}
	for _, item := range n.Content {
		if err := one(item); err != nil {
			return err
		}
	}
	return nil
}

func (f *File) text(what string, to *string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		n = resolved(n)
		if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
			return f.wrong(n.Line, "%s must be a text", what)
		}
		*to = n.Value
		return nil
	}
}

func (f *File) texts(what string, to *[]string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		return f.each(n, what, func(n *yaml.Node) error {
			var s string
			err := f.text("each of "+what, &s)(n)
			*to = append(*to, s)
			return err
		})
	}
}

func (f *File) number(what string, to *int) func(*yaml.Node) error {
	return func(n *yaml.Node) (err error) {
		if *to, err = strconv.Atoi(resolved(n).Value); err != nil {
			return f.wrong(n.Line, "%s must be a whole number, got %q", what, resolved(n).Value)
		}
		return nil
	}
}

func (f *File) decimal(what string, to *float64) func(*yaml.Node) error {
	return func(n *yaml.Node) (err error) {
		if *to, err = strconv.ParseFloat(resolved(n).Value, 64); err != nil || math.IsNaN(*to) || math.IsInf(*to, 0) {
			return f.wrong(n.Line, "%s must be a finite number, got %q", what, resolved(n).Value)
		}
		return nil
	}
}

func (f *File) duration(what string, to *time.Duration) func(*yaml.Node) error {
	return func(n *yaml.Node) (err error) {
		if *to, err = time.ParseDuration(resolved(n).Value); err != nil {
			return f.wrong(n.Line, "%s must be a duration such as 30s or 1h30m, got %q", what, resolved(n).Value)
		}
		if *to < 0 {
			return f.wrong(n.Line, "%s must not be negative, got %v", what, *to)
		}
		return nil
	}
}

func (f *File) truth(what string, to *bool) func(*yaml.Node) error {
	return f.oneOf(what, map[string]func(){"true": func() { *to = true }, "false": func() { *to = false }})
}

func (f *File) oneOf(what string, choices map[string]func()) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		choose, ok := choices[resolved(n).Value]
		if !ok {
			return f.wrong(n.Line, "%s must be one of %q, got %q", what, slices.Sorted(maps.Keys(choices)), resolved(n).Value)
		}
		choose()
		return nil
	}
}
