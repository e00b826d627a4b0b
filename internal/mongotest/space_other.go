//go:build !linux

package mongotest

import "errors"

// freeSpace is needed on Linux only, where mongod can be fetched.
func freeSpace(string) (int64, error) { return 0, errors.ErrUnsupported }
