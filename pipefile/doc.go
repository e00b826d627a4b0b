// Package pipefile reads the shape of a mongoq pipeline from YAML: stages, links and policies, which operators can read
// and change. Handlers are Go, and go by the names under which they are registered.
//
//	pipeline: etl
//	stages:
//	  - name: read
//	    handler: readFile      # default: the stage's name
//	    next: parse
//	    queue: {lease: 1m, retry: {initial: 1s, factor: 2, max: 1m, retries: 5}}
//	    worker: {concurrency: 16, timeout: 30s}
//	  - name: parse
//	    fork: [count, longest]
//	    choice: [review]
//	  - name: review
//	    back: [{to: parse, limit: 2}]
//	  - {name: count, next: summarise}
//	  - {name: longest, next: summarise}
//	  - name: summarise
//	    join: {of: parse, onDead: goOn}
//
// What is checked is what mongoq.NewPipeline checks, and that every field is known; an error says the line.
package pipefile
