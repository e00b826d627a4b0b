package work

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-de459a48/mongoq/bench/internal/child"
	"github.com/seed-de459a48/mongoq/bench/internal/figure"
	"github.com/seed-de459a48/mongoq/bench/internal/system"
)

const (
	// singleJobs is more than one goroutine does in the time.
	singleJobs = 10_000
	// manyClaims leave as many dead entries in the indexes, which the server keeps for five minutes.
	manyClaims = 200_000
	// claimsWithin is how soon a consumer must come after them to be slowed by them.
	claimsWithin = 3 * time.Minute
)

// singleTrials: one goroutine that makes one call at a time, as a program does that has little to do.
func singleTrials(e *Env) []trial {
	push := child.Spec{Task: "push", Workers: 1, Jobs: endless, Limit: e.lasting(6 * time.Second)}
	reserve := child.Spec{Task: "reserve", Workers: 1, Jobs: e.jobs(singleJobs), Limit: e.lasting(8 * time.Second)}
	var trials []trial
	for _, sys := range e.choose(system.Ours, "plain") {
		trials = append(trials, callsTrial(e, sys, "push", 0, push))
	}
	for _, sys := range e.choose(system.Ours, "plain") {
		trials = append(trials, callsTrial(e, sys, "reserve+commit", reserve.Jobs, reserve))
	}
	return append(trials, afterClaims(e, e.ours(), reserve))
}

// afterClaims is the same after a pool has claimed and committed many.
func afterClaims(e *Env, sys system.System, reserve child.Spec) trial {
	const setting = "after 200,000 claims"
	return trial{sys, setting, func(ctx context.Context) ([]figure.Sample, error) {
		s, err := e.open(ctx, sys)
		if err != nil {
			return nil, err
		}
		defer s.close()
		jobs := e.jobs(manyClaims)
		if err := s.fill(ctx, child.Spec{Jobs: jobs}); err != nil {
			return nil, err
		}
		began := time.Now()
		if _, err := s.do(ctx, child.Spec{Task: "drain", Workers: poolWorkers, Jobs: jobs}); err != nil {
			return nil, err
		}
		samples, err := s.calls(ctx, setting, reserve.Jobs, reserve)
		if took := time.Since(began); err == nil && took > claimsWithin {
			samples[0].Note = fmt.Sprintf("the claims and the measurement took %v, which should be within %v", took.Round(time.Second), claimsWithin)
		}
		return samples, err
	}}
}
