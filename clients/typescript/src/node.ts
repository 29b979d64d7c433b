/** kestrel-client for Node: gRPC over HTTP/2. */
import { open } from "node:fs/promises";

import { Client } from "./client.js";
import { Connection, DEFAULT_MAX_MESSAGE_BYTES, type ClientOptions } from "./connection.js";
import { InvalidImageError, InvalidRequestError, RequestTooLargeError } from "./errors.js";
import { Connector, type Tls } from "./servers/connecting.js";
import { Servers } from "./servers/servers.js";
import { DEFAULT_PORT, isLocal, toListed, toTarget, type Listed } from "./servers/targets.js";

export * from "./common.js";
export type { Tls } from "./servers/connecting.js";

export interface NodeOptions extends ClientOptions {
  /** `true`: TLS with the authorities of Node. Default: no TLS. */
  tls?: boolean | Tls | undefined;
}

/**
 * A client of the server at `target`: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH. Without a port: 50051.
 *
 * For several servers, a list of these, `dns:///NAME:PORT` with the addresses of all servers, or for a list that
 * changes `directory:FILE` or `directory:http://…`. Calls about the same image then go to the same server as long as it
 * serves.
 */
export class KestrelClient extends Client {
  constructor(target: string | readonly string[] = `127.0.0.1:${DEFAULT_PORT}`, options: NodeOptions = {}) {
    const { tls = false, maxMessageBytes = DEFAULT_MAX_MESSAGE_BYTES, token } = options;
    const listed = toListed(target);
    // Those of a list that changes are checked when they are known.
    const known = listed === undefined ? [target as string] : listed.kind === "list" ? listed.addresses : [];
    const isSafe = tls !== false || known.map(toTarget).every(isLocal);
    const connection = new Connection(String(target), isSafe, options);
    const connector = new Connector(tls, maxMessageBytes);
    const { transport, close } = opened(listed, target as string, connector, token !== undefined && tls === false);
    super(connection, { transport, readFile, sendsStreams: true, close }, options);
  }
}

function opened(listed: Listed | undefined, target: string, connector: Connector, isTokenUnsafe: boolean) {
  if (listed === undefined) return connector.open(toTarget(target), false);
  const servers = new Servers(listed, connector, isTokenUnsafe);
  return { transport: servers.transport, close: () => servers.close() };
}

async function readFile(path: string | URL, limit: number): Promise<Uint8Array> {
  try {
    const file = await open(path instanceof URL || !/^file:/i.test(path) ? path : new URL(path));
    try {
      const status = await file.stat();
      const { size } = status;
      if (!status.isFile()) throw new InvalidImageError(`${String(path)} is no file`);
      if (size > limit) throw new RequestTooLargeError(size, limit);
      return await file.readFile();
    } finally {
      await file.close();
    }
  } catch (error) {
    if (error instanceof InvalidRequestError) throw error;
    throw new InvalidImageError(`can't read ${String(path)}: ${reasonOf(error)}`, { cause: error });
  }
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
