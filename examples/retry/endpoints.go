package main

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// healsAfter is how long /flaky is ill.
	healsAfter = 800 * time.Millisecond
	// opensAfter is how long /closed is closed.
	opensAfter = 500 * time.Millisecond
)

// serveEndpoints starts the endpoints on a free port of the loopback address.
func serveEndpoints() (base string, stop func(), err error) {
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	// until answers with code for a while, counted from the first request.
	until := func(d time.Duration, code int) http.HandlerFunc {
		first := sync.OnceValue(time.Now)
		return func(w http.ResponseWriter, _ *http.Request) {
			if time.Since(first()) < d {
				w.WriteHeader(code)
			}
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/flaky", until(healsAfter, http.StatusServiceUnavailable))
	mux.HandleFunc("/closed", until(opensAfter, http.StatusTooEarly))
	mux.HandleFunc("/broken", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	mux.HandleFunc("/gone", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusGone) })
	busy := make(chan struct{}, 1)
	busy <- struct{}{}
	mux.HandleFunc("/busy", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-busy: // the first time only
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
		default:
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	return "http://" + listener.Addr().String(), func() { _ = server.Close() }, nil
}
