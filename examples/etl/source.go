package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"strings"
)

// File is the payload in the stage read: one Go file.
type File struct {
	Path    string `bson:"_id"`     // from GOROOT/src on, with slashes
	Package string `bson:"package"` // its folder
	Std     bool   `bson:"std"`     // whether go list std names that folder
}

// Source is the payload in the stages parse and review: the file with its text.
type Source struct {
	File `bson:",inline"`
	Text []byte `bson:"text"`
}

// Outline is the payload in the stages count and longest: what parse found.
type Outline struct {
	File      `bson:",inline"`
	Lines     int        `bson:"lines"`
	Functions []Function `bson:"functions"` // declarations of functions and methods
}

// Counts is what the stage count brings to the join.
type Counts struct {
	Lines     int `bson:"lines"`
	Functions int `bson:"functions"`
}

// Facts is what the join makes of the parts, and the document that is kept.
type Facts struct {
	File      `bson:",inline"`
	Lines     int      `bson:"lines"`
	Functions int      `bson:"functions"`
	Longest   Function `bson:"longest"`
}

// Function is a function declaration by its length.
type Function struct {
	Name  string `bson:"name"`
	Lines int    `bson:"lines"`
}

// walk finds the Go files under src.
func walk(src string, std map[string]int) ([]File, error) {
	var files []File
	err := filepath.WalkDir(src, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || !strings.HasSuffix(name, ".go") {
			return err
		}
		rel, err := filepath.Rel(src, name)
		if err != nil {
			return err
		}
		f := File{Path: filepath.ToSlash(rel)}
		f.Package = path.Dir(f.Path)
		_, f.Std = std[f.Package]
		files = append(files, f)
		return nil
	})
	return files, err
}

// outline lists what is in a file. Its error is a syntax error.
func outline(s Source) (Outline, error) {
	o := Outline{File: s.File, Lines: bytes.Count(s.Text, []byte("\n"))}
	if n := len(s.Text); n > 0 && s.Text[n-1] != '\n' {
		o.Lines++
	}
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, s.Path, s.Text, parser.SkipObjectResolution)
	if err != nil {
		return o, err
	}
	for _, decl := range tree.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok {
			// Not by Position: //line comments would change the count.
			lines := set.PositionFor(f.End(), false).Line - set.PositionFor(f.Pos(), false).Line + 1
			o.Functions = append(o.Functions, Function{Name: nameOf(f), Lines: lines})
		}
	}
	return o, nil
}

// longest is the first of the longest functions.
func longest(o Outline) Function {
	var most Function
	for _, f := range o.Functions {
		if f.Lines > most.Lines {
			most = f
		}
	}
	return most
}

// analyse is all the work on a file at once, for the plain walk.
func analyse(s Source) (Facts, error) {
	o, err := outline(s)
	return Facts{File: s.File, Lines: o.Lines, Functions: len(o.Functions), Longest: longest(o)}, err
}

// nameOf is a function's name, with its receiver's type before it.
func nameOf(f *ast.FuncDecl) string {
	if f.Recv == nil || len(f.Recv.List) == 0 {
		return f.Name.Name
	}
	recv := f.Recv.List[0].Type
	for {
		switch t := recv.(type) {
		case *ast.StarExpr:
			recv = t.X
		case *ast.IndexExpr:
			recv = t.X
		case *ast.IndexListExpr:
			recv = t.X
		case *ast.ParenExpr:
			recv = t.X
		case *ast.Ident:
			return t.Name + "." + f.Name.Name
		default:
			return f.Name.Name
		}
	}
}
