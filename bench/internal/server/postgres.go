package server

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-de459a48/mongoq/bench/internal/proc"
)

type postgres struct {
	leash   *leash
	uri     string
	version string
}

// FindPostgres gives the folder of PostgreSQL's programs: that of the PATH, else the newest that Debian's packages have
// put aside; "" if there is none.
func FindPostgres() string {
	if path, err := exec.LookPath("postgres"); err == nil && hasPostgres(filepath.Dir(path)) {
		return filepath.Dir(path)
	}
	dirs, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	return newest(dirs, hasPostgres)
}

func hasPostgres(dir string) bool {
	for _, program := range []string{"initdb", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, program)); err != nil {
			return false
		}
	}
	return true
}

// newest is the folder <version>/bin of the highest version that is usable.
func newest(dirs []string, usable func(string) bool) string {
	best, bestVersion := "", -1.0
	for _, dir := range dirs {
		v, err := strconv.ParseFloat(filepath.Base(filepath.Dir(dir)), 64)
		if err == nil && v > bestVersion && usable(dir) {
			best, bestVersion = dir, v
		}
	}
	return best
}

// StartPostgres starts a new cluster with PostgreSQL's default durability: fsync and synchronous_commit are on.
func StartPostgres(ctx context.Context) (_ Server, err error) {
	bin := FindPostgres()
	if bin == "" {
		return nil, fmt.Errorf("postgres: %w", exec.ErrNotFound)
	}
	account, err := unprivileged()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "mongoq-bench-postgres-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	if account != nil {
		if err := os.Chown(dir, int(account.Uid), int(account.Gid)); err != nil {
			return nil, err
		}
	}
	data := filepath.Join(dir, "data")
	initdb := exec.CommandContext(ctx, filepath.Join(bin, "initdb"),
		"-D", data, "-U", "bench", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	initdb.Dir = dir
	initdb.SysProcAttr = &syscall.SysProcAttr{Credential: account}
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p := &postgres{uri: fmt.Sprintf("postgres://bench@127.0.0.1:%d/postgres?sslmode=disable", port)}
	p.leash, err = hold(dir, "QUIT", account, filepath.Join(bin, "postgres"), "-D", data, "-p", strconv.Itoa(port),
		"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
		"-c", fmt.Sprintf("shared_buffers=%dMB", CacheMB))
	if err != nil {
		return nil, err
	}
	err = poll(ctx, func() error {
		return p.do(ctx, func(conn *pgx.Conn) error {
			return conn.QueryRow(ctx, "SHOW server_version").Scan(&p.version)
		})
	})
	if err != nil {
		err = fmt.Errorf("postgres: %w\n%s", err, p.leash.logged())
		p.leash.stop()
		return nil, err
	}
	p.version, _, _ = strings.Cut("PostgreSQL "+p.version, " (")
	return p, nil
}

// unprivileged is the account to run PostgreSQL as: nil is one's own, which must not be root.
func unprivileged() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errUID := strconv.ParseUint(u.Uid, 10, 32)
		gid, errGID := strconv.ParseUint(u.Gid, 10, 32)
		if errUID == nil && errGID == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errNoAccount
}

func (p *postgres) URI() string           { return p.uri }
func (p *postgres) Version() string       { return p.version }
func (p *postgres) CPU() (float64, error) { return proc.TreeCPU(p.leash.pid) }
func (p *postgres) Stop()                 { p.leash.stop() }

// Settle gives the planner its statistics, as autovacuum would soon, and writes a checkpoint.
func (p *postgres) Settle(ctx context.Context) error {
	return p.do(ctx, func(conn *pgx.Conn) error {
		for _, sql := range []string{"VACUUM ANALYZE", "CHECKPOINT"} {
			if _, err := conn.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
}

func (p *postgres) do(ctx context.Context, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, p.uri)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	return f(conn)
}
