package child

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// conversation runs a task and gives the bench's ends of it.
type conversation struct {
	t     *testing.T
	in    *io.PipeWriter
	out   *bufio.Scanner
	ended chan error
}

func converse(t *testing.T, spec string, task Task) *conversation {
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	c := &conversation{t: t, in: inW, out: bufio.NewScanner(outR), ended: make(chan error, 1)}
	go func() {
		c.ended <- Serve(inR, outW, func(Spec) (Task, error) { return task, nil })
		outW.Close()
	}()
	c.tell(spec)
	return c
}

func (c *conversation) tell(line string) {
	_, err := io.WriteString(c.in, line+"\n")
	require.NoError(c.t, err)
}

func (c *conversation) hear() Message {
	require.True(c.t, c.out.Scan())
	var m Message
	require.NoError(c.t, json.Unmarshal(c.out.Bytes(), &m))
	return m
}

func TestATaskIsReadyAndThenMeasured(t *testing.T) {
	t.Parallel()
	c := converse(t, `{"system":"plain","task":"push","workers":3}`, func(_ context.Context, l *Link) (Report, error) {
		m, err := l.Begin()
		if err != nil {
			return Report{}, err
		}
		l.Count(2)
		return m.Stop(l.Spec.Workers, nil), nil
	})
	require.Equal(t, Message{Event: "ready"}, c.hear())
	c.tell("go")
	require.Equal(t, Message{Event: "count", Count: 2}, c.hear())
	require.Equal(t, Message{Event: "over"}, c.hear())
	done := c.hear()
	require.Equal(t, "done", done.Event)
	require.Equal(t, 3, done.Report.Jobs)
	require.GreaterOrEqual(t, done.Report.End, done.Report.Start)
	c.in.Close()
	require.NoError(t, <-c.ended)
}

func TestATaskIsStoppedAndAllowedMore(t *testing.T) {
	t.Parallel()
	c := converse(t, `{}`, func(ctx context.Context, l *Link) (Report, error) {
		m, err := l.Begin()
		if err != nil {
			return Report{}, err
		}
		if err := l.Allowed(ctx, 4); err != nil {
			return Report{}, err
		}
		l.Count(5)
		err = l.Allowed(ctx, 5)
		if !errors.Is(err, context.Canceled) {
			return Report{}, errors.New("not stopped")
		}
		return m.Stop(5, nil), nil
	})
	require.Equal(t, "ready", c.hear().Event)
	c.tell("go")
	c.tell("allow 4")
	c.tell("allow nonsense")
	c.tell("allow 5")
	require.Equal(t, Message{Event: "count", Count: 5}, c.hear())
	c.tell("stop")
	require.Equal(t, "over", c.hear().Event)
	require.Equal(t, "done", c.hear().Event)
	c.in.Close()
	require.NoError(t, <-c.ended)
}

func TestATaskThatFailsSaysWhy(t *testing.T) {
	t.Parallel()
	c := converse(t, `{}`, func(context.Context, *Link) (Report, error) { return Report{}, errors.New("no server") })
	require.Equal(t, Message{Event: "error", Error: "no server"}, c.hear())
	require.EqualError(t, <-c.ended, "no server")
}

func TestTheTimeToHandledIsThatToTheEndUnlessItIsKnown(t *testing.T) {
	t.Parallel()
	require.EqualValues(t, 30, Report{Start: 10, End: 40}.ToHandled())
	require.EqualValues(t, 20, Report{Start: 10, Handled: 30, End: 40}.ToHandled())
	require.EqualValues(t, 30, Report{Start: 10, Handled: 30, End: 40}.Elapsed())
}
