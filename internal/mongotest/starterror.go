package mongotest

import (
	"errors"
	"fmt"
	"strings"
)

// errPortTaken is returned when someone else bound the port first.
var errPortTaken = errors.New("port taken")

// startError says why a mongod that should be running has ended, and what to do
// where the cause is known.
func (p *process) startError() error {
	log := p.log()
	var hint string
	switch {
	case strings.Contains(log, "Address already in use"):
		return fmt.Errorf("mongod (pid %d): %w%s", p.pid(), errPortTaken, p.tail())
	case strings.Contains(log, "error while loading shared libraries"):
		hint = "a shared library is missing: install it (MongoDB 6.0.5 for Ubuntu 22.04 and Debian 12: apt-get install libssl3 libcurl4)"
	case strings.Contains(log, "GLIBC_") || strings.Contains(log, "GLIBCXX_"):
		hint = "the C library here is too old for this mongod (it wants Ubuntu 22.04, Debian 12 or later)"
	case strings.Contains(log, "not found") && p.exitCode() == 127:
		hint = "the system cannot load this program (MongoDB's builds need glibc, which Alpine Linux does not have)"
	case illegalInstruction(p.cmd.ProcessState):
		hint = "the CPU lacks an instruction: MongoDB 5.0 and later need AVX"
	case strings.Contains(log, "No space left on device"):
		hint = "the disk is full: free some, or set TMPDIR to a folder that has room"
	}
	err := fmt.Errorf("mongod %s ended with %w%s", p.cmd.Args[4], p.endedWith(), p.tail())
	if hint == "" {
		return err
	}
	return fmt.Errorf("%w\n%s; or put another mongod on the PATH, or set MONGODB_URI to a server you have", err, hint)
}

func (p *process) exitCode() int { return p.cmd.ProcessState.ExitCode() }

func (p *process) endedWith() error {
	if p.err == nil {
		return errors.New("exit status 0")
	}
	return p.err
}
