package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A tale makes evidence by hand, one entry a second after the other.
type tale struct{ evidence }

func newTale() *tale {
	return &tale{evidence{effects: map[string]bool{}, orders: map[string]bool{}}}
}

const origin = int64(1_800_000_000_000) // ms

func (t *tale) add(proc string, e entry) *tale {
	e.Proc = proc
	e.At = (origin + 1000*int64(len(t.entries))) * int64(time.Millisecond)
	t.entries = append(t.entries, e)
	return t
}

func (t *tale) push(key, id, q, result string) *tale {
	t.add("producer0.1", entry{What: notePush, Key: key, Q: q})
	if result == "" {
		return t
	}
	e := entry{What: notePushed, Key: key, Q: q, Result: result}
	if result == resultOK {
		e.ID = id
	}
	return t.add("producer0.1", e)
}

// claim is a delivery whose lease of half a second begins when it is noted.
func (t *tale) claim(proc, key, id, q string, deliveries int) *tale {
	at := origin + 1000*int64(len(t.entries))
	return t.add(proc, entry{
		What: noteClaim, Key: key, ID: id, Q: q, Try: int64(deliveries), Deliveries: deliveries, Retries: deliveries - 1, Reserved: at, Until: at + 500,
	})
}

func (t *tale) effect(proc string, try int64) *tale {
	return t.add(proc, entry{What: noteEffect, Try: try})
}

func (t *tale) verb(proc string, try int64, verb, result string) *tale {
	t.add(proc, entry{What: noteAsk, Try: try, Verb: verb})
	if result != "" {
		t.add(proc, entry{What: noteAnswer, Try: try, Verb: verb, Result: result})
	}
	return t
}

func (t *tale) done(proc, key, id, q string) *tale {
	return t.claim(proc, key, id, q, 1).effect(proc, 1).verb(proc, 1, verbCommit, resultOK)
}

func (t *tale) stored(d document) *tale {
	d.Text = func() string { return "" }
	t.docs = append(t.docs, d)
	return t
}

func TestCheckAcceptsWhatIsPromised(t *testing.T) {
	t.Parallel()
	for name, tale := range map[string]*tale{
		"done":             newTale().push("k", "id", qWork, resultOK).done("w", "k", "id", qWork),
		"in the history":   newTale().push("k", "id", qKept, resultOK).done("w", "k", "id", qKept).stored(document{ID: "id", Key: "k", Q: qKept, Done: true}),
		"dead":             newTale().push("k", "id", qWork, resultOK).claim("w", "k", "id", qWork, 1).verb("w", 1, verbDead, resultOK).stored(document{ID: "id", Key: "k", Q: qWork + ".dead", Dead: "explicit"}),
		"unknown, there":   newTale().push("k", "id", qWork, resultUnknown).done("w", "k", "id", qWork),
		"unknown, not so":  newTale().push("k", "id", qWork, resultUnknown),
		"nobody said":      newTale().push("k", "id", qWork, ""),
		"refused":          newTale().push("k", "id", qWork, resultRefused),
		"committer killed": newTale().push("k", "id", qWork, resultOK).claim("w", "k", "id", qWork, 1).effect("w", 1).verb("w", 1, verbCommit, "").add("conductor", entry{What: noteFault, Verb: faultKill, To: "w"}),
		"lease lost, then done": newTale().push("k", "id", qWork, resultOK).claim("a", "k", "id", qWork, 1).effect("a", 1).
			claim("b", "k", "id", qWork, 2).effect("b", 2).verb("b", 2, verbCommit, resultOK).verb("a", 1, verbCommit, resultLost),
		"killed in the moment of its effect": newTale().push("k", "id", qWork, resultOK).claim("a", "k", "id", qWork, 1).
			add("conductor", entry{What: noteFault, Verb: faultKill, To: "a"}).effect("a", 1).
			claim("b", "k", "id", qWork, 2).effect("b", 2).verb("b", 2, verbCommit, resultOK),
		"gone with its deadline": newTale().mortal(qFleet),
		"dead of its deadline":   newTale().mortal(qBrief).stored(expiredAfter(2 * time.Second)),
		"popped by who was killed": newTale().push("k", "id", qPop, resultOK).add("w", entry{What: notePop, Try: 1}).
			add("conductor", entry{What: noteFault, Verb: faultKill, To: "w"}),
		"replayed":             newTale().replayed(resultOK, 2).again("x", "a").again("y", "b"),
		"a replay that failed": newTale().replayed(resultUnknown, 1).again("x", "a"),
		"a claim that a failover undid": newTale().push("k", "id", qWork, resultOK).claim("a", "k", "id", qWork, 1).
			add("conductor", entry{What: noteFault, Verb: faultCrash}).claim("b", "k", "id", qWork, 1).
			effect("b", 1).verb("b", 1, verbCommit, resultOK),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fig, bad := check(tale.evidence)
			require.Empty(t, bad)
			require.Zero(t, fig.Losses)
		})
	}
}

func TestCheckComplains(t *testing.T) {
	t.Parallel()
	pushed := func(q string) *tale { return newTale().push("k", "id", q, resultOK) }
	twice := func() *tale { return pushed(qWork).claim("a", "k", "id", qWork, 1).claim("b", "k", "id", qWork, 2) }
	for name, c := range map[string]struct {
		tale *tale
		rule string
	}{
		"a lost id":                          {pushed(qWork), ""},
		"a lost id that was delivered":       {pushed(qWork).claim("a", "k", "id", qWork, 1).verb("a", 1, verbCommit, resultLost), ruleLost},
		"a commit that was refused":          {pushed(qWork).claim("a", "k", "id", qWork, 1).verb("a", 1, verbCommit, resultRefused), ruleLost},
		"lost from the history":              {pushed(qKept).done("a", "k", "id", qKept), ruleLost},
		"pushed twice":                       {pushed(qWork).done("a", "k", "id", qWork).done("b", "k", "other", qWork), ruleTwice},
		"refused, and there":                 {newTale().push("k", "id", qWork, resultRefused).done("a", "k", "id", qWork), ruleRefused},
		"delivered after its commit":         {pushed(qWork).done("a", "k", "id", qWork).claim("b", "k", "id", qWork, 2), ruleAfter},
		"stored after its commit":            {pushed(qWork).done("a", "k", "id", qWork).stored(document{ID: "id", Key: "k", Q: qWork, Live: true}), ruleAfter},
		"dead after its commit":              {pushed(qWork).done("a", "k", "id", qWork).stored(document{ID: "id", Key: "k", Q: qWork + ".dead", Dead: "lost"}), ruleAfter},
		"a stale commit":                     {twice().verb("a", 1, verbCommit, resultOK), ruleStale},
		"a stale rollback":                   {twice().verb("a", 1, verbRollback, resultOK), ruleStale},
		"two commits":                        {pushed(qWork).done("a", "k", "id", qWork).claim("b", "k", "id", qWork, 2).verb("b", 2, verbCommit, resultOK), ruleAgain},
		"stuck":                              {pushed(qWork).stored(document{ID: "id", Key: "k", Q: qWork, Live: true}), ruleStuck},
		"reserved":                           {pushed(qWork).stored(document{ID: "id", Key: "k", Q: qWork, Live: true, Reserved: true}), ruleReserved},
		"a history that nobody made":         {pushed(qKept).stored(document{ID: "id", Key: "k", Q: qKept, Done: true}), ruleNobody},
		"an effect without a reason":         {pushed(qWork).claim("a", "k", "id", qWork, 1).effect("a", 1).claim("b", "k", "id", qWork, 2).effect("b", 2).verb("b", 2, verbCommit, resultOK), ruleEffect},
		"one number, and no failover":        {pushed(qWork).claim("a", "k", "id", qWork, 1).done("b", "k", "id", qWork), ruleCount},
		"one number of a durable claim":      {pushed(qFenced).claim("a", "k", "id", qFenced, 1).add("conductor", entry{What: noteFault, Verb: faultCrash}).done("b", "k", "id", qFenced), ruleCount},
		"a move that did not happen":         {pushed(qHop1).claim("a", "k", "id", qHop1, 1).add("a", entry{What: noteAnswer, Try: 1, Verb: verbMove, To: qHop2, Result: resultOK}).claim("b", "k", "id", qHop1, 2), ruleVerb},
		"an effect document without commit":  {withEffect(pushed(qTx).claim("a", "k", "id", qTx, 1).verb("a", 1, verbCommit, resultLost)), ruleTogether},
		"a commit without effect document":   {pushed(qTx).done("a", "k", "id", qTx), ruleTogether},
		"an order without its push":          {withOrder(newTale().push("k", "id", qWork, resultUnknown)), ruleTogether},
		"a join that lacks a part":           {pushed(pipeName).add("a", entry{What: noteJoined, ID: "id", Key: "k", Parts: []int{0}, N: 2}), ruleJoin},
		"a join that has a part twice":       {pushed(pipeName).add("a", entry{What: noteJoined, ID: "id", Key: "k", Parts: []int{1, 1}, N: 2}), ruleJoin},
		"a part that is gone":                {pushed(pipeName).add("a", entry{What: noteClaim, ID: "p", Key: "k", Part: &part{Of: "id", Index: 1, Count: 2}, Try: 9, Deliveries: 1}), ruleLost},
		"early":                              {newTale().add("p", entry{What: notePush, Key: "k", Q: qWork, Delay: int64(time.Hour)}).done("a", "k", "id", qWork), ruleEarly},
		"overlapping leases":                 {overlapping(), ruleOverlap},
		"past its deadline":                  {newTale().mortal(qFleet).push("l", "o", qWork, resultRefused).push("m", "p", qWork, resultRefused).done("a", "k", "id", qFleet), ruleLate},
		"dead before its deadline":           {newTale().mortal(qBrief).stored(expiredAfter(time.Millisecond)), ruleExpired},
		"dead of a deadline it never had":    {pushed(qBrief).stored(expiredAfter(time.Hour)), ruleExpired},
		"popped by nobody":                   {pushed(qPop).add("w", entry{What: notePop, Try: 1}).add("w", entry{What: notePopped, Try: 1}), ruleLost},
		"a replay without a part":            {newTale().replayed(resultOK, 2).again("x", "a"), ruleReplay},
		"a replay with another number":       {newTale().replayed(resultOK, 1).again("x", "a").again("y", "b"), ruleReplay},
		"a replay that has one twice":        {newTale().replayed(resultUnknown, 0).again("x", "a").again("y", "a"), ruleReplay},
		"stored in two collections":          {pushed(qKept).done("a", "k", "id", qKept).kept().kept(), ruleTwice},
		"a push that was never seen anymore": {newTale().push("k", "id", qWork, resultOK), ruleLost},
	} {
		if c.rule == "" {
			c.rule = ruleLost
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fig, bad := check(c.tale.evidence)
			rules := map[string]bool{}
			for _, v := range bad {
				rules[v.Rule] = true
				require.NotEmpty(t, c.tale.story(v))
			}
			require.Contains(t, rules, c.rule)
			require.Positive(t, fig.Losses)
		})
	}
}

// mortal is a push whose envelope may wait for a second.
func (t *tale) mortal(q string) *tale {
	t.push("k", "id", q, resultOK)
	t.entries[len(t.entries)-2].TTL = int64(time.Second)
	return t
}

// expiredAfter is a dead letter that was there for so long.
func expiredAfter(d time.Duration) document {
	return document{ID: "id", Key: "k", Q: qBrief + ".dead", Dead: "expired", DeadAt: origin + d.Milliseconds()}
}

// replayed is a replay of a and b, and what it was told.
func (t *tale) replayed(result string, n int) *tale {
	return t.add("w", entry{What: noteReplay, Replay: "r", Of: []string{"a", "b"}}).
		add("w", entry{What: noteAgain, Replay: "r", Of: []string{"a", "b"}, Result: result, N: n})
}

// again is one that does another again, and is done.
func (t *tale) again(id, of string) *tale {
	n := int64(len(t.entries))
	t.add("w", entry{What: noteClaim, ID: id, Of: []string{of}, Replay: "r", Q: qAgain, Try: n, Deliveries: 1}).verb("w", n, verbCommit, resultOK)
	return t.stored(document{ID: id, Of: of, Replay: "r", Q: qAgain, Done: true})
}

func (t *tale) kept() *tale {
	return t.stored(document{ID: "id", Key: "k", Q: qKept, Done: true})
}

func withEffect(t *tale) *tale {
	t.effects["k"] = true
	return t
}

func withOrder(t *tale) *tale {
	t.orders["k"] = true
	return t
}

// overlapping is an envelope that a second consumer gets while the lease of the first runs.
func overlapping() *tale {
	t := newTale().push("k", "id", qWork, resultOK).claim("a", "k", "id", qWork, 1)
	t.entries[len(t.entries)-1].Until += 60_000
	return t.claim("b", "k", "id", qWork, 2).effect("b", 2).verb("b", 2, verbCommit, resultOK)
}

func TestCheckCountsWhatFailoversUndo(t *testing.T) {
	t.Parallel()
	tale := newTale().push("k", "id", qWork, resultOK).claim("a", "k", "id", qWork, 1).effect("a", 1).
		add("conductor", entry{What: noteFault, Verb: faultStepDown}).
		claim("b", "k", "id", qWork, 1).effect("b", 1).verb("a", 1, verbCommit, resultLost).verb("b", 1, verbCommit, resultOK)
	fig, bad := check(tale.evidence)
	require.Empty(t, bad)
	require.Equal(t, 1, fig.Undone)
	require.Equal(t, 1, fig.Duplicates)
	require.Equal(t, map[string]int{"lease lost": 1}, fig.Explained)
}
