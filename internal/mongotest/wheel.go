package mongotest

import (
	"archive/zip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// verify returns errWrongHash unless the file has the SHA-256 want, in hex.
func verify(path, want string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return fmt.Errorf("%s: %w: %s, want %s", filepath.Base(path), errWrongHash, got, want)
	}
	return nil
}

// extract writes the one member of the zip file whose path ends in suffix to path, as an
// executable, and returns when it is on disk.
func extract(archive, suffix, path string) error {
	z, err := zip.OpenReader(archive)
	if err != nil {
		return fmt.Errorf("opening %s: %w", filepath.Base(archive), err)
	}
	defer z.Close()
	for _, member := range z.File {
		if !strings.HasSuffix(member.Name, suffix) {
			continue
		}
		if err := extractMember(member, path); err != nil {
			return fmt.Errorf("extracting %s: %w", member.Name, err)
		}
		return nil
	}
	return fmt.Errorf("%s holds no %s", filepath.Base(archive), suffix)
}

func extractMember(member *zip.File, path string) error {
	r, err := member.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	if err == nil {
		err = w.Chmod(0o755) // the umask may have taken the executable bit
	}
	if err == nil {
		err = w.Sync() // before the rename, lest a crash of the machine leave a hole
	}
	if e := w.Close(); err == nil {
		err = e
	}
	return err
}
