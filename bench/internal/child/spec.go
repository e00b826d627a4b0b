// Package child is what the bench and a measured process of it say to each other, and the process's side of it.
//
// The process reads its [Spec] as one JSON line. It writes {"event":"ready"} when it is connected and warm, waits for
// the line "go", works, writes {"event":"over"} when it has done what is measured and, when it has closed what it opened,
// {"event":"done"} with its [Report]. It ends when its input does: so no measured process outlives the bench. On the way it
// may write {"event":"count"}, and may be told "stop" or "allow N". The scripts of the npm peers speak the same, but for
// "over".
package child

import "time"

// Spec is what a process is to do.
type Spec struct {
	System string `json:"system"`
	Task   string `json:"task"`

	URI     string `json:"uri"`
	Queue   string `json:"queue"`
	Queues  int    `json:"queues,omitempty"` // more than one: Queue is the beginning of their names
	Stage   string `json:"stage,omitempty"`  // of the pipeline of the name Queue: the queue is its
	Workers int    `json:"workers,omitempty"`
	Jobs    int    `json:"jobs,omitempty"`
	Batch   int    `json:"batch,omitempty"`

	// History says what becomes of finished jobs: "" (they are deleted), "ttl", or "partition".
	History string `json:"history,omitempty"`

	// Limit ends the work early; what was done by then is rated.
	Limit time.Duration `json:"limit_ns,omitempty"`

	// Unheard: no process may send signals to another, which then polls.
	Unheard bool `json:"unheard,omitempty"`

	// Durable: claims are as durable as all else.
	Durable bool `json:"durable,omitempty"`

	// Shared: others work on the same jobs, so count them aloud and go on until told to stop.
	Shared bool `json:"shared,omitempty"`

	// PerSecond is the pace of a producer, Delay how far ahead its jobs are due.
	PerSecond float64       `json:"per_second,omitempty"`
	Delay     time.Duration `json:"delay_ns,omitempty"`

	// Profile is the file for a CPU profile.
	Profile string `json:"profile,omitempty"`
}

// Report is what a process did between "go" and its end.
type Report struct {
	Jobs    int   `json:"jobs"`
	Start   int64 `json:"start_ns"`   // wall clock; all processes are on one machine
	Handled int64 `json:"handled_ns"` // when the last job was handled, though it may not yet have been settled; 0: as End
	End     int64 `json:"end_ns"`

	P50    float64 `json:"p50_ms"`
	P95    float64 `json:"p95_ms"`
	P99    float64 `json:"p99_ms"`
	Timed  int     `json:"timed"` // how many calls the percentiles are of
	CPU    float64 `json:"cpu_s"` // user and system
	Allocs uint64  `json:"allocs,omitempty"`
}

// Elapsed is the time that all of it took.
func (r Report) Elapsed() time.Duration { return time.Duration(r.End - r.Start) }

// ToHandled is the time until the last job was handled.
func (r Report) ToHandled() time.Duration {
	if r.Handled == 0 {
		return r.Elapsed()
	}
	return time.Duration(r.Handled - r.Start)
}

// Message is one line from a process.
type Message struct {
	Event  string  `json:"event"` // ready, count, over, done, error
	Count  int     `json:"count,omitempty"`
	Report *Report `json:"report,omitempty"`
	Error  string  `json:"error,omitempty"`
}
