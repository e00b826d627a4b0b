package mongoq

import (
	"bytes"
	"context"
	"slices"
)

// CommitMany commits many reservations; those that were claimed together go in one statement. Each has its own, exact
// outcome: a *BatchError says which failed and why, by their place in rs.
// The rule: rs is not empty and holds no nil.
func (q *Queue) CommitMany(ctx context.Context, rs []*Reservation) error {
	if len(rs) == 0 {
		return invalid("CommitMany needs at least one reservation, got none")
	}
	for i, r := range rs {
		if r == nil {
			return invalid("CommitMany needs reservations, got nil at %d", i)
		}
	}
	errs := make([]error, len(rs))
	if inSession(ctx) {
		for i, r := range rs {
			errs[i] = r.Commit(ctx)
		}
		return batchError(errs)
	}
	place := make(map[*Reservation]int, len(rs))
	var members []*Reservation
	for i, r := range rs {
		if _, twice := place[r]; twice {
			errs[i] = ErrLeaseLost // the second commit of one reservation
			continue
		}
		place[r] = i
		members = append(members, r)
	}
	members, unlock := lockAll(ctx, members, func(r *Reservation, err error) { errs[place[r]] = err })
	defer unlock()
	for len(members) > 0 {
		n := min(len(members), settleRound)
		q.s.commitRound(ctx, members[:n], func(r *Reservation, err error) { errs[place[r]] = err })
		members = members[n:]
	}
	return batchError(errs)
}

// lockAll locks reservations in one order, whoever does it, and gives those that it got while the context lasted.
func lockAll(ctx context.Context, rs []*Reservation, tell func(*Reservation, error)) (got []*Reservation, unlock func()) {
	ordered := slices.Clone(rs)
	slices.SortFunc(ordered, func(a, b *Reservation) int {
		if c := bytes.Compare(a.ID[:], b.ID[:]); c != 0 {
			return c
		}
		return bytes.Compare(a.lease[:], b.lease[:])
	})
	for _, r := range ordered {
		if err := r.mu.lock(ctx); err != nil {
			tell(r, err)
			continue
		}
		got = append(got, r)
	}
	return got, func() {
		for _, r := range got {
			r.mu.unlock()
		}
	}
}

// commitRound commits many in one round. Their locks are held.
func (s *Store) commitRound(ctx context.Context, rs []*Reservation, tell func(*Reservation, error)) {
	var calls []*call[*settlement]
	for _, r := range rs {
		if r.settled {
			tell(r, ErrLeaseLost)
			continue
		}
		v := r.committing(commitSettings{})
		v.tried, v.joined = r.tried[verbCommit], r.joined
		calls = append(calls, &call[*settlement]{item: v, answer: make(chan error, 1)})
	}
	if err := ctx.Err(); err != nil {
		for _, c := range calls {
			tell(c.item.r, err)
		}
		return
	}
	go s.settleRound(calls)
	for _, c := range calls {
		r := c.item.r
		err := c.await(ctx)
		r.note(verbCommit, err)
		tell(r, err)
	}
}
