'use strict';

// mongodb-queue with its default settings, on the newest driver that it works with.

const { MongoClient } = require('mongodb');
const mongoDbQueue = require('mongodb-queue');
const { serve, consume, promise, withDatabase } = require('./link');
const payload = require('./payload');

async function open(spec) {
  const client = await MongoClient.connect(withDatabase(spec.uri, 'bench'), {
    useNewUrlParser: true, useUnifiedTopology: true, poolSize: 100,
  });
  const queue = mongoDbQueue(client.db(), spec.queue);
  await promise(cb => queue.createIndexes(cb));
  return queue;
}

const tasks = {
  async fill(spec, begin) {
    const queue = await open(spec);
    await begin();
    for (let n = 0; n < spec.jobs;) {
      const batch = [];
      for (; n < spec.jobs && batch.length < 1000; n++) batch.push(payload(n));
      await promise(cb => queue.add(batch, cb));
    }
    return spec.jobs;
  },

  async left(spec, begin) {
    const queue = await open(spec);
    const n = await promise(cb => queue.size(cb)) + await promise(cb => queue.inFlight(cb));
    await begin();
    return n;
  },

  async drain(spec, begin) {
    const queue = await open(spec);
    await begin();
    return consume(spec, cb => queue.get((err, job) => {
      if (err || !job) return cb(err || new Error('the queue is empty'));
      queue.ack(job.ack, cb);
    }));
  },
};

serve(tasks);
