// Package figure holds what was measured: samples of single runs, figures over all runs, the table, the JSON lines and
// the ratios that have to be reached.
package figure

import (
	"cmp"
	"encoding/json"
	"io"
	"slices"
)

// Sample is what one run of one system in one setting came to. A nil pointer was not measured.
type Sample struct {
	Work    string // "": that which was run
	Setting string
	Rate    float64
	Unit    string

	// Paced means that the work sets the rate, so that the spread is that of P99.
	Paced bool

	P50, P95, P99 *float64 // ms
	ClientCPU     *float64 // s, of all client processes
	ServerCPU     *float64 // s, of all server processes
	PeakRSS       *float64 // MiB, of the largest client process

	Note string // what a reader should know of this run
}

// Figure is one line of the table: the medians over all runs of one system in one setting, and the most of PeakRSS.
type Figure struct {
	Work      string   `json:"work"`
	System    string   `json:"system"`
	Setting   string   `json:"setting"`
	Rate      float64  `json:"rate"`
	Unit      string   `json:"unit"`
	P50       *float64 `json:"p50_ms"`
	P95       *float64 `json:"p95_ms"`
	P99       *float64 `json:"p99_ms"`
	ClientCPU *float64 `json:"client_cpu_s"`
	ServerCPU *float64 `json:"server_cpu_s"`
	PeakRSS   *float64 `json:"peak_rss_mib"`
	Runs      int      `json:"runs"`
	Spread    float64  `json:"spread"`

	rates []float64 // of each run, in their order
}

// Collect makes figures of the samples of all runs of a system, one for each work, setting and unit, in their order.
func Collect(work, system string, runs [][]Sample) []Figure {
	type key struct{ work, setting, unit string }
	var order []key
	groups := map[key][]Sample{}
	for _, run := range runs {
		for _, s := range run {
			k := key{cmp.Or(s.Work, work), s.Setting, s.Unit}
			if groups[k] == nil {
				order = append(order, k)
			}
			groups[k] = append(groups[k], s)
		}
	}
	var figures []Figure
	for _, k := range order {
		figures = append(figures, combine(k.work, system, groups[k]))
	}
	return figures
}

func combine(work, system string, samples []Sample) Figure {
	rates := make([]float64, len(samples))
	for i, s := range samples {
		rates[i] = s.Rate
	}
	f := Figure{
		Work: work, System: system, Setting: samples[0].Setting, Unit: samples[0].Unit,
		Rate: round(Median(rates)), Runs: len(samples), Spread: round(Spread(rates)),
		P50:       medianOf(samples, func(s Sample) *float64 { return s.P50 }),
		P95:       medianOf(samples, func(s Sample) *float64 { return s.P95 }),
		P99:       medianOf(samples, func(s Sample) *float64 { return s.P99 }),
		ClientCPU: medianOf(samples, func(s Sample) *float64 { return s.ClientCPU }),
		ServerCPU: medianOf(samples, func(s Sample) *float64 { return s.ServerCPU }),
	}
	f.rates = rates
	if rss := given(samples, func(s Sample) *float64 { return s.PeakRSS }); rss != nil {
		f.PeakRSS = new(round(slices.Max(rss))) // a peak of all runs
	}
	if samples[0].Paced {
		f.Spread = round(Spread(given(samples, func(s Sample) *float64 { return s.P99 })))
	}
	return f
}

// given are the values that were measured.
func given(samples []Sample, of func(Sample) *float64) []float64 {
	var vs []float64
	for _, s := range samples {
		if v := of(s); v != nil {
			vs = append(vs, *v)
		}
	}
	return vs
}

// medianOf is the median of what was measured, or nil.
func medianOf(samples []Sample, of func(Sample) *float64) *float64 {
	vs := given(samples, of)
	if vs == nil {
		return nil
	}
	return new(round(Median(vs)))
}

// WriteJSON writes one line per figure.
func WriteJSON(w io.Writer, figures []Figure) error {
	enc := json.NewEncoder(w)
	for _, f := range figures {
		if err := enc.Encode(f); err != nil {
			return err
		}
	}
	return nil
}
