/**
 * Reads lists of servers: what `kestrel-grpc cluster` serves or `cluster follow` writes (JSON with servers, or Envoy's
 * EDS), an address a line, or the addresses of a DNS name.
 */
import { lookup } from "node:dns/promises";
import { open } from "node:fs/promises";

import { InvalidRequestError } from "../errors.js";
import { VERSION } from "../version.js";
import { addressOf, toTarget, type Target } from "./targets.js";

const ANSWER_MS = 5000;
const MOST_BYTES = 8 * 1024 * 1024;
const MOST_SERVERS = 10_000;

/** A list cannot be read. The message does not name it. */
export class UnreadableError extends Error {}

/** The addresses in a file or at an http(s) address, each once and in order. Throws UnreadableError. */
export async function readDirectory(source: string): Promise<readonly string[]> {
  const data = await (/^https?:\/\//i.test(source) ? fetched(source) : content(source)).catch((error: unknown) => {
    throw error instanceof UnreadableError ? error : new UnreadableError(`cannot be read: ${reasonOf(error)}`);
  });
  const found = new Set<string>();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(data);
    const listed = /^\s*[{[]/.test(text) ? inJson(JSON.parse(text)) : inLines(text);
    for (const address of listed) found.add(addressOf(toTarget(address)));
  } catch (error) {
    // An address that is none is said as it is.
    const why = error instanceof InvalidRequestError ? error.message.replace(/^target: /, "") : reasonOf(error);
    throw new UnreadableError(`is no list of servers: ${why}`);
  }
  return checked(found);
}

/** The addresses of a DNS name. Throws UnreadableError. */
export async function readName({ host, port }: Target): Promise<readonly string[]> {
  try {
    const found = await lookup(host.replace(/^\[|\]$/g, ""), { all: true });
    // A server with addresses of both families is one server.
    const same = found.filter((each) => each.family === found[0]?.family);
    const hosts = same.map(({ address, family }) => (family === 6 ? `[${address}]` : address));
    return checked(new Set(hosts.map((each) => `${each}:${port}`)));
  } catch (error) {
    if (error instanceof UnreadableError) throw error;
    throw new UnreadableError(`cannot be resolved: ${reasonOf(error)}`);
  }
}

function checked(found: ReadonlySet<string>): readonly string[] {
  if (found.size === 0) throw new UnreadableError("names no server");
  if (found.size > MOST_SERVERS) {
    throw new UnreadableError(`names ${found.size} servers; the limit is ${MOST_SERVERS}`);
  }
  return [...found].sort();
}

async function content(path: string): Promise<Uint8Array> {
  const file = await open(path);
  try {
    if (!(await file.stat()).isFile()) throw new UnreadableError("cannot be read: it is no file");
    const data = new Uint8Array(MOST_BYTES + 1);
    let size = 0;
    for (let read = -1; read !== 0 && size <= MOST_BYTES; size += read) {
      ({ bytesRead: read } = await file.read(data, size, Math.min(data.length - size, 64 * 1024), size));
    }
    return whole(data, size);
  } finally {
    await file.close();
  }
}

async function fetched(url: string): Promise<Uint8Array> {
  const ends = AbortSignal.timeout(ANSWER_MS);
  const pieces: Uint8Array[] = [];
  let size = 0;
  try {
    const response = await fetch(url, { signal: ends, headers: { "user-agent": `kestrel-client-ts/${VERSION}` } });
    if (!response.ok) throw new UnreadableError(`cannot be read: ${response.status} ${response.statusText}`);
    for (const reader = response.body?.getReader(); reader !== undefined;) {
      const { done, value } = await reader.read();
      if (done) break;
      pieces.push(value);
      size += value.length;
      if (size > MOST_BYTES) await reader.cancel();
    }
  } catch (error) {
    if (ends.aborted) throw new UnreadableError(`cannot be read: takes more than ${ANSWER_MS / 1000} s`);
    throw error;
  }
  return whole(Buffer.concat(pieces), size);
}

function whole(data: Uint8Array, size: number): Uint8Array {
  if (size > MOST_BYTES) throw new UnreadableError(`has more than ${MOST_BYTES} bytes`);
  return data.subarray(0, size);
}

function* inLines(text: string): Generator<string> {
  for (const line of text.split(/\r?\n/)) {
    if (line.trim() && !line.startsWith("#")) yield line.trim();
  }
}

interface Json {
  [key: string]: unknown;
}

/** The servers in the JSON of a cluster, or in that of Envoy's EDS. */
function* inJson(value: unknown): Generator<string> {
  const { servers, resources } = object(value);
  if (servers !== undefined) {
    for (const server of list("servers", servers)) {
      const { address, serving = true } = object(server);
      if (serving === true) yield textOf(address);
    }
    return;
  }
  for (const resource of list("resources", resources)) {
    for (const group of list("endpoints", object(resource)["endpoints"])) {
      for (const each of list("lb_endpoints", object(group)["lb_endpoints"])) {
        const place = object(object(object(object(each)["endpoint"])["address"])["socket_address"]);
        const host = textOf(place["address"]);
        yield `${host.includes(":") ? `[${host}]` : host}:${Number(place["port_value"])}`;
      }
    }
  }
}

function object(value: unknown): Json {
  if (typeof value === "object" && value !== null && !Array.isArray(value)) return value as Json;
  throw new TypeError(`${shown(value)} is no object`);
}

function list(name: string, value: unknown): readonly unknown[] {
  if (Array.isArray(value)) return value;
  throw new TypeError(`${name} is no list`);
}

function textOf(value: unknown): string {
  if (typeof value === "string") return value;
  throw new TypeError(`${shown(value)} is not text`);
}

function shown(value: unknown): string {
  return String(JSON.stringify(value)).slice(0, 100);
}

/** fetch says only "fetch failed"; its cause has more. */
function reasonOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return error.cause instanceof Error && error.cause.message ? error.cause.message : error.message;
}
