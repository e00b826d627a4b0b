// Package task is what measured processes do: ours, the plain approach, River and asynq. The npm peers have their own,
// in package node.
package task

import (
	"fmt"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
)

// The tasks, by system. Those that prepare are never measured.
//
//	prepare   makes the schema
//	fill      stores jobs
//	history   stores finished jobs
//	forget    has them be forgotten
//	left      counts the jobs that are not done
//	drain     handles jobs by a pool or by consumers
//	push      calls push, each goroutine one call after the other
//	pushmany  the same by batches
//	reserve   calls reserve and commit, each goroutine one after the other
//	produce   pushes at a pace
//	consume   handles what is produced, and times how late it starts
//	feed      pushes as fast as the bench allows
//	pipeline  takes jobs through three stages that do nothing
//	idle      waits on an empty queue, and counts the calls to the server
var tasks = map[string]map[string]child.Task{
	"mongoq": {
		"fill": oursFill, "history": oursHistory, "forget": oursForget, "left": oursLeft, "drain": oursDrain, "push": oursPush,
		"pushmany": oursPushMany, "reserve": oursReserve, "produce": oursProduce, "consume": oursConsume, "feed": oursFeed,
		"idle": oursIdle, "pipeline": oursPipeline,
	},
	"plain": {
		"fill": plainFill, "left": plainLeft, "drain": plainReserve, "push": plainPush, "pushmany": plainPushMany,
		"reserve": plainReserve,
	},
	"river": {
		"prepare": riverPrepare, "fill": riverFill, "left": riverLeft, "drain": riverDrain, "produce": riverProduce,
		"consume": riverConsume,
	},
	"asynq": {
		"fill": asynqFill, "left": asynqLeft, "drain": asynqDrain, "produce": asynqProduce, "consume": asynqConsume,
	},
}

// Find gives the task that a process is told to do.
func Find(spec child.Spec) (child.Task, error) {
	t := tasks[spec.System][spec.Task]
	if t == nil {
		return nil, fmt.Errorf("there is no task %q of %q", spec.Task, spec.System)
	}
	return t, nil
}
