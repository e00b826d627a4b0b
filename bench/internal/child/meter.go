package child

import (
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"syscall"
	"time"
)

// Meter measures this process from "go" on.
type Meter struct {
	start   time.Time
	cpu     float64
	allocs  uint64
	profile *os.File
	over    func() // tells that all that is measured has been done
}

func newMeter(profile string, over func()) (*Meter, error) {
	m := &Meter{over: over}
	if profile != "" {
		file, err := os.Create(profile)
		if err != nil {
			return nil, fmt.Errorf("profile: %w", err)
		}
		if err := pprof.StartCPUProfile(file); err != nil {
			return nil, fmt.Errorf("profile: %w", err)
		}
		m.profile = file
	}
	m.allocs, m.cpu, m.start = mallocs(), cpuSeconds(), time.Now()
	return m, nil
}

// Start is when the word came.
func (m *Meter) Start() time.Time { return m.start }

// Stop ends the measuring; timed may be nil.
func (m *Meter) Stop(jobs int, timed *Timings) Report {
	r := Report{Jobs: jobs, Start: m.start.UnixNano(), End: m.start.Add(time.Since(m.start)).UnixNano()}
	r.CPU, r.Allocs = cpuSeconds()-m.cpu, mallocs()-m.allocs
	m.over()
	if m.profile != nil {
		pprof.StopCPUProfile()
		m.profile.Close()
	}
	timed.fill(&r)
	return r
}

func cpuSeconds() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

func mallocs() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}
