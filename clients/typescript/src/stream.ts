/** KestrelStream: the events of a call as they happen, and its result. */
import { IncompleteStreamError } from "./errors.js";

/** Gives events, and at its end the result. `signal` is aborted to end the call. */
export type Run<E, R> = (signal: AbortSignal) => AsyncGenerator<E, R | undefined>;

/**
 * An async iterable of the call's events, for one reader. The call begins with the first event that is asked for, or
 * with `result()`. Leaving the loop early cancels the request on the server.
 */
export class KestrelStream<E, R> implements AsyncIterable<E> {
  readonly #controller = new AbortController();
  readonly #events: AsyncGenerator<E, R | undefined>;
  #hasBegun = false;
  #ended = false;
  #result: R | undefined;
  #failure: unknown;

  /** `signal`: the caller's. */
  constructor(run: Run<E, R>, signal?: AbortSignal) {
    const own = this.#controller.signal;
    this.#events = run(signal === undefined ? own : AbortSignal.any([signal, own]));
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<E, void> {
    try {
      for (;;) {
        const next = await this.#next();
        if (next.done) return;
        yield next.value;
      }
    } finally {
      if (!this.#ended) this.cancel();
    }
  }

  /** The whole result: what the server sends last. Waits for the end, and drops events that nobody has read. */
  async result(): Promise<R> {
    while (!this.#ended) await this.#next();
    if (this.#failure !== undefined) throw this.#failure;
    if (this.#result === undefined) throw new IncompleteStreamError("the stream ended without its result");
    return this.#result;
  }

  /** Ends the call. Whoever waits for an event or for the result gets RequestCancelledError. */
  cancel(): void {
    this.#controller.abort();
    // Who reads to the end frees what the call holds, such as its timer.
    if (this.#hasBegun) void this.result().catch(() => undefined);
  }

  async #next(): Promise<IteratorResult<E, R | undefined>> {
    this.#hasBegun = true;
    try {
      const next = await this.#events.next();
      if (next.done && this.#failure !== undefined) throw this.#failure;
      if (next.done && !this.#ended) {
        this.#ended = true;
        this.#result = next.value;
        if (this.#result === undefined) await this.result();
      }
      return next;
    } catch (error) {
      this.#ended = true;
      this.#failure ??= error;
      throw error;
    }
  }
}
