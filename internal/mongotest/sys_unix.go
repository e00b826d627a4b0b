//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package mongotest

import (
	"errors"
	"os"
	"syscall"
)

// supported says why no server can be started here; nil where it can.
func supported() error { return nil }

// ownGroup puts a child in a process group of its own, so that Ctrl-C in a
// terminal reaches the program, which may still want its database to drain, and
// not the child.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func suspend(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func proceed(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// illegalInstruction reports whether a process died because its CPU lacks an
// instruction.
func illegalInstruction(s *os.ProcessState) bool {
	ws, ok := s.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGILL
}

// tryLock takes the lock of an open file without waiting. The system releases
// it when the file is closed, thus also when the process dies.
func tryLock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
		return false, nil
	}
	return err == nil, err
}
