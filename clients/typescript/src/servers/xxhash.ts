/**
 * XXH64 with the seed 0, the hash of gRPC's ring_hash policy: https://github.com/Cyan4973/xxHash, "XXH64 Algorithm
 * Description". For short texts; a large input would be slow.
 */
const PRIME_1 = 0x9e3779b185ebca87n;
const PRIME_2 = 0xc2b2ae3d27d4eb4fn;
const PRIME_3 = 0x165667b19e3779f9n;
const PRIME_4 = 0x85ebca77c2b2ae63n;
const PRIME_5 = 0x27d4eb2f165667c5n;
const MASK = 0xffffffffffffffffn;

export function xxhash64(bytes: Uint8Array): bigint {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = bytes.length;
  let at = 0;
  let hash: bigint;
  if (length >= 32) {
    const lanes = [(PRIME_1 + PRIME_2) & MASK, PRIME_2, 0n, -PRIME_1 & MASK];
    for (; at + 32 <= length; at += 32) {
      for (const [lane, value] of lanes.entries()) {
        lanes[lane] = round(value, view.getBigUint64(at + 8 * lane, true));
      }
    }
    const [one, two, three, four] = lanes as [bigint, bigint, bigint, bigint];
    hash = (rotated(one, 1n) + rotated(two, 7n) + rotated(three, 12n) + rotated(four, 18n)) & MASK;
    for (const lane of lanes) hash = ((hash ^ round(0n, lane)) * PRIME_1 + PRIME_4) & MASK;
  } else {
    hash = PRIME_5;
  }
  hash = (hash + BigInt(length)) & MASK;
  for (; at + 8 <= length; at += 8) {
    hash = (rotated(hash ^ round(0n, view.getBigUint64(at, true)), 27n) * PRIME_1 + PRIME_4) & MASK;
  }
  if (at + 4 <= length) {
    hash = (rotated(hash ^ ((BigInt(view.getUint32(at, true)) * PRIME_1) & MASK), 23n) * PRIME_2 + PRIME_3) & MASK;
    at += 4;
  }
  for (; at < length; at += 1) {
    hash = (rotated(hash ^ ((BigInt(view.getUint8(at)) * PRIME_5) & MASK), 11n) * PRIME_1) & MASK;
  }
  hash = ((hash ^ (hash >> 33n)) * PRIME_2) & MASK;
  hash = ((hash ^ (hash >> 29n)) * PRIME_3) & MASK;
  return hash ^ (hash >> 32n);
}

function round(lane: bigint, input: bigint): bigint {
  return (rotated((lane + input * PRIME_2) & MASK, 31n) * PRIME_1) & MASK;
}

function rotated(value: bigint, by: bigint): bigint {
  return ((value << by) | (value >> (64n - by))) & MASK;
}
