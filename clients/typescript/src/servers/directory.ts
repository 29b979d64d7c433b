/**
 * Directory: a list of servers that changes. It is read again when calls are made, so a client without calls reads
 * nothing, and needs no timer.
 */
import { rpcError } from "../errors.js";
import { UnreadableError } from "./reading.js";

const UNAVAILABLE = 14;
/** A list this many times older than it should be may name none of today's servers: a call waits for the new one. */
const OLD = 10;
const MOST_WAIT_MS = 1000;
/** After a server has failed: the shortest time between two reads. */
const SHORTEST_MS = 1000;

export class Directory {
  /** The servers of the last list that could be read and used. */
  #addresses: readonly string[] | undefined;
  #readAt = -Infinity;
  #reading: Promise<void> | undefined;
  #hasComplained = false;

  /**
   * `name`: for messages. `read` throws UnreadableError. `everyMs`: how old the list may become. `use` takes a list;
   * throws InvalidRequestError if a client cannot use it.
   */
  constructor(
    private readonly name: string,
    private readonly read: () => Promise<readonly string[]>,
    private readonly everyMs: number,
    private readonly use: (addresses: readonly string[]) => void,
  ) {}

  /**
   * Reads the list again if it is due. The first list is waited for; the call throws UnavailableError if it cannot be
   * read, and InvalidRequestError if it cannot be used. Later ones that cannot leave the servers as they are.
   */
  async look(): Promise<void> {
    const age = performance.now() - this.#readAt;
    if (age >= this.everyMs) this.#begin();
    if (this.#addresses === undefined) await this.#first();
    else if (age >= OLD * this.everyMs) await this.#withinLimit();
  }

  /** A server has failed: the list may have changed. */
  suspect(): void {
    if (performance.now() - this.#readAt >= Math.min(SHORTEST_MS, this.everyMs)) this.#begin();
  }

  #begin(): void {
    this.#reading ??= this.#update().finally(() => (this.#reading = undefined));
    this.#reading.catch(() => undefined);
  }

  async #first(): Promise<void> {
    this.#begin();
    await this.#reading;
  }

  async #withinLimit(): Promise<void> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const limit = new Promise<void>((resolve) => (timer = setTimeout(resolve, MOST_WAIT_MS)));
    await Promise.race([this.#reading, limit]);
    clearTimeout(timer);
  }

  /** Throws only while there is no list. */
  async #update(): Promise<void> {
    try {
      const addresses = await this.read();
      const isNew = addresses.join() !== this.#addresses?.join();
      if (isNew) this.use(addresses);
      this.#addresses = addresses;
      this.#hasComplained = false;
    } catch (error) {
      if (this.#addresses !== undefined) this.#complain(error instanceof Error ? error.message : String(error));
      else if (error instanceof UnreadableError) {
        throw rpcError(UNAVAILABLE, `the directory of servers ${this.name}: ${error.message}`, { cause: error });
      } else throw error;
    } finally {
      this.#readAt = performance.now();
    }
  }

  /** Warns, once until the list could be read again. */
  #complain(what: string): void {
    if (!this.#hasComplained) {
      process.emitWarning(`the directory of servers ${this.name}: ${what}; the servers stay as they are`, "Kestrel");
    }
    this.#hasComplained = true;
  }
}
