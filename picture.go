package mongoq

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// edge is a link as it is drawn.
type edge struct {
	from, to *stage
	label    string
	back     bool
}

func (p *Pipeline) edges() []edge {
	var all []edge
	for _, st := range p.stages {
		add := func(to, label string, back bool) { all = append(all, edge{st, p.byName[to], label, back}) }
		if st.Next != "" {
			add(st.Next, "", false)
		}
		for _, name := range st.Choice {
			if name != st.Next {
				add(name, "choice", false)
			}
		}
		for _, name := range st.Fork {
			add(name, "fork", false)
		}
		for _, b := range st.Back {
			add(b.To, fmt.Sprintf("back, at most %d", b.Limit), true)
		}
	}
	return all
}

// figuresOf are the lines under a stage's name; none without stats.
func figuresOf(st *stage, stats []PipelineStats) []string {
	for _, all := range stats {
		i := slices.IndexFunc(all.Stages, func(s StageStats) bool { return s.Stage == st.Name })
		if i < 0 {
			continue
		}
		s := all.Stages[i]
		more := ""
		if s.Capped {
			more = "+"
		}
		lines := []string{
			fmt.Sprintf("waiting %d%s, working %d", s.Waiting, more, s.Working),
			fmt.Sprintf("in %d, out %d, %.0f/s", s.In, s.Out, s.Rate),
		}
		if s.Retries > 0 || s.Dead > 0 {
			lines = append(lines, fmt.Sprintf("retries %d, dead %d", s.Retries, s.Dead))
		}
		if s.Paused {
			lines = append(lines, "paused")
		}
		return lines
	}
	return nil
}

// passed is how many went over a link, as text; "" without stats.
func passed(e edge, stats []PipelineStats) string {
	for _, all := range stats {
		for _, s := range all.Stages {
			if s.Stage == e.from.Name && s.To[e.to.Name] > 0 {
				return strconv.FormatInt(s.To[e.to.Name], 10)
			}
		}
	}
	return ""
}

func labelOf(e edge, stats []PipelineStats) string {
	return strings.Join(slices.DeleteFunc([]string{e.label, passed(e, stats)}, func(s string) bool { return s == "" }), ": ")
}

// Mermaid draws the pipeline as a Mermaid flowchart (https://mermaid.js.org), which Markdown shows in many places. With
// Stats, stages and links bear their figures.
func (p *Pipeline) Mermaid(stats ...PipelineStats) string {
	var b strings.Builder
	b.WriteString("flowchart LR\n")
	ids := map[*stage]string{}
	for i, st := range p.stages {
		ids[st] = fmt.Sprintf("s%d", i)
		text := strings.Join(append([]string{mermaidText(st.Name)}, figuresOf(st, stats)...), "<br/>")
		open, end := "[", "]" // a stage
		switch {
		case st.Join != nil:
			open, end = "[[", "]]"
		case len(st.Fork) > 0:
			open, end = "[/", `\]`
		case st.sink():
			open, end = "([", "])"
		}
		fmt.Fprintf(&b, "    %s%s\"%s\"%s\n", ids[st], open, text, end)
	}
	for _, e := range p.edges() {
		arrow := "-->"
		if e.back {
			arrow = "-.->"
		}
		if label := labelOf(e, stats); label != "" {
			arrow += `|"` + label + `"|`
		}
		fmt.Fprintf(&b, "    %s %s %s\n", ids[e.from], arrow, ids[e.to])
	}
	return b.String()
}

// mermaidText is a name as Mermaid shows it: what it would read as markup goes as an entity.
func mermaidText(name string) string {
	return strings.NewReplacer("&", "&amp;", `"`, "&quot;", "<", "&lt;", ">", "&gt;", "#", "#35;", "\n", " ", "`", "#96;").Replace(name)
}

// DOT draws the pipeline in the language of Graphviz (https://graphviz.org). With Stats, stages and links bear their
// figures.
func (p *Pipeline) DOT(stats ...PipelineStats) string {
	var b strings.Builder
	fmt.Fprintf(&b, "digraph %s {\n    rankdir=LR;\n    node [shape=box];\n", dotText(p.name))
	for _, st := range p.stages {
		label := strings.Join(append([]string{st.Name}, figuresOf(st, stats)...), "\n")
		shape := ""
		switch {
		case st.Join != nil:
			shape = ", shape=invtrapezium"
		case len(st.Fork) > 0:
			shape = ", shape=trapezium"
		case st.sink():
			shape = ", style=rounded"
		}
		fmt.Fprintf(&b, "    %s [label=%s%s];\n", dotText(st.Name), dotText(label), shape)
	}
	for _, e := range p.edges() {
		var attrs []string
		if label := labelOf(e, stats); label != "" {
			attrs = append(attrs, "label="+dotText(label))
		}
		if e.back {
			attrs = append(attrs, "style=dashed")
		}
		fmt.Fprintf(&b, "    %s -> %s", dotText(e.from.Name), dotText(e.to.Name))
		if len(attrs) > 0 {
			fmt.Fprintf(&b, " [%s]", strings.Join(attrs, ", "))
		}
		b.WriteString(";\n")
	}
	b.WriteString("}\n")
	return b.String()
}

func dotText(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}
