/** Servers: those of a client, and the transport that gives each call to one of them. */
import { Code, type Transport } from "@connectrpc/connect";

import { ROUTE, Route } from "../calls/routes.js";
import { toKestrelError } from "../calls/statuses.js";
import { IMAGE_HEADER } from "../connection.js";
import { InvalidRequestError, rpcError, UnavailableError } from "../errors.js";
import type { Connector } from "./connecting.js";
import { Directory } from "./directory.js";
import { readDirectory, readName } from "./reading.js";
import { Ring } from "./ring.js";
import { Server } from "./server.js";
import { isLocal, toTarget, type Listed } from "./targets.js";

const DIRECTORY_MS = 1000;
/** As often as gRPC asks DNS, at most. */
const DNS_MS = 30_000;

export class Servers {
  readonly #directory: Directory | undefined;
  #servers: ReadonlyMap<string, Server> = new Map();
  #ring = new Ring(this.#servers);
  #isClosed = false;

  /** `hasToken`: without TLS, all servers must be on this machine. Throws InvalidRequestError. */
  constructor(
    listed: Listed,
    private readonly connector: Connector,
    private readonly isTokenUnsafe: boolean,
    everyMs?: number,
  ) {
    const use = (addresses: readonly string[]) => this.#use(addresses);
    if (listed.kind === "list") {
      use(listed.addresses);
    } else if (listed.kind === "directory") {
      const { source } = listed;
      this.#directory = new Directory(source, () => readDirectory(source), everyMs ?? DIRECTORY_MS, use);
    } else {
      const { name } = listed;
      this.#directory = new Directory(name.host, () => readName(name), everyMs ?? DNS_MS, use);
    }
  }

  /** A call goes to the server that IMAGE_HEADER selects, or to the next one that serves. */
  readonly transport: Transport = {
    unary: async (method, signal, timeoutMs, header, input, values) => {
      const route = values?.get(ROUTE) ?? new Route();
      const server = await this.#pick(header, route);
      const done = server.begin();
      try {
        return await server.transport.unary(method, signal, timeoutMs, header, input, values);
      } catch (reason) {
        this.#note(server, route, reason);
        throw reason;
      } finally {
        done();
      }
    },
    stream: async (method, signal, timeoutMs, header, input, values) => {
      const route = values?.get(ROUTE) ?? new Route();
      const server = await this.#pick(header, route);
      const done = server.begin();
      // A reader that leaves a stream aborts it, and reads no further.
      signal?.addEventListener("abort", done, { once: true });
      const ended = () => {
        signal?.removeEventListener("abort", done);
        done();
      };
      const note = (reason: unknown) => this.#note(server, route, reason);
      try {
        const response = await server.transport.stream(method, signal, timeoutMs, header, input, values);
        return { ...response, message: watched(response.message, note, ended) };
      } catch (reason) {
        note(reason);
        ended();
        throw reason;
      }
    },
  };

  /** Ends the connections, and the calls that are under way. */
  close(): void {
    this.#isClosed = true;
    for (const server of this.#servers.values()) server.abort();
  }

  async #pick(header: HeadersInit | undefined, route: Route): Promise<Server> {
    await this.#directory?.look();
    const key = new Headers(header).get(IMAGE_HEADER) ?? String(Math.random());
    let [fallback, chosen]: (Server | undefined)[] = [];
    for (const server of this.#ring.order(key)) {
      fallback ??= server;
      if (route.tried.has(server.address)) continue;
      if (server.serves()) {
        chosen = server;
        break;
      }
      // If none serves, one that has not been asked for this call may have come back.
      if (route.tried.has(fallback.address)) fallback = server;
    }
    const server = chosen ?? fallback;
    if (server === undefined) throw rpcError(Code.Canceled, "the client is closed");
    route.current = server.address;
    return server;
  }

  #note(server: Server, route: Route, reason: unknown): void {
    if (!(toKestrelError(reason) instanceof UnavailableError)) return;
    server.failed();
    this.#directory?.suspect();
    route.tried.add(server.address);
    route.hasMore = [...this.#servers.values()].some((each) => !route.tried.has(each.address) && each.serves());
  }

  /** Takes a list. Servers that stay keep their connections. Throws InvalidRequestError. */
  #use(addresses: readonly string[]): void {
    if (this.#isClosed) return;
    const targets = addresses.map(toTarget);
    if (this.isTokenUnsafe && !targets.every(isLocal)) {
      throw new InvalidRequestError("token: would be sent to other machines unencrypted; use TLS");
    }
    const before = this.#servers;
    const open = (address: string) => {
      const { transport, close } = this.connector.open(toTarget(address), true);
      return new Server(address, transport, close);
    };
    this.#servers = new Map(addresses.map((address) => [address, before.get(address) ?? open(address)]));
    this.#ring = new Ring(this.#servers);
    for (const [address, server] of before) {
      if (!this.#servers.has(address)) server.leave();
    }
  }
}

async function* watched<T>(
  messages: AsyncIterable<T>,
  note: (reason: unknown) => void,
  ended: () => void,
): AsyncGenerator<T> {
  try {
    yield* messages;
  } catch (reason) {
    note(reason);
    throw reason;
  } finally {
    ended();
  }
}
