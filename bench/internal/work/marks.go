package work

import "time"

// marks are how many jobs were done at which times.
type marks struct {
	window time.Duration // that first and last look at
	at     []time.Duration
	done   []int
}

func (m *marks) add(at time.Duration, done int) {
	m.at = append(m.at, at)
	m.done = append(m.done, done)
}

// rate is that between two marks, in jobs a second.
func (m *marks) rate(from, to int) float64 {
	span := m.at[to] - m.at[from]
	if span <= 0 {
		return 0
	}
	return float64(m.done[to]-m.done[from]) / span.Seconds()
}

// first is the rate of the first window.
func (m *marks) first() float64 {
	to := 0
	for to < len(m.at)-1 && m.at[to] < m.window {
		to++
	}
	return m.rate(0, to)
}

// last is the rate of the last window.
func (m *marks) last() float64 {
	end := len(m.at) - 1
	from := end
	for from > 0 && m.at[end]-m.at[from] < m.window {
		from--
	}
	return m.rate(from, end)
}

// all is the rate of the whole.
func (m *marks) all() float64 { return m.rate(0, len(m.at)-1) }
