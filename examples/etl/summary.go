package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/seed-de459a48/mongoq"
)

// totals is what a set of files comes to.
type totals struct {
	packages  map[string]bool
	files     int
	lines     int
	functions int
	longest   Function
	in        string // the longest function's file
	review    int    // files that do not parse, however often they are read; they count nowhere else but in packages
}

func (t *totals) add(f Facts) {
	t.see(f.File)
	t.files++
	t.lines += f.Lines
	t.functions += f.Functions
	// Of two of one length the first by path, so that the order of the files does not matter.
	if f.Longest.Lines > t.longest.Lines || f.Longest.Lines == t.longest.Lines && f.Path < t.in {
		t.longest, t.in = f.Longest, f.Path
	}
}

func (t *totals) see(f File) {
	if t.packages == nil {
		t.packages = map[string]bool{}
	}
	t.packages[f.Package] = true
}

// summary is what the files under GOROOT/src come to: the standard library, and all of them.
type summary struct{ std, all totals }

func (s *summary) add(f Facts) {
	s.all.add(f)
	if f.Std {
		s.std.add(f)
	}
}

func (s *summary) broken(f File) {
	s.all.see(f)
	s.all.review++
	if f.Std {
		s.std.see(f)
		s.std.review++
	}
}

// results reads what the pipeline stored, by path, and what died in review.
func (p *pipeline) results(ctx context.Context) (stored []Facts, review []*mongoq.Envelope, err error) {
	cur, err := p.files.Find(ctx, bson.D{})
	if err != nil {
		return nil, nil, err
	}
	if err := cur.All(ctx, &stored); err != nil {
		return nil, nil, err
	}
	for e, err := range p.review.DeadLetters().List(ctx) {
		if err != nil {
			return nil, nil, err
		}
		if e.Dead.Kind != mongoq.DeadHops {
			return nil, nil, fmt.Errorf("%s died in review: %s: %s", e.ID.Hex(), e.Dead.Kind, e.Dead.Msg)
		}
		review = append(review, e)
	}
	return stored, review, nil
}

// summarise adds up what the pipeline left behind.
func (p *pipeline) summarise(ctx context.Context) (*summary, error) {
	stored, review, err := p.results(ctx)
	if err != nil {
		return nil, err
	}
	var s summary
	for _, f := range stored {
		s.add(f)
	}
	for _, e := range review {
		var f File
		if err := e.Decode(&f); err != nil {
			return nil, err
		}
		s.broken(f)
	}
	return &s, nil
}

func (s *summary) print(out io.Writer) {
	fmt.Fprintf(out, "\n%-28s%18s%18s\n", "", "standard library", "all of GOROOT/src")
	row := func(what string, std, all any) { fmt.Fprintf(out, "%-28s%18v%18v\n", what, std, all) }
	row("packages (folders)", grouped(len(s.std.packages)), grouped(len(s.all.packages)))
	row("files", grouped(s.std.files), grouped(s.all.files))
	row("lines", grouped(s.std.lines), grouped(s.all.lines))
	row("functions", grouped(s.std.functions), grouped(s.all.functions))
	row("longest function, in lines", grouped(s.std.longest.Lines), grouped(s.all.longest.Lines))
	row("files in review", grouped(s.std.review), grouped(s.all.review))
	fmt.Fprintf(out, "longest of the standard library: %s in %s\n", s.std.longest.Name, s.std.in)
	fmt.Fprintf(out, "longest of all:                  %s in %s\n", s.all.longest.Name, s.all.in)
}

// grouped writes a number with a comma at each thousand.
func grouped(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// check compares what the pipeline left behind with a plain walk of the same files, file by file, and the packages and
// their files with what go list std says.
func (p *pipeline) check(ctx context.Context, sum *summary, goroot string) error {
	std, err := listStd(ctx, goroot)
	if err != nil {
		return err
	}
	want, wantBroken, plain, err := plainWalk(p.src, std)
	if err != nil {
		return err
	}
	stored, review, err := p.results(ctx)
	if err != nil {
		return err
	}
	for _, f := range stored {
		if f != want[f.Path] {
			return fmt.Errorf("%s: the pipeline stored %+v, a plain walk finds %+v", f.Path, f, want[f.Path])
		}
		delete(want, f.Path)
	}
	for path := range want {
		return fmt.Errorf("%s: not stored, and %d more", path, len(want)-1)
	}
	for _, e := range review {
		var f File
		if err := e.Decode(&f); err != nil {
			return err
		}
		if !wantBroken[f.Path] {
			return fmt.Errorf("%s: in review, but it parses or is there twice", f.Path)
		}
		delete(wantBroken, f.Path)
	}
	for path := range wantBroken {
		return fmt.Errorf("%s: does not parse, but is not in review, and %d more", path, len(wantBroken)-1)
	}
	if err := plain.same(sum); err != nil {
		return err
	}
	return sum.sameAsGoList(std)
}

// plainWalk does the same work without any queue.
func plainWalk(src string, std map[string]int) (facts map[string]Facts, broken map[string]bool, sum *summary, err error) {
	files, err := walk(src, std)
	if err != nil {
		return nil, nil, nil, err
	}
	facts, broken, sum = map[string]Facts{}, map[string]bool{}, &summary{}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(src, filepath.FromSlash(f.Path)))
		if err != nil {
			return nil, nil, nil, err
		}
		fact, err := analyse(Source{File: f, Text: text})
		if err != nil {
			broken[f.Path] = true
			sum.broken(f)
			continue
		}
		facts[f.Path] = fact
		sum.add(fact)
	}
	return facts, broken, sum, nil
}

// same compares the figures that are printed.
func (s *summary) same(o *summary) error {
	for _, t := range []struct {
		what string
		a, b totals
	}{{"standard library", s.std, o.std}, {"all of GOROOT/src", s.all, o.all}} {
		packages := maps.Equal(t.a.packages, t.b.packages)
		t.a.packages, t.b.packages = nil, nil
		if a, b := fmt.Sprintf("%+v", t.a), fmt.Sprintf("%+v", t.b); a != b || !packages {
			return fmt.Errorf("%s: a plain walk finds %s, the summary says %s", t.what, a, b)
		}
	}
	return nil
}

// sameAsGoList compares the packages and the number of files with those of go list std.
func (s *summary) sameAsGoList(std map[string]int) error {
	listed := slices.Sorted(maps.Keys(std))
	found := slices.Sorted(maps.Keys(s.std.packages))
	if !slices.Equal(listed, found) {
		return fmt.Errorf("go list std names %d packages, the summary has %d", len(listed), len(found))
	}
	files := 0
	for _, n := range std {
		files += n
	}
	if got := s.std.files + s.std.review; got != files {
		return fmt.Errorf("go list std names %d files, the summary has %d", files, got)
	}
	return nil
}
