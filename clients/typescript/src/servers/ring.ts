/**
 * Ring: which of several servers gets the calls about an image. It is the ring of gRPC's ring_hash policy, as the Python
 * client sets it up: both clients give an image to the same server of a list.
 */
import { xxhash64 } from "./xxhash.js";

/** Places of a server on the ring. A server that joins takes over some images, and no others move. */
const PLACES = 256;

interface Place<S> {
  at: number;
  server: S;
}

const text = new TextEncoder();

export class Ring<S> {
  readonly #places: readonly Place<S>[];

  /** `servers`: by address. */
  constructor(servers: ReadonlyMap<string, S>) {
    const places = [...servers].flatMap(([address, server]) => placesOf(address).map((at) => ({ at, server })));
    this.#places = places.sort((one, other) => one.at - other.at);
  }

  /** Every server once: the one of `key` first, then those that take its place, in order. */
  *order(key: string): Generator<S> {
    const at = position(key);
    let [low, high] = [0, this.#places.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.#places[middle] as Place<S>).at < at) low = middle + 1;
      else high = middle;
    }
    const seen = new Set<S>();
    for (let step = 0; step < this.#places.length; step += 1) {
      const { server } = this.#places[(low + step) % this.#places.length] as Place<S>;
      if (seen.has(server)) continue;
      seen.add(server);
      yield server;
    }
  }
}

const known = new Map<string, readonly number[]>();
const MOST_KNOWN = 20_000;

/** The places of a server, which do not depend on the others. They are computed once: 256 hashes take milliseconds. */
function placesOf(address: string): readonly number[] {
  let places = known.get(address);
  if (places === undefined) {
    const name = address.replace(/^localhost:/, "127.0.0.1:"); // As the Python client does.
    places = Array.from({ length: PLACES }, (_, number) => position(`${name}_${number}`));
    if (known.size >= MOST_KNOWN) known.clear();
    known.set(address, places);
  }
  return places;
}

/** The upper 53 bits of the hash, which a number holds exactly. */
function position(key: string): number {
  return Number(xxhash64(text.encode(key)) >> 11n);
}
