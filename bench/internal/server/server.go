// Package server starts the servers that the systems run on, each a new one with its data in a temporary folder on the
// loopback address. They end with the bench, however that ends.
package server

import (
	"context"
	"net"
	"strconv"
)

// Server is a running server.
type Server interface {
	// URI is how clients find it.
	URI() string
	// Version names the program.
	Version() string
	// CPU is the CPU time, in seconds, that all its processes have taken.
	CPU() (float64, error)
	// Settle brings what was stored to rest before something is measured.
	Settle(ctx context.Context) error
	// Stop ends it and removes its data.
	Stop()
}

// freePort gives a port of the loopback address that nobody has at the moment.
func freePort() (int, error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(port)
}
