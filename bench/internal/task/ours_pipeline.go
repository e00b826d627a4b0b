package task

import (
	"context"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// PipelineStages are the stages of the pipeline that is measured; FullStage is one more, which nobody runs.
var PipelineStages = []string{"one", "two", "three"}

// FullStage is a stage that envelopes wait at.
const FullStage = "full"

// oursPipeline takes the jobs of the first stage through all, each by a pool that does nothing. It counts an envelope
// each time that it leaves a stage: two moves and a commit.
func oursPipeline(ctx context.Context, l *child.Link) (child.Report, error) {
	o, err := openOurs(ctx, l.Spec, mongoq.QueueConfig{})
	if err != nil {
		return child.Report{}, err
	}
	defer o.close()
	c := newCounter(l.Spec.Jobs * len(PipelineStages))
	handle := func(context.Context, *mongoq.Reservation) (mongoq.Route, error) {
		c.add()
		return mongoq.Forward(), nil
	}
	var stages []*mongoq.Stage
	for i, name := range PipelineStages {
		st := &mongoq.Stage{Name: name, Handler: handle, Worker: mongoq.WorkerConfig{Concurrency: l.Spec.Workers}}
		if i+1 < len(PipelineStages) {
			st.Next = PipelineStages[i+1]
		}
		stages = append(stages, st)
	}
	stages = append(stages, &mongoq.Stage{Name: FullStage, Handler: handle, Entry: true})
	p, err := mongoq.NewPipeline(o.store, l.Spec.Queue, stages...)
	if err != nil {
		return child.Report{}, err
	}
	m, err := l.Begin()
	if err != nil {
		return child.Report{}, err
	}
	running, cancel := c.until(ctx, l)
	defer cancel()
	err = p.Run(running, PipelineStages...)
	return c.report(m, nil), err
}
