package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// The kinds of a ledger's entries.
const (
	noteStart   = "start"   // a process begins
	noteEnd     = "end"     // it ends as told
	notePush    = "push"    // a push is about to be sent
	notePushed  = "pushed"  // what became of it
	noteClaim   = "claim"   // a consumer has an envelope: an attempt at it begins
	noteEffect  = "effect"  // the work of an attempt was done
	noteJoined  = "joined"  // the parts that a join has brought together
	noteAsk     = "ask"     // a verb is about to be sent
	noteAnswer  = "answer"  // what became of it
	noteFault   = "fault"   // the conductor does something evil
	noteHealed  = "healed"  // and has undone it
	noteRedrive = "redrive" // dead letters were brought back
	notePop     = "pop"     // somebody waits to pop
	notePopped  = "popped"  // and has got something, or nothing
	noteReplay  = "replay"  // what was done is about to be pushed again
	noteAgain   = "again"   // what became of that
	notePaused  = "paused"  // a queue is paused
	noteResumed = "resumed" // and goes on
	noteTrouble = "trouble" // something that nothing here expects
)

// What became of a push or a verb.
const (
	resultOK      = "ok"
	resultLost    = "lost"    // ErrLeaseLost
	resultUnknown = "unknown" // ErrOutcomeUnknown
	resultRefused = "refused" // any other error: it did not happen
)

// An entry is a line of a ledger.
type entry struct {
	At   int64  `json:"t"` // ns since 1970, by the clock of the machine that all processes share
	What string `json:"e"`
	Proc string `json:"-"` // the file's

	Key  string `json:"k,omitempty"`  // of a job: its payload carries it
	ID   string `json:"id,omitempty"` // of its envelope
	Q    string `json:"q,omitempty"`
	Part *part  `json:"part,omitempty"`

	Try        int64 `json:"a,omitempty"` // an attempt's number, in its process
	Deliveries int   `json:"d,omitempty"`
	Retries    int   `json:"r,omitempty"`
	Moves      int   `json:"m,omitempty"`
	Reserved   int64 `json:"res,omitempty"` // of a claim, in ms since 1970 by the server's clock
	Until      int64 `json:"til,omitempty"` // the end of its lease, likewise
	Mended     bool  `json:"mended,omitempty"`

	Verb   string `json:"v,omitempty"`
	To     string `json:"to,omitempty"`
	Result string `json:"o,omitempty"`
	Err    string `json:"err,omitempty"`

	Delay  int64    `json:"delay,omitempty"` // of a push, in ns
	TTL    int64    `json:"ttl,omitempty"`   // likewise
	Replay string   `json:"rep,omitempty"`   // the id of a replay: of one that is asked for, or that the envelope came of
	Of     []string `json:"of,omitempty"`    // the finished envelopes that are done again
	Parts  []int    `json:"parts,omitempty"` // that a join has got, by index
	N      int      `json:"n,omitempty"`
	Text   string   `json:"text,omitempty"`
}

// A part names an envelope that a fork made.
type part struct {
	Of    string `json:"of"`
	Index int    `json:"i"`
	Count int    `json:"n"`
}

func (e entry) time() time.Time { return time.Unix(0, e.At) }

// A ledger is the file of one process. Each entry is one write, so that what a SIGKILL leaves behind is all that was
// written before it, and at most one torn line.
type ledger struct {
	proc string

	mu   sync.Mutex
	file *os.File
	told []entry // what this process has written, if it is kept
	keep bool
}

const ledgerSuffix = ".jsonl"

func openLedger(dir, proc string) (*ledger, error) {
	f, err := os.OpenFile(filepath.Join(dir, proc+ledgerSuffix), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	return &ledger{proc: proc, file: f}, nil
}

// write adds an entry. A ledger that cannot be written makes the run worthless, so that it ends the process.
func (l *ledger) write(e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.At = time.Now().UnixNano()
	line, err := json.Marshal(e)
	if err == nil {
		_, err = l.file.Write(append(line, '\n'))
	}
	if err != nil {
		panic(fmt.Sprintf("ledger of %s: %v", l.proc, err))
	}
	if l.keep {
		e.Proc = l.proc
		l.told = append(l.told, e)
	}
}

func (l *ledger) close() error { return l.file.Close() }

// readLedgers reads all ledgers of a folder, in the order of time.
func readLedgers(dir string) ([]entry, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*"+ledgerSuffix))
	if err != nil {
		return nil, err
	}
	var all []entry
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		entries, err := readLedger(f, strings.TrimSuffix(filepath.Base(name), ledgerSuffix))
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, entries...)
	}
	slices.SortStableFunc(all, func(a, b entry) int { return int(min(max(a.At-b.At, -1), 1)) })
	return all, nil
}

// readLedger reads one ledger. A last line without an end was torn by a kill, and counts as not written.
func readLedger(r io.Reader, proc string) ([]entry, error) {
	var entries []entry
	lines := bufio.NewReaderSize(r, 1<<16)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return entries, nil
		}
		if err != nil {
			return nil, err
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		e.Proc = proc
		entries = append(entries, e)
	}
}
