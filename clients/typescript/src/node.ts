/** kestrel-client for Node: gRPC over HTTP/2. */
import { readFileSync } from "node:fs";
import { open } from "node:fs/promises";
import type { SecureClientSessionOptions } from "node:http2";
import { connect } from "node:net";

import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { Client } from "./client.js";
import { Connection, DEFAULT_MAX_MESSAGE_BYTES, isLoopback, type ClientOptions, type Platform } from "./connection.js";
import { InvalidImageError, InvalidRequestError, RequestTooLargeError } from "./errors.js";

export * from "./common.js";

/** TLS settings. Certificates and keys are PEM: their contents, or the path of a file. */
export interface Tls {
  /** The trusted authorities; default: those of Node. */
  rootCertificates?: string | Uint8Array | undefined;
  /** The client's certificate chain, for servers that ask for one. Needs `privateKey`. */
  certificate?: string | Uint8Array | undefined;
  privateKey?: string | Uint8Array | undefined;
  /** The name that the server's certificate must contain; default: the host of the target. */
  serverName?: string | undefined;
}

export interface NodeOptions extends ClientOptions {
  /** `true`: TLS with the authorities of Node. Default: no TLS. */
  tls?: boolean | Tls | undefined;
}

const DEFAULT_PORT = 50051;

/** A client of the server at `target`: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH. Without a port: 50051. */
export class KestrelClient extends Client {
  constructor(target = `127.0.0.1:${DEFAULT_PORT}`, options: NodeOptions = {}) {
    const { host, port, path } = toTarget(target);
    const { tls = false, maxMessageBytes = DEFAULT_MAX_MESSAGE_BYTES } = options;
    const isSafe = tls !== false || path !== undefined || isLoopback(host);
    const connection = new Connection(target, isSafe, options);
    const baseUrl = `${tls === false ? "http" : "https"}://${host}:${port}`;
    const sessions = new Http2SessionManager(
      baseUrl,
      {},
      {
        ...(tls === false ? {} : toSecure(tls === true ? {} : tls)),
        ...(path === undefined ? {} : { createConnection: () => connect({ path }) }),
      },
    );
    const platform: Platform = {
      transport: createGrpcTransport({
        baseUrl,
        sessionManager: sessions,
        readMaxBytes: maxMessageBytes,
        acceptCompression: [],
      }),
      readFile,
      sendsStreams: true,
      close: () => sessions.abort(),
    };
    super(connection, platform, options);
  }
}

function toTarget(target: string): { host: string; port: number; path?: string } {
  if (typeof target !== "string" || target === "")
    throw new InvalidRequestError("target: must be a text like HOST:PORT");
  if (/^https?:/i.test(target)) {
    throw new InvalidRequestError(
      `target: ${target} is a web address; gRPC takes HOST:PORT, with the option tls for https. ` +
        "The client of kestrel-client/web takes the address of the HTTP port",
    );
  }
  if (target.startsWith("unix:")) {
    if (process.platform === "win32") throw new InvalidRequestError("target: unix: needs a Unix system");
    const path = target.slice("unix:".length).replace(/^\/\/(?=\/)/, "");
    if (!path) throw new InvalidRequestError("target: unix: needs a path");
    return { host: "localhost", port: DEFAULT_PORT, path };
  }
  const found = /^(\[[0-9a-f:.]+\]|[^:/[\]@?#\s]+)(?::(\d{1,5}))?$/i.exec(target);
  if (found === null && /^[0-9a-f:.]+$/i.test(target)) return { host: `[${target}]`, port: DEFAULT_PORT };
  const port = Number(found?.[2] ?? DEFAULT_PORT);
  if (found === null || port < 1 || port > 65535) {
    throw new InvalidRequestError(
      `target: ${target} must be HOST:PORT, [IPV6]:PORT or unix:PATH, with a port to 65535`,
    );
  }
  return { host: found[1] as string, port };
}

function toSecure({ rootCertificates, certificate, privateKey, serverName }: Tls): SecureClientSessionOptions {
  if ((certificate === undefined) !== (privateKey === undefined)) {
    throw new InvalidRequestError("tls: certificate and privateKey must be given together");
  }
  return {
    ...(rootCertificates === undefined ? {} : { ca: pem("rootCertificates", rootCertificates) }),
    ...(certificate === undefined ? {} : { cert: pem("certificate", certificate) }),
    ...(privateKey === undefined ? {} : { key: pem("privateKey", privateKey) }),
    ...(serverName === undefined ? {} : { servername: serverName }),
  };
}

function pem(name: string, source: string | Uint8Array): Buffer {
  let content = Buffer.from(source as string);
  if (typeof source === "string" && !source.includes("-----BEGIN ")) {
    try {
      content = readFileSync(source);
    } catch (error) {
      throw new InvalidRequestError(`tls: can't read ${name} ${source}: ${reasonOf(error)}`, { cause: error });
    }
  }
  if (!content.includes("-----BEGIN ")) throw new InvalidRequestError(`tls: ${name} is not PEM`);
  return content;
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
