package figure

import (
	"math"
	"slices"
)

// Median is the middle value, or the mean of the two in the middle; 0 of none.
func Median(vs []float64) float64 {
	if len(vs) == 0 {
		return 0
	}
	vs = slices.Sorted(slices.Values(vs))
	mid := len(vs) / 2
	if len(vs)%2 == 1 {
		return vs[mid]
	}
	return (vs[mid-1] + vs[mid]) / 2
}

// Spread is (largest - smallest) / median; 0 where there is none.
func Spread(vs []float64) float64 {
	m := Median(vs)
	if m == 0 {
		return 0
	}
	return (slices.Max(vs) - slices.Min(vs)) / m
}

// Percentile is the smallest value that at least p percent of the values do not exceed (nearest rank). The values must
// be sorted. It is 0 of none.
func Percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// round leaves four digits that count, and no fewer than the whole number: more is noise.
func round(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	digits := max(0, 3-int(math.Floor(math.Log10(math.Abs(v)))))
	unit := math.Pow(10, float64(digits))
	return math.Round(v*unit) / unit
}
