package figure

import (
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// columns of the table; the first three and the unit are words, all else numbers.
var columns = []string{
	"work", "system", "setting", "rate", "unit", "p50 ms", "p95 ms", "p99 ms",
	"client CPU s", "server CPU s", "peak RSS MiB", "runs", "spread",
}

// WriteTable writes the figures for a person to read.
func WriteTable(w io.Writer, figures []Figure) error {
	rows := [][]string{columns}
	for _, f := range figures {
		rows = append(rows, []string{
			f.Work, f.System, f.Setting, Number(f.Rate), f.Unit, number(f.P50), number(f.P95), number(f.P99),
			number(f.ClientCPU), number(f.ServerCPU), number(f.PeakRSS),
			strconv.Itoa(f.Runs), strconv.Itoa(int(math.Round(f.Spread*100))) + "%",
		})
	}
	return writeRows(w, rows, func(column int) bool { return column == 3 || column > 4 })
}

// writeRows writes rows in columns as wide as they need; the first row is the head.
func writeRows(w io.Writer, rows [][]string, right func(column int) bool) error {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	rule := make([]string, len(widths))
	for i, n := range widths {
		rule[i] = strings.Repeat("-", n)
	}
	rows = append([][]string{rows[0], rule}, rows[1:]...)
	var b strings.Builder
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if right(i) {
				line.WriteString(pad + cell + "  ")
			} else {
				line.WriteString(cell + pad + "  ")
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func number(v *float64) string {
	if v == nil {
		return "-"
	}
	return Number(*v)
}

// Count writes a whole number with thousands set apart.
func Count(n int) string { return thousands(strconv.Itoa(n)) }

// Number writes a value with as many decimals as its size makes sensible, and thousands set apart.
func Number(v float64) string {
	decimals := 0
	switch size := math.Abs(v); {
	case size == 0 || size >= 100:
	case size >= 10:
		decimals = 1
	default:
		decimals = 2
	}
	s := strconv.FormatFloat(v, 'f', decimals, 64)
	whole, rest, fraction := strings.Cut(s, ".")
	if fraction {
		rest = "." + rest
	}
	return thousands(whole) + rest
}

func thousands(digits string) string {
	sign := ""
	if strings.HasPrefix(digits, "-") {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}
