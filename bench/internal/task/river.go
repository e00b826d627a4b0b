package task

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// riverFillBatch is how many jobs River's own benchmark inserts at once.
const riverFillBatch = 5000

// riverArgs is a job.
type riverArgs struct {
	Payload string `json:"payload"`
}

func (riverArgs) Kind() string { return "bench" }

// riverWorker calls a function for each job.
type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	work func(*river.Job[riverArgs]) error
}

func (w *riverWorker) Work(_ context.Context, job *river.Job[riverArgs]) error { return w.work(job) }

// openRiver gives a pool of connections, of pgx's default size as in River's own command, and a client. Without
// queues in cfg the client only inserts.
func openRiver(ctx context.Context, spec child.Spec, cfg river.Config, work func(*river.Job[riverArgs]) error) (*pgxpool.Pool, *river.Client[pgx.Tx], error) {
	pool, err := pgxpool.New(ctx, spec.URI)
	if err != nil {
		return nil, nil, err
	}
	cfg.Logger = slog.New(slog.DiscardHandler)
	if work != nil {
		cfg.Workers = river.NewWorkers()
		river.AddWorker(cfg.Workers, &riverWorker{work: work})
	}
	client, err := river.NewClient(riverpgxv5.New(pool), &cfg)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, client, nil
}

// riverPrepare makes River's tables.
func riverPrepare(ctx context.Context, l *child.Link) (child.Report, error) {
	pool, err := pgxpool.New(ctx, l.Spec.URI)
	if err != nil {
		return child.Report{}, err
	}
	defer pool.Close()
	quiet := slog.New(slog.DiscardHandler)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return child.Report{}, err
	}
	return unmeasured(l, 0, func() error {
		_, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		return err
	})
}

func riverFill(ctx context.Context, l *child.Link) (child.Report, error) {
	pool, client, err := openRiver(ctx, l.Spec, river.Config{}, nil)
	if err != nil {
		return child.Report{}, err
	}
	defer pool.Close()
	return unmeasured(l, l.Spec.Jobs, func() error {
		for _, cut := range batches(l.Spec.Jobs, riverFillBatch) {
			params := make([]river.InsertManyParams, 0, riverFillBatch)
			for n := cut[0]; n < cut[1]; n++ {
				params = append(params, river.InsertManyParams{Args: riverArgs{Payload: payload(n)}})
			}
			if _, err := client.InsertManyFast(ctx, params); err != nil {
				return err
			}
		}
		return nil
	})
}

func riverLeft(ctx context.Context, l *child.Link) (child.Report, error) {
	pool, err := pgxpool.New(ctx, l.Spec.URI)
	if err != nil {
		return child.Report{}, err
	}
	defer pool.Close()
	var n int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM river_job WHERE state <> 'completed'").Scan(&n); err != nil {
		return child.Report{}, err
	}
	return unmeasured(l, n, func() error { return nil })
}

// riverDrain works jobs with the settings of River's own benchmark (`river bench`), and counts as it does: by the
// events of jobs whose completion is stored.
func riverDrain(ctx context.Context, l *child.Link) (child.Report, error) {
	pool, client, err := openRiver(ctx, l.Spec, river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: l.Spec.Workers}},
	}, func(*river.Job[riverArgs]) error { return nil })
	if err != nil {
		return child.Report{}, err
	}
	defer pool.Close()
	events, cancelEvents := client.SubscribeConfig(&river.SubscribeConfig{
		ChanSize: l.Spec.Jobs + 1,
		Kinds:    []river.EventKind{river.EventKindJobCancelled, river.EventKindJobCompleted, river.EventKindJobFailed},
	})
	defer cancelEvents()
	if err := pool.Ping(ctx); err != nil { // it connects
		return child.Report{}, err
	}
	c := newCounter(l.Spec.Jobs)
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	running, cancel := c.until(ctx, l)
	defer cancel()
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return child.Report{}, err
	}
	for running.Err() == nil {
		select {
		case e := <-events:
			if e.Kind != river.EventKindJobCompleted {
				return child.Report{}, fmt.Errorf("job %d: %s", e.Job.ID, e.Kind)
			}
			c.add()
		case <-running.Done():
		}
	}
	report := c.report(m, nil)
	stop(client.Stop)
	return report, nil
}

// stop ends a client, and gives up after a while: nothing measured comes after it.
func stop(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = f(ctx)
}
