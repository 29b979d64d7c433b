/**
 * kestrel-client for browsers, and for other platforms with `fetch`: gRPC-Web to the server's HTTP port.
 *
 * Differences from Node: an address is a web address; there are no paths of files; `frames` is missing, and an image of
 * `putImage` must fit a message, because a browser sends one message in a call.
 */
import { createGrpcWebTransport } from "@connectrpc/connect-web";

import { Client } from "./client.js";
import { Connection, isLoopback, type ClientOptions, type Platform } from "./connection.js";
import { InvalidRequestError } from "./errors.js";
import { fetched } from "./images/fetching.js";

export * from "./common.js";

/** A client of the server whose HTTP port has the address `url`; default: the server that the page is from. */
export class KestrelClient extends Client {
  constructor(url: string | URL = hereOr("http://127.0.0.1:2020"), options: ClientOptions = {}) {
    const base = toUrl(url);
    const isSafe = base.protocol === "https:" || isLoopback(base.hostname);
    const connection = new Connection(base.origin, isSafe, options);
    const transport = createGrpcWebTransport({ baseUrl: base.href.replace(/\/$/, "") });
    const platform: Platform = {
      transport,
      readFile: (path, limit) => fetched(new URL(path, hereOr(base.href)).href, limit),
      sendsStreams: false,
      close: () => undefined, // The browser owns the connections.
    };
    super(connection, platform, options);
  }
}

function hereOr(other: string): string {
  const here = globalThis.location?.href;
  return here !== undefined && /^https?:/.test(here) ? here : other;
}

function toUrl(url: string | URL): URL {
  const text = String(url);
  if (!/^https?:\/\//i.test(text) || !URL.canParse(text)) {
    throw new InvalidRequestError(`url: ${text} must begin with http:// or https://; it is that of the HTTP port`);
  }
  const parsed = new URL(text);
  if (parsed.username || parsed.password) throw new InvalidRequestError("url: must hold no password; pass a token");
  parsed.search = parsed.hash = "";
  // The page's own path is not a prefix of the methods.
  if (text === globalThis.location?.href) parsed.pathname = "/";
  return parsed;
}
