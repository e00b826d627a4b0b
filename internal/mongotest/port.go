package mongotest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

const loopback = "127.0.0.1"

// freePort picks a port nobody listens on. It stays below the range that
// systems hand out to outgoing connections (32768 on Linux, 49152 elsewhere), so
// that a killed node finds its port still free when it is restarted.
func freePort() (int, error) {
	var last error
	for range 100 {
		port := 20000 + rand.IntN(12000)
		l, err := net.Listen("tcp4", address(port))
		if err != nil {
			last = err
			continue
		}
		if err := l.Close(); err != nil {
			return 0, fmt.Errorf("releasing port %d: %w", port, err)
		}
		return port, nil
	}
	return 0, errors.Join(errors.New("no free port between 20000 and 32000 on "+loopback), last)
}

func address(port int) string { return net.JoinHostPort(loopback, strconv.Itoa(port)) }
