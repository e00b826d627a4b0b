package pipefile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/seed-de459a48/mongoq"
	"go.yaml.in/yaml/v4"
)

// Handlers are the handlers of stages by the names that files call them by.
type Handlers map[string]mongoq.StageHandler

// File is a pipeline's shape as it was read.
type File struct {
	Name   string // of the pipeline
	Stages []mongoq.Stage

	path     string
	handlers []string         // of the stages, by name
	lines    []map[string]int // of the stages' fields, by the names of mongoq.Stage
}

// Error is a mistake in a file. It wraps mongoq.ErrInvalidOption, unless the text is no YAML at all.
type Error struct {
	Path string // empty: of Parse
	Line int    // from 1; 0: not known
	Err  error
}

func (e *Error) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("pipefile: line %d: %v", e.Line, e.Err)
	}
	return fmt.Sprintf("pipefile: %s:%d: %v", e.Path, e.Line, e.Err)
}

// Unwrap gives the cause to errors.Is and errors.As.
func (e *Error) Unwrap() error { return e.Err }

// Load reads a file. Errors: the file's, or those of Parse with its path.
func Load(path string) (*File, error) {
	data, err := os.ReadFile(path) //nolint:gosec // the file that the caller names
	if err != nil {
		return nil, fmt.Errorf("pipefile: %w", err)
	}
	return parse(path, data)
}

// Parse reads a pipeline's shape. Errors: an *Error for the first mistake.
func Parse(data []byte) (*File, error) { return parse("", data) }

func parse(path string, data []byte) (*File, error) {
	var doc, more yaml.Node
	f := &File{path: path}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 0 {
		return nil, f.wrong(1, "a file must hold a pipeline, this one is empty")
	}
	if err != nil {
		return nil, &Error{Path: path, Line: lineOf(err), Err: err}
	}
	switch err := dec.Decode(&more); {
	case err == nil:
		return nil, f.wrong(max(more.Line, 1), "a file must hold one pipeline, here begins another document")
	case !errors.Is(err, io.EOF):
		return nil, &Error{Path: path, Line: lineOf(err), Err: err}
	}
	return f, f.read(doc.Content[0])
}

// Build makes the pipeline in a store. change, if given, is called for each stage, for what a file cannot say, such as
// middleware. Errors: an *Error for a handler that is not registered, and for what mongoq.NewPipeline refuses, which is
// then a *mongoq.StageError as well.
func (f *File) Build(store *mongoq.Store, handlers Handlers, change ...func(*mongoq.Stage)) (*mongoq.Pipeline, error) {
	stages := make([]*mongoq.Stage, len(f.Stages))
	for i := range f.Stages {
		st := f.Stages[i]
		h, ok := handlers[f.handlers[i]]
		if !ok {
			line := f.line(i, "Handler")
			return nil, f.wrong(line, "stage %q: no handler %q is registered, there are %q", st.Name, f.handlers[i], slices.Sorted(maps.Keys(handlers)))
		}
		st.Handler = h
		for _, c := range change {
			c(&st)
		}
		stages[i] = &st
	}
	p, err := mongoq.NewPipeline(store, f.Name, stages...)
	var wrong *mongoq.StageError
	if errors.As(err, &wrong) {
		// Of two of one name the second is meant.
		for i := range slices.Backward(f.Stages) {
			if f.Stages[i].Name == wrong.Stage {
				return nil, &Error{Path: f.path, Line: f.line(i, wrong.Field), Err: err}
			}
		}
	}
	if err != nil {
		return nil, &Error{Path: f.path, Line: 1, Err: err}
	}
	return p, nil
}

// line is where a stage's field stands, or the stage.
func (f *File) line(stage int, field string) int {
	if n, ok := f.lines[stage][field]; ok {
		return n
	}
	return f.lines[stage][""]
}

func (f *File) wrong(line int, format string, args ...any) error {
	return &Error{Path: f.path, Line: line, Err: fmt.Errorf("%w: %s", mongoq.ErrInvalidOption, fmt.Sprintf(format, args...))}
}

// lineOf is the line that the YAML library names; 0: none.
func lineOf(err error) int {
	var load *yaml.LoadError
	if errors.As(err, &load) {
		return load.Mark.Line
	}
	return 0
}
