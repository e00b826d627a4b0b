//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package mongotest

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
)

func supported() error {
	return fmt.Errorf("mongotest cannot start a mongod on %s: start one yourself and set MONGODB_URI", runtime.GOOS)
}

func ownGroup() *syscall.SysProcAttr { return nil }

func suspend(*os.Process) error { return supported() }
func proceed(*os.Process) error { return supported() }

func illegalInstruction(*os.ProcessState) bool { return false }

func tryLock(*os.File) (bool, error) { return false, supported() }
