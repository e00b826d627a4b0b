package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
)

// childVariable tells a process that it is a worker of another one, and for what.
const childVariable = "MONGOQ_ETL_WORKER"

// childSpec is what a worker process is told.
type childSpec struct {
	URI     string `json:"uri"`
	DB      string `json:"db"`
	Src     string `json:"src"`
	Workers int    `json:"workers"`
}

// processes is how many worker processes run at once, under -kill.
const processes = 3

// runKilled has the stages run in processes that are killed at random, until they are empty.
func (p *pipeline) runKilled(ctx context.Context, files []File, spec childSpec, out io.Writer) error {
	if err := p.push(ctx, files); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	killed := make(chan int, processes)
	errs := make(chan error, processes)
	for range processes {
		go func() {
			n, err := killAgainAndAgain(ctx, spec)
			killed <- n
			errs <- err
			if err != nil {
				stop()
			}
		}()
	}
	_, err := p.watch(ctx, out)
	stop()
	kills := 0
	for range processes {
		kills += <-killed
		err = errors.Join(err, <-errs)
	}
	if err == nil {
		fmt.Fprintf(out, "%d worker processes were killed in %.1f s\n", kills, time.Since(p.began).Seconds())
	}
	return err
}

// killAgainAndAgain starts a worker process, kills it after a while and starts another, until ctx ends. It says how many
// it killed. The while counts from when the process works, and grows: on a slow machine, too, there comes a process that
// lives long enough for the largest file, before that has been delivered so often that it is a dead letter.
func killAgainAndAgain(ctx context.Context, spec childSpec) (int, error) {
	told, err := json.Marshal(spec)
	if err != nil {
		return 0, err
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	for kills := 0; ; kills++ {
		cmd := exec.Command(self) //nolint:noctx // it is killed below
		cmd.Env = append(os.Environ(), childVariable+"="+string(told))
		cmd.Stderr = os.Stderr
		stdin, err := cmd.StdinPipe() // closes when this process ends, however it does
		if err != nil {
			return kills, err
		}
		stdout, err := cmd.StdoutPipe() // it closes its own when it works
		if err != nil {
			return kills, err
		}
		if err := cmd.Start(); err != nil {
			return kills, err
		}
		_, _ = io.Copy(io.Discard, stdout)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		life := 500*time.Millisecond + rand.N(2*time.Second)
		t := time.NewTimer(life + life*time.Duration(kills)/20)
		select {
		case <-t.C:
			_ = cmd.Process.Kill()
			if err := <-ended; err == nil {
				return kills, errors.New("a worker process ended by itself")
			}
		case <-ctx.Done(): // the work is over: let it end in order
			t.Stop()
			_ = stdin.Close()
			return kills, <-ended
		case err := <-ended:
			t.Stop()
			return kills, fmt.Errorf("a worker process ended by itself: %w", err)
		}
	}
}

// work is what a worker process does: all stages, until its standard input ends.
func work(told string) error {
	var spec childSpec
	if err := json.Unmarshal([]byte(told), &spec); err != nil {
		return err
	}
	// Ctrl-C goes to all processes of the terminal: the one that started this one ends it.
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	client, err := mongo.Connect(options.Client().ApplyURI(spec.URI))
	if err != nil {
		return err
	}
	db := client.Database(spec.DB)
	store, err := mongoq.Open(ctx, db, mongoq.Config{})
	if ctx.Err() != nil {
		return nil // told to end before it began
	}
	if err != nil {
		return err
	}
	defer closeStore(store)
	p, err := newPipeline(store, spec.Src, db.Collection("files"), spec.Workers)
	if err != nil {
		return err
	}
	_ = os.Stdout.Close() // tells the one that started this one that the work begins
	return p.Run(ctx)
}
