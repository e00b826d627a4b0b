'use strict';

const crypto = require('crypto');

// 100 printable random bytes, as every system gets them.
const payloads = Array.from({ length: 1024 }, () => crypto.randomBytes(50).toString('hex'));

module.exports = n => payloads[n % payloads.length];
