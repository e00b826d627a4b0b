'use strict';

// keuss, backends mongo, bucket-mongo-safe and pl-mongo, with their default settings. Signals and statistics stay in the process,
// which spares it what its defaults write to MongoDB beside the queue.

const { serve, consume, promise, withDatabase } = require('./link');
const payload = require('./payload');
const { MongoClient } = require(require.resolve('mongodb', { paths: [require.resolve('keuss/backends/mongo')] }));

const stages = ['one', 'two', 'three']; // as package task has them

const backends = { 'keuss-mongo': 'keuss/backends/mongo', 'keuss-bucket': 'keuss/backends/bucket-mongo-safe', 'keuss-pl': 'keuss/backends/pl-mongo' };

async function openFactory(spec) {
  const backend = require(backends[spec.system]);
  return promise(cb => backend({
    url: withDatabase(spec.uri, 'bench'),
    stats: { provider: require('keuss/stats/mem') },
    signaller: { provider: require('keuss/signal/local') },
  }, cb));
}

async function open(spec) {
  const factory = await openFactory(spec);
  return promise(cb => factory.queue(spec.queue, {}, cb));
}

// openPipeline makes the stages' queues; all are in the collection of the pipeline's name.
async function openPipeline(spec) {
  const factory = await openFactory(spec);
  const pipeline = factory.pipeline(spec.queue);
  await promise(cb => pipeline.ensureIndexes(cb));
  for (const stage of stages) factory._queue_from_pipeline(stage, pipeline, {});
  return pipeline;
}

// collection is the queue's own.
async function collection(spec) {
  const client = await MongoClient.connect(withDatabase(spec.uri, 'bench'));
  return client.db().collection(spec.queue);
}

const tasks = {
  async fill(spec, begin) {
    if (spec.system === 'keuss-pl') await openPipeline(spec); // its index
    const queue = spec.system === 'keuss-pl' ? null : await open(spec);
    await begin();
    if (spec.system === 'keuss-bucket') {
      for (let n = 0; n < spec.jobs; n++) await promise(cb => queue.push(payload(n), cb));
      await promise(cb => queue.drain(cb)); // the last bucket
      return spec.jobs;
    }
    // There is no push of many, and 100,000 single ones would take a minute: the documents are as push makes them.
    const jobs = await collection(spec);
    const stage = spec.stage ? { _q: spec.stage } : {};
    for (let n = 0; n < spec.jobs;) {
      const docs = [];
      for (; n < spec.jobs && docs.length < 1000; n++) {
        docs.push({ mature: new Date(), payload: payload(n), tries: 0, hdrs: {}, ...stage });
      }
      await jobs.insertMany(docs);
    }
    return spec.jobs;
  },

  async left(spec, begin) {
    const jobs = await collection(spec);
    const n = await jobs.countDocuments(spec.stage ? { _q: spec.stage } : {});
    await begin();
    return n;
  },

  // Each consumer reserves a job and commits it. The bucket backend only notes that in memory; its drain stores it.
  async drain(spec, begin) {
    const queue = await open(spec);
    await begin();
    const done = await consume(spec, cb => queue.pop('bench', { reserve: true }, (err, job) => {
      if (err) return cb(err);
      queue.ok(job, (err, ok) => cb(err || (ok ? null : new Error(`job ${job._id} could not be committed`))));
    }));
    if (spec.system === 'keuss-bucket') await promise(cb => queue.drain(cb));
    return done;
  },

  // Each link is one consumer, so that there are as many between two queues as the spec says. What is counted is handed
  // to the links' functions, as each leaves its stage; the bench looks afterwards whether any is left.
  async pipeline(spec, begin) {
    const pipeline = await openPipeline(spec);
    const queues = pipeline.queues();
    const DirectLink = require('keuss/Pipeline/DirectLink');
    const Sink = require('keuss/Pipeline/Sink');
    const goal = spec.jobs * stages.length;
    let moves = 0, ended;
    const over = new Promise((resolve, reject) => { ended = { resolve, reject }; });
    const step = (elem, cb) => {
      cb();
      if (++moves === goal) ended.resolve();
    };
    const links = [];
    for (let i = 0; i < spec.workers; i++) {
      for (let s = 0; s + 1 < stages.length; s++) links.push(new DirectLink(queues[stages[s]], queues[stages[s + 1]]));
      links.push(new Sink(queues[stages[stages.length - 1]]));
    }
    for (const link of links) {
      link.on_data(step);
      link.on('error', err => ended.reject(new Error(JSON.stringify(err.err || err))));
    }
    await begin();
    for (const link of links) link.start();
    if (spec.limit_ns) setTimeout(ended.resolve, spec.limit_ns / 1e6);
    await over;
    return moves;
  },
};

serve(tasks);
