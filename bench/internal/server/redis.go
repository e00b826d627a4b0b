package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/seed-de459a48/mongoq/bench/internal/proc"
)

type redisServer struct {
	leash   *leash
	uri     string
	version string

	appendOnly bool
}

// FindRedis gives the path of redis-server; "" if there is none.
func FindRedis() string {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return ""
	}
	return path
}

// StartRedis starts a Redis: with an append-only file that is synced each second, or without any persistence.
func StartRedis(ctx context.Context, appendOnly bool) (_ Server, err error) {
	program := FindRedis()
	if program == "" {
		return nil, fmt.Errorf("redis-server: %w", exec.ErrNotFound)
	}
	dir, err := os.MkdirTemp("", "mongoq-bench-redis-")
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	args := []string{"--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir, "--save", ""}
	if appendOnly {
		args = append(args, "--appendonly", "yes", "--appendfsync", "everysec")
	} else {
		args = append(args, "--appendonly", "no")
	}
	r := &redisServer{uri: fmt.Sprintf("127.0.0.1:%d", port), appendOnly: appendOnly}
	if r.leash, err = hold(dir, "KILL", nil, program, args...); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	client := redis.NewClient(&redis.Options{Addr: r.uri})
	defer client.Close()
	err = poll(ctx, func() error {
		info, err := client.Info(ctx, "server").Result()
		r.version = infoField(info, "redis_version")
		return err
	})
	if err != nil {
		err = fmt.Errorf("redis-server: %w\n%s", err, r.leash.logged())
		r.leash.stop()
		return nil, err
	}
	r.version = "Redis " + r.version
	return r, nil
}

// infoField reads a field of the answer to INFO.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func (r *redisServer) URI() string           { return r.uri }
func (r *redisServer) Version() string       { return r.version }
func (r *redisServer) CPU() (float64, error) { return proc.TreeCPU(r.leash.pid) }
func (r *redisServer) Stop()                 { r.leash.stop() }

// Settle rewrites the append-only file, so that Redis does not come to do that, for what was prepared, while something is
// measured.
func (r *redisServer) Settle(ctx context.Context) error {
	if !r.appendOnly {
		return nil
	}
	client := redis.NewClient(&redis.Options{Addr: r.uri})
	defer client.Close()
	if err := client.BgRewriteAOF(ctx).Err(); err != nil {
		return err
	}
	return poll(ctx, func() error {
		info, err := client.Info(ctx, "persistence").Result()
		if err == nil && (infoField(info, "aof_rewrite_in_progress") != "0" || infoField(info, "aof_rewrite_scheduled") != "0") {
			err = errors.New("the append-only file is still being rewritten")
		}
		return err
	})
}
