package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// evidence is what a run leaves behind.
type evidence struct {
	nodes   int     // of the server; 0: more than one
	entries []entry // of all ledgers, in the order of time
	docs    []document
	effects map[string]bool // keys of the documents that were written with commits
	orders  map[string]bool // keys of those that were written with pushes
}

// A document is what the checker reads of a stored envelope.
type document struct {
	ID, Key, Q string
	Part       bool
	Replay, Of string        // the replay it came of, and the envelope that it does again
	DeadAt     int64         // in ms since 1970, by the server's clock
	Live       bool          // neither done nor dead
	Done       bool          // in the history
	Dead       string        // why it is a dead letter; empty: it is none
	Reserved   bool          // under a lease, though not done
	Text       func() string // all of it, for people
}

// A violation is a broken promise.
type violation struct {
	Rule string // which
	ID   string // of the envelope, if it has one
	Key  string
	Text string
}

// figures are counted beside the check.
type figures struct {
	Jobs, Unknown, Refused        int // pushes by what became of them; jobs: acknowledged
	Done, Kept, Dead, Parts       int // ends
	Deliveries, Effects           int
	Lost, UnknownVerbs            int // verbs that lost their lease, or their answer for good
	Duplicates                    int
	Explained                     map[string]int // duplicates, by why
	Undone                        int            // claims that a failover took back
	Expired                       int            // past their deadline
	Popped                        int            // of those that were lost with who popped them
	Replays, Pauses               int
	Forks, Transactions, Redriven int
	Restarts, Trouble             int
	Faults                        map[string]int
	Losses                        int // violations
}

// tryKey names an attempt.
type tryKey struct {
	proc string
	n    int64
}

// try is an attempt as the ledgers tell it.
type try struct {
	claim   entry
	effect  int64 // when; 0: none
	ask     *entry
	answers []entry
}

// answer is what became of the attempt's verb: the last word of it; empty: the process never said.
func (t *try) answer() string {
	if len(t.answers) == 0 {
		return ""
	}
	return t.answers[len(t.answers)-1].Result
}

// may tells whether a verb of the attempt may have happened.
func (t *try) may(verb string) bool {
	for _, a := range t.answers {
		if a.Verb == verb && (a.Result == resultOK || a.Result == resultUnknown) {
			return true
		}
		if a.Verb == verbForward && a.Result == resultUnknown && t.asked(verb) {
			return true
		}
	}
	return len(t.answers) == 0 && t.asked(verb) // and no answer was seen
}

// asked tells whether a verb was asked for. What a pipeline's handler goes forward to follows from its stage.
func (t *try) asked(verb string) bool {
	switch {
	case t.ask == nil: // what is popped is gone when somebody has it
		return t.claim.Q == qPop && verb == verbCommit
	case t.ask.Verb == verbForward && t.claim.Q == pipeName+"."+stageOut:
		return verb == verbCommit
	case t.ask.Verb == verbForward:
		return verb != verbCommit
	}
	return t.ask.Verb == verb
}

// did tells whether a verb of the attempt was acknowledged, and when.
func (t *try) did(verb string) (entry, bool) {
	for _, a := range t.answers {
		if a.Verb == verb && a.Result == resultOK {
			return a, true
		}
	}
	return entry{}, false
}

// gaveUp tells whether any verb may have ended the attempt's hold.
func (t *try) gaveUp() bool {
	if t.ask != nil && len(t.answers) == 0 {
		return true
	}
	return slices.ContainsFunc(t.answers, func(a entry) bool { return a.Result == resultOK || a.Result == resultUnknown })
}

// life is all that is known of one envelope.
type life struct {
	id      string
	key     string
	part    *part
	replay  bool   // it does again what was done
	tries   []*try // by deliveries
	doc     *document
	arrived int64 // when it was acknowledged to have come to its join, as a part
	joined  []entry
}

// order is all that is known of one push.
type order struct {
	key    string
	push   entry
	told   entry  // what the push was told, if it was
	result string // of the push; empty: the process never said
	ids    map[string]bool
}

// span is a time in which the server may have forgotten claims that no majority held.
type span struct{ from, to int64 }

// aftermath is how long after a fault of a node the claims may still be undone: by then a deposed primary has noticed.
const aftermath = 10 * time.Second

// clockError is how far a client may be off that takes the server's clock for something: as long as an answer is late.
const clockError = 2 * time.Second

type checker struct {
	evidence

	lives   map[string]*life
	orders  map[string]*order
	pops    map[tryKey]bool  // pops that nobody lived to tell the end of
	popped  []*life          // what may have gone with them
	last    int64            // when the last entry was made
	replays map[string]entry // by their ids, and what became of them
	again   map[string]entry
	killed  map[string]int64 // processes, by when
	spans   []span           // faults of nodes
	fig     figures
	bad     []violation
}

// check holds what happened against what is promised.
func check(e evidence) (figures, []violation) {
	c := &checker{
		evidence: e, lives: map[string]*life{}, orders: map[string]*order{}, killed: map[string]int64{},
		pops: map[tryKey]bool{}, replays: map[string]entry{}, again: map[string]entry{},
	}
	c.fig.Explained, c.fig.Faults = map[string]int{}, map[string]int{}
	c.read()
	for _, o := range c.orders {
		c.checkPush(o)
	}
	for _, l := range c.lives {
		slices.SortStableFunc(l.tries, func(a, b *try) int { return a.claim.Deliveries - b.claim.Deliveries })
		c.checkEnd(l)
		c.checkTimes(l)
		c.checkClaims(l)
		c.checkVerbs(l)
		c.checkEffects(l)
		c.checkJoin(l)
	}
	c.checkPops()
	c.checkReplays()
	slices.SortFunc(c.bad, func(a, b violation) int { return strings.Compare(a.Rule+a.ID+a.Text, b.Rule+b.ID+b.Text) })
	c.fig.Losses = len(c.bad)
	return c.fig, c.bad
}

func (c *checker) fail(rule string, l *life, format string, args ...any) {
	c.bad = append(c.bad, violation{Rule: rule, ID: l.id, Key: l.key, Text: fmt.Sprintf(format, args...)})
}

// read sorts the evidence by envelopes.
func (c *checker) read() {
	tries := map[tryKey]*try{}
	for _, e := range c.entries {
		k := tryKey{e.Proc, e.Try}
		c.last = e.At
		switch e.What {
		case notePush:
			c.orders[e.Key] = &order{key: e.Key, push: e, ids: map[string]bool{}}
		case notePushed:
			if o := c.orders[e.Key]; o != nil {
				o.result, o.told = e.Result, e
				if e.ID != "" && e.Result == resultOK {
					o.ids[e.ID] = true
				}
			}
		case noteClaim:
			t := &try{claim: e}
			tries[k] = t
			l := c.life(e.ID, e.Key)
			l.part, l.replay = e.Part, e.Of != nil
			l.tries = append(l.tries, t)
			c.saw(e.Key, e.ID, l.part != nil || l.replay)
			c.fig.Deliveries++
		case noteEffect:
			if t := tries[k]; t != nil {
				t.effect = e.At
				c.fig.Effects++
			}
		case noteJoined:
			l := c.life(e.ID, e.Key)
			l.joined = append(l.joined, e)
		case noteAsk:
			if t := tries[k]; t != nil {
				t.ask, t.answers = &e, nil
			}
		case noteAnswer:
			c.readAnswer(tries[k], e)
		case notePop:
			c.pops[k] = true
		case notePopped:
			delete(c.pops, k)
		case noteReplay:
			c.replays[e.Replay] = e
		case noteAgain:
			c.again[e.Replay] = e
		case notePaused:
			c.fig.Pauses++
		case noteRedrive:
			c.fig.Redriven += e.N
		case noteStart:
			c.fig.Restarts++
		case noteTrouble:
			c.fig.Trouble++
		case noteFault:
			c.readFault(e)
		case noteHealed:
			c.readHealed(e)
		}
	}
	for i := range c.docs {
		d := &c.docs[i]
		l := c.life(d.ID, d.Key)
		if l.doc != nil {
			c.fail(ruleTwice, l, "it is stored in two collections")
		}
		l.doc, l.replay = d, l.replay || d.Of != ""
		c.saw(d.Key, d.ID, d.Part || l.replay)
	}
}

func (c *checker) readAnswer(t *try, e entry) {
	switch e.Result {
	case resultLost:
		c.fig.Lost++
	case resultUnknown:
		c.fig.UnknownVerbs++
	}
	switch {
	case t != nil:
		t.answers = append(t.answers, e)
	case e.Verb == verbArrive && e.Result == resultOK:
		if l := c.life(e.ID, ""); l.arrived == 0 {
			l.arrived = e.At
		}
	}
}

func (c *checker) readFault(e entry) {
	c.fig.Faults[e.Verb]++
	switch e.Verb {
	case faultKill:
		c.killed[e.To] = e.At
	case faultCrash, faultFreeze, faultStepDown:
		if c.nodes == 1 && e.Verb != faultCrash {
			return // it forgets nothing
		}
		// Until it is healed, which the ledger says later; what was claimed shortly before may not have been held yet.
		c.spans = append(c.spans, span{e.At - int64(time.Second), 1<<63 - 1})
	}
}

func (c *checker) readHealed(e entry) {
	switch e.Verb {
	case faultCrash, faultFreeze, faultStepDown:
		for i := range c.spans {
			if c.spans[i].to == 1<<63-1 {
				c.spans[i].to = e.At + int64(aftermath)
			}
		}
	}
}

func (c *checker) life(id, key string) *life {
	l := c.lives[id]
	if l == nil {
		l = &life{id: id}
		c.lives[id] = l
	}
	if key != "" {
		l.key = key
	}
	return l
}

// saw notes under which ids a key was met, but for those of what came of its envelope.
func (c *checker) saw(key, id string, derived bool) {
	if o := c.orders[key]; o != nil && !derived {
		o.ids[id] = true
	}
}

// shaken tells whether the server may have forgotten claims at some time between.
func (c *checker) shaken(from, to int64) bool {
	return slices.ContainsFunc(c.spans, func(s span) bool { return s.from <= to && from <= s.to })
}

// The rules, as the report names them.
const (
	ruleLost     = "an acknowledged push was lost"
	ruleTwice    = "a push is there twice"
	ruleRefused  = "a push that was refused is there"
	ruleEarly    = "it was delivered early"
	ruleLate     = "it was delivered after its deadline"
	ruleExpired  = "it is called expired, and is not"
	ruleReplay   = "a replay is there in part, or twice"
	ruleStuck    = "it is stuck"
	ruleReserved = "it is reserved for ever"
	ruleAfter    = "it was delivered, or is there, after its commit was acknowledged"
	ruleStale    = "a commit was acknowledged to a stale lease"
	ruleAgain    = "its commit was acknowledged twice"
	ruleNobody   = "it ended in a way that nobody asked for"
	ruleOverlap  = "it was delivered while its lease ran"
	ruleCount    = "a number of deliveries was given twice"
	ruleVerb     = "a verb was acknowledged, and the next delivery does not show it"
	ruleEffect   = "an effect happened again, and nothing explains it"
	ruleTogether = "a transaction is there in part"
	ruleJoin     = "a join has not got each part once"
	ruleStored   = "indexes and counts disagree"
)

// checkPush: an acknowledged push is an envelope, a refused one is none, and none is two.
func (c *checker) checkPush(o *order) {
	stub := &life{key: o.key}
	for id := range o.ids {
		stub.id = id
	}
	switch o.result {
	case resultOK:
		c.fig.Jobs++
	case resultRefused, resultLost:
		c.fig.Refused++
		if len(o.ids) > 0 {
			c.fail(ruleRefused, stub, "the push failed with a definite error")
		}
	default:
		c.fig.Unknown++
	}
	if len(o.ids) > 1 {
		c.fail(ruleTwice, stub, "the key %s is there under %d ids", o.key, len(o.ids))
	}
	for id := range o.ids {
		c.life(id, o.key)
	}
	if o.result == resultOK && len(o.ids) == 0 {
		c.fail(ruleLost, stub, "it was acknowledged without an id")
	}
	c.checkOrder(o, stub)
}

// checkOrder: a push in a transaction and the user's document are there together, or neither is.
func (c *checker) checkOrder(o *order, stub *life) {
	there := c.evidence.orders[o.key]
	if there {
		c.fig.Transactions++
	}
	if there && len(o.ids) == 0 && (o.push.TTL == 0 || o.push.At+o.push.TTL > c.last) { // else it may have expired unseen
		c.fail(ruleTogether, stub, "the order is there, the push is not")
	}
	if there && o.result == resultRefused {
		c.fail(ruleTogether, stub, "the order is there, though the transaction was aborted")
	}
}

// commits are the attempts of an envelope whose commit may have happened, and those whose commit was acknowledged.
func (l *life) commits() (may, did []*try) {
	for _, t := range l.tries {
		if t.may(verbCommit) {
			may = append(may, t)
		}
		if _, ok := t.did(verbCommit); ok {
			did = append(did, t)
		}
	}
	return may, did
}

// checkEnd: an envelope is done, dead or in the history, as somebody asked for.
func (c *checker) checkEnd(l *life) {
	may, did := l.commits()
	if len(did) > 1 {
		c.fail(ruleAgain, l, "%d attempts were told so", len(did))
	}
	d := l.doc
	switch {
	case d != nil && d.Reserved && d.Live:
		c.fail(ruleReserved, l, "in queue %s", d.Q)
	case d != nil && d.Live:
		c.fail(ruleStuck, l, "in queue %s", d.Q)
	case d != nil && d.Done && len(may) == 0:
		c.fail(ruleNobody, l, "it is in the history of %s, and nobody committed it", d.Q)
	case d != nil && d.Done && !keeps(d.Q):
		c.fail(ruleNobody, l, "it is in the history of %s, which keeps none", d.Q)
	case d != nil && d.Done:
		c.fig.Kept++
	case d != nil && d.Dead != "" && len(did) > 0:
		c.fail(ruleAfter, l, "it is a dead letter, though its commit was acknowledged")
	case d != nil && d.Dead != "":
		c.fig.Dead++
		c.checkExpired(l)
	case l.part != nil:
		c.checkPart(l)
	case len(may) == 0 && c.may(l, qFleet):
		c.fig.Expired++
		if o := c.orders[l.key]; o.push.At+o.push.TTL > c.last {
			c.fail(ruleExpired, l, "it is gone, and has %v left", time.Duration(o.push.At+o.push.TTL-c.last))
		}
	case len(may) == 0 && c.may(l, qPop) && len(l.tries) == 0:
		if c.mustBe(l) {
			c.popped = append(c.popped, l)
		}
	case len(may) == 0:
		if c.mustBe(l) {
			c.fail(ruleLost, l, "nothing is stored, and nobody committed it")
		}
	case !slices.ContainsFunc(may, func(t *try) bool { return !keeps(t.claim.Q) }):
		c.fail(ruleLost, l, "it was committed into a history, and is not there")
	default:
		c.fig.Done++
	}
	c.checkEffectDocument(l, may, did)
}

// may tells whether an envelope was pushed to a queue that allows for more than others.
func (c *checker) may(l *life, q string) bool {
	o := c.orders[l.key]
	return o != nil && o.push.Q == q && !l.replay
}

// checkExpired: what is dead for its deadline is past it.
func (c *checker) checkExpired(l *life) {
	if l.doc.Dead != "expired" {
		return
	}
	c.fig.Expired++
	switch o := c.orders[l.key]; {
	case o == nil || o.push.TTL == 0:
		c.fail(ruleExpired, l, "it has no deadline")
	case l.doc.DeadAt < (o.push.At+o.push.TTL)/int64(time.Millisecond):
		c.fail(ruleExpired, l, "it had %v left", time.Duration(o.push.At+o.push.TTL-l.doc.DeadAt*int64(time.Millisecond)))
	}
}

// checkPops: what is gone from a queue that is popped from, and nobody has it, went with a process that was killed in a
// pop after it was pushed.
func (c *checker) checkPops() {
	var died []int64
	for k := range c.pops {
		if at, ok := c.killed[k.proc]; ok {
			died = append(died, at)
		}
	}
	slices.Sort(died)
	slices.SortFunc(c.popped, func(a, b *life) int { return int(min(max(c.orders[a.key].push.At-c.orders[b.key].push.At, -1), 1)) })
	for _, l := range c.popped {
		at := c.orders[l.key].push.At
		died = slices.DeleteFunc(died, func(d int64) bool { return d < at })
		if len(died) == 0 {
			c.fail(ruleLost, l, "nothing is stored, nobody has popped it, and no process died since that may have and did not take another")
			continue
		}
		died = died[1:]
		c.fig.Popped++
	}
}

// checkReplays: a replay does each envelope again, once.
func (c *checker) checkReplays() {
	found := map[string][]*document{}
	for i := range c.docs {
		if d := &c.docs[i]; d.Of != "" {
			found[d.Replay+" "+d.Of] = append(found[d.Replay+" "+d.Of], d)
		}
	}
	for k, ds := range found {
		if len(ds) > 1 {
			c.bad = append(c.bad, violation{Rule: ruleReplay, ID: ds[1].ID, Key: ds[1].Key, Text: fmt.Sprintf("%d times in replay %s", len(ds), k)})
		}
	}
	for id, asked := range c.replays {
		c.fig.Replays++
		told := c.again[id]
		if told.Result != resultOK || c.shaken(asked.At, told.At) { // what was listed may have been undone
			continue
		}
		if told.N != len(asked.Of) {
			c.bad = append(c.bad, violation{Rule: ruleReplay, ID: asked.Of[0], Text: fmt.Sprintf("replay %s of %d says %d", id, len(asked.Of), told.N)})
		}
		for _, of := range asked.Of {
			if len(found[id+" "+of]) == 0 {
				c.bad = append(c.bad, violation{Rule: ruleReplay, ID: of, Text: "it is not in replay " + id + ", which was acknowledged"})
			}
		}
	}
}

// mustBe tells whether an envelope was certainly there: its push was acknowledged, or somebody had it.
func (c *checker) mustBe(l *life) bool {
	o := c.orders[l.key]
	return len(l.tries) > 0 || o != nil && (o.result == resultOK || c.evidence.orders[l.key])
}

// checkPart: a part that is gone has come to its join.
func (c *checker) checkPart(l *life) {
	c.fig.Parts++
	if l.arrived != 0 {
		return
	}
	// Nobody may have lived to say so: then the whole tells.
	whole := c.lives[l.part.Of]
	if whole == nil || !slices.ContainsFunc(whole.joined, func(e entry) bool { return slices.Contains(e.Parts, l.part.Index) }) &&
		(whole.doc == nil || whole.doc.Dead == "") {
		c.fail(ruleLost, l, "a part is gone, and its join does not have it")
	}
}

// checkEffectDocument: a commit in a transaction and the user's document are there together, or neither is.
func (c *checker) checkEffectDocument(l *life, may, did []*try) {
	if len(l.tries) == 0 || l.tries[0].claim.Q != qTx || l.part != nil {
		return
	}
	c.fig.Transactions++
	switch there := c.effects[l.key]; {
	case there && l.doc != nil:
		c.fail(ruleTogether, l, "the effect is there, and so is the envelope")
	case there && len(may) == 0:
		c.fail(ruleTogether, l, "the effect is there, and nobody committed")
	case !there && len(did) > 0:
		c.fail(ruleTogether, l, "the commit was acknowledged, and the effect is not there")
	case !there && l.doc == nil:
		c.fail(ruleTogether, l, "the envelope is gone, and the effect is not there")
	}
}

// checkTimes: no delivery before its delay, and none after its deadline.
func (c *checker) checkTimes(l *life) {
	o := c.orders[l.key]
	if o == nil || len(l.tries) == 0 || l.part != nil || l.replay {
		return
	}
	if t := l.tries[0]; t.claim.At < o.push.At+o.push.Delay {
		c.fail(ruleEarly, l, "by %v", time.Duration(o.push.At+o.push.Delay-t.claim.At))
	}
	if o.push.TTL == 0 || o.result != resultOK {
		return
	}
	end := o.told.At + o.push.TTL + int64(clockError)
	for _, t := range l.tries {
		if late := time.Duration(t.claim.Reserved*int64(time.Millisecond) - end); late > 0 {
			c.fail(ruleLate, l, "to %s, by %v", t.name(), late)
		}
	}
}

// checkClaims: one holder at a time, each with a number of its own.
func (c *checker) checkClaims(l *life) {
	for i, b := range l.tries {
		for _, a := range l.tries[:i] {
			from := min(a.claim.At, b.claim.At, a.claim.Reserved*int64(time.Millisecond), b.claim.Reserved*int64(time.Millisecond))
			shaken := c.shaken(from, max(a.claim.At, b.claim.At)) && !durable(a.claim.Q)
			switch {
			case a.claim.Deliveries == b.claim.Deliveries && shaken:
				c.fig.Undone++
			case a.claim.Deliveries == b.claim.Deliveries:
				c.fail(ruleCount, l, "%s and %s both have number %d", a.name(), b.name(), a.claim.Deliveries)
			case a.gaveUp() && (a.ask == nil || a.ask.At <= b.claim.At) || b.claim.Reserved >= a.claim.Until:
			case !shaken:
				c.fail(ruleOverlap, l, "%s took it at %d, %s held it until %d", b.name(), b.claim.Reserved, a.name(), a.claim.Until)
			}
		}
	}
}

func (t *try) name() string { return fmt.Sprintf("%s/%d", t.claim.Proc, t.claim.Try) }

// checkVerbs: what was acknowledged has happened, and to the latest holder.
func (c *checker) checkVerbs(l *life) {
	for _, a := range l.tries {
		if done, ok := a.did(verbCommit); ok {
			for _, b := range l.tries {
				if b == a || b.claim.Deliveries <= a.claim.Deliveries {
					continue
				}
				if !durable(a.claim.Q) && c.shaken(b.claim.Reserved*int64(time.Millisecond), max(done.At, b.claim.At)) {
					c.fig.Undone++
					continue
				}
				if b.claim.At > done.At {
					c.fail(ruleAfter, l, "%s had its commit acknowledged, %s got it %v later", a.name(), b.name(), time.Duration(b.claim.At-done.At))
				} else {
					c.fail(ruleStale, l, "%s had its commit acknowledged, %s had got it %v before", a.name(), b.name(), time.Duration(done.At-b.claim.At))
				}
			}
			switch d := l.doc; {
			case keeps(a.claim.Q) && (d == nil || !d.Done):
				c.fail(ruleAfter, l, "the commit of %s was acknowledged, and it is not in the history", a.name())
			case !keeps(a.claim.Q) && d != nil:
				c.fail(ruleAfter, l, "the commit of %s was acknowledged, and it is still there", a.name())
			}
		}
		c.checkStale(l, a)
		c.checkNext(l, a)
	}
	if l.arrived != 0 {
		for _, b := range l.tries {
			if b.claim.Reserved*int64(time.Millisecond) > l.arrived+int64(time.Second) {
				c.fail(ruleAfter, l, "a part was delivered to %s after it had come to its join", b.name())
			}
		}
	}
}

// checkStale: a verb, of those that end no envelope, was asked for before anybody else had got it. It may have been
// acknowledged later.
func (c *checker) checkStale(l *life, a *try) {
	for _, v := range a.answers {
		if a.ask == nil || v.Result != resultOK || v.Verb == verbCommit {
			continue
		}
		for _, b := range l.tries {
			if b.claim.Deliveries <= a.claim.Deliveries || b.claim.At >= a.ask.At ||
				!durable(a.claim.Q) && c.shaken(b.claim.Reserved*int64(time.Millisecond), max(v.At, b.claim.At)) {
				continue
			}
			c.fail(ruleStale, l, "%s had its %s acknowledged, which it asked for %v after %s had got it", a.name(), v.Verb, time.Duration(a.ask.At-b.claim.At), b.name())
		}
	}
}

// checkNext: the next delivery shows what was acknowledged to the one before.
func (c *checker) checkNext(l *life, a *try) {
	var next *try
	for _, b := range l.tries {
		if b.claim.Deliveries == a.claim.Deliveries+1 {
			next = b
		}
		if b != a && b.claim.Deliveries == a.claim.Deliveries {
			return // one of them was undone
		}
	}
	if next == nil {
		return
	}
	if m, ok := a.did(verbMove); ok && m.To != "" && (next.claim.Q != m.To || next.claim.Moves != a.claim.Moves+1) {
		c.fail(ruleVerb, l, "%s moved it to %s, %s got it from %s after %d moves", a.name(), m.To, next.name(), next.claim.Q, next.claim.Moves)
	}
	if _, ok := a.did(verbRollback); ok && !next.claim.Mended && next.claim.Retries != a.claim.Retries+1 {
		c.fail(ruleVerb, l, "%s rolled it back, %s got it with %d retries", a.name(), next.name(), next.claim.Retries)
	}
	if _, ok := a.did(verbRelease); ok && next.claim.Retries != a.claim.Retries {
		c.fail(ruleVerb, l, "%s released it, %s got it with %d retries", a.name(), next.name(), next.claim.Retries)
	}
	if _, ok := a.did(verbDead); ok && !next.claim.Mended {
		c.fail(ruleVerb, l, "%s dead-lettered it, %s got it", a.name(), next.name())
	}
}

// checkEffects: an effect that happened again has its reason.
func (c *checker) checkEffects(l *life) {
	type step struct {
		q     string
		moves int
	}
	steps := map[step][]*try{}
	for _, t := range l.tries {
		if t.effect != 0 {
			s := step{t.claim.Q, t.claim.Moves}
			steps[s] = append(steps[s], t)
		}
	}
	for _, ts := range steps {
		if len(ts) < 2 {
			continue
		}
		slices.SortStableFunc(ts, func(a, b *try) int { return int(min(max(a.effect-b.effect, -1), 1)) })
		// One of them counts: the one whose verb was acknowledged, else the last.
		counts := len(ts) - 1
		for i, t := range ts {
			if t.answer() == resultOK {
				counts = i
			}
		}
		for i, t := range ts {
			if i == counts {
				continue
			}
			c.fig.Duplicates++
			if why := c.explain(t); why != "" {
				c.fig.Explained[why]++
			} else {
				c.fail(ruleEffect, l, "that of %s", t.name())
			}
		}
	}
}

// explain says why an effect did not count; empty: it should have.
func (c *checker) explain(t *try) string {
	switch t.answer() {
	case resultLost:
		return "lease lost"
	case resultUnknown:
		return "answer lost"
	case resultRefused:
		return "verb refused"
	case "":
		if _, killed := c.killed[t.claim.Proc]; killed { // once, and it may have lived on for a moment after that was noted
			return "killed"
		}
	}
	return ""
}

// checkJoin: each join has each part once, or its whole is dead of one.
func (c *checker) checkJoin(l *life) {
	for _, e := range l.joined {
		c.fig.Forks++
		parts := slices.Clone(e.Parts)
		slices.Sort(parts)
		for i := range e.N {
			if i >= len(parts) || parts[i] != i || len(parts) != e.N {
				c.fail(ruleJoin, l, "it has %v of %d", parts, e.N)
				break
			}
		}
	}
}

// story is all that the ledgers tell of an envelope, in the order of time, and what is stored.
func (e evidence) story(v violation) []string {
	var lines []string
	about := func(x entry) bool {
		return v.ID != "" && (x.ID == v.ID || x.Part != nil && x.Part.Of == v.ID || slices.Contains(x.Of, v.ID)) || v.Key != "" && x.Key == v.Key
	}
	var first, last int64
	for _, x := range e.entries {
		if about(x) {
			if first == 0 {
				first = x.At
			}
			last = x.At
		}
	}
	for _, x := range e.entries {
		near := (x.What == noteFault || x.What == noteHealed) && x.At >= first-int64(2*time.Second) && x.At <= last+int64(2*time.Second)
		if about(x) || near {
			lines = append(lines, x.String())
		}
	}
	for _, d := range e.docs {
		if d.ID == v.ID || v.Key != "" && d.Key == v.Key {
			lines = append(lines, "stored: "+d.Text())
		}
	}
	return lines
}

func (e entry) String() string {
	s := fmt.Sprintf("%s %-12s %-7s", e.time().Format("15:04:05.000000"), e.Proc, e.What)
	add := func(format string, v any, there bool) {
		if there {
			s += fmt.Sprintf(" "+format, v)
		}
	}
	add("%s", e.Verb, e.Verb != "")
	add("%s", e.Q, e.Q != "")
	add("to %s", e.To, e.To != "")
	add("#%d", e.Try, e.Try != 0)
	add("delivery %d", e.Deliveries, e.Deliveries != 0)
	add("retries %d", e.Retries, e.Retries != 0)
	add("moves %d", e.Moves, e.Moves != 0)
	add("part %v", e.Part, e.Part != nil)
	add("reserved %s", time.UnixMilli(e.Reserved).Format("15:04:05.000"), e.Reserved != 0)
	add("until %s", time.UnixMilli(e.Until).Format("15:04:05.000"), e.Until != 0)
	add("delay %v", time.Duration(e.Delay), e.Delay != 0)
	add("ttl %v", time.Duration(e.TTL), e.TTL != 0)
	add("replay %s", e.Replay, e.Replay != "")
	add("of %v", e.Of, e.Of != nil)
	add("parts %v", e.Parts, e.Parts != nil)
	add("n %d", e.N, e.N != 0)
	add("= %s", e.Result, e.Result != "")
	add("%s", e.Text, e.Text != "")
	add("(%s)", e.Err, e.Err != "")
	return s
}
