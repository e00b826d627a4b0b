'use strict';

// The conversation with the bench: see package child.

const readline = require('readline');

const say = message => process.stdout.write(JSON.stringify(message) + '\n');

// Wall-clock nanoseconds, as steady as the process's own clock. They are too many for a double to hold exactly: what is
// lost is below a microsecond.
const epoch = Date.now() * 1e6 - Number(process.hrtime.bigint());
const now = () => epoch + Number(process.hrtime.bigint());

const cpuSeconds = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};

// serve runs tasks[spec.task](spec, begin): the task calls `await begin()` when it is warm, and resolves to the number of
// jobs that it did.
function serve(tasks) {
  let spec, started, over = false;
  const go = new Promise(resolve => { started = resolve; });
  const lines = readline.createInterface({ input: process.stdin });

  lines.on('line', line => {
    if (spec === undefined) {
      spec = JSON.parse(line);
      work();
    } else if (line === 'go') {
      started();
    }
  });
  lines.on('close', () => process.exit(over ? 0 : 1)); // the bench has read the report, or is gone

  async function work() {
    let start, cpu;
    const begin = async () => {
      say({ event: 'ready' });
      await go;
      start = now();
      cpu = cpuSeconds();
    };
    try {
      const jobs = await tasks[spec.task](spec, begin);
      over = true;
      say({ event: 'done', report: {
        jobs, start_ns: Math.round(start), end_ns: Math.round(now()), cpu_s: cpuSeconds() - cpu,
      } });
    } catch (err) {
      over = true;
      say({ event: 'error', error: err.stack || JSON.stringify(err) });
    }
  }
}

// consume has as many consumers as the spec says take one job after the other by take(callback), until all are taken or
// the limit has passed. It resolves to the number of jobs done. Callbacks, since a promise for each job would cost more
// than some of the peers do.
function consume(spec, take) {
  const end = spec.limit_ns ? Date.now() + spec.limit_ns / 1e6 : Infinity;
  return new Promise((resolve, reject) => {
    let next = 0, done = 0, active = spec.workers;
    const consumer = () => {
      if (next >= spec.jobs || Date.now() >= end) {
        if (--active === 0) resolve(done);
        return;
      }
      next++;
      take(err => {
        if (err) return reject(err);
        done++;
        consumer();
      });
    };
    for (let i = 0; i < spec.workers; i++) consumer();
  });
}

// promise turns a call with a callback into a promise.
const promise = call => new Promise((resolve, reject) => {
  call((err, value) => err ? reject(err) : resolve(value));
});

// withDatabase gives a connection string its database and its write concern: majority and journaled.
function withDatabase(uri, name) {
  const [base, options] = uri.split('?');
  return `${base.replace(/\/*$/, '')}/${name}?${options ? options + '&' : ''}w=majority&journal=true`;
}

module.exports = { serve, consume, promise, withDatabase };
