/** Connections to one server: gRPC over HTTP/2, with or without TLS. */
import { readFileSync } from "node:fs";
import type { ClientHttp2Stream, SecureClientSessionOptions } from "node:http2";
import { connect, isIP, type Socket } from "node:net";
import { connect as connectSecurely } from "node:tls";

import type { Transport } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager, type Http2SessionOptions } from "@connectrpc/connect-node";

import { InvalidRequestError } from "../errors.js";
import type { Target } from "./targets.js";

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

/** A server that does not answer to TCP or TLS within this time is unavailable, if there are others. */
const CONNECT_MS = 5000;
/** A connection whose server is gone without a word ends after a ping without an answer. */
const PINGS: Http2SessionOptions = { pingIntervalMs: 20_000, pingTimeoutMs: 10_000 };

/**
 * connect-node's manager of a connection takes its listener from a connection that it replaces. If that one ends with an
 * error afterwards, Node would end the program: https://github.com/connectrpc/connect-es/issues/1768
 */
class Sessions extends Http2SessionManager {
  readonly #heard = new WeakSet<object>();

  override async request(...request: Parameters<Http2SessionManager["request"]>): Promise<ClientHttp2Stream> {
    const stream = await super.request(...request);
    const { session } = stream;
    if (session !== undefined && !this.#heard.has(session)) {
      this.#heard.add(session);
      session.on("error", () => undefined); // Its calls have the error.
    }
    return stream;
  }
}

/** Opens connections with the same settings. */
export class Connector {
  readonly #secure: SecureClientSessionOptions | undefined;

  /** Reads the certificates and keys. Throws InvalidRequestError. */
  constructor(
    tls: boolean | Tls,
    private readonly maxMessageBytes: number,
  ) {
    this.#secure = tls === false ? undefined : toSecure(tls === true ? {} : tls);
  }

  /** The transport of a server. `isOneOfSeveral`: one that does not answer is left soon. */
  open({ host, port, path }: Target, isOneOfSeveral: boolean): { transport: Transport; close: () => void } {
    const baseUrl = `${this.#secure === undefined ? "http" : "https"}://${host}:${port}`;
    const direct = path === undefined ? {} : { createConnection: () => connect({ path }) };
    const limited = isOneOfSeveral && path === undefined ? { createConnection: () => this.#connected(host, port) } : {};
    const sessionManager = new Sessions(baseUrl, isOneOfSeveral ? PINGS : {}, {
      ...this.#secure,
      ...direct,
      ...limited,
    });
    const readMaxBytes = this.maxMessageBytes;
    const transport = createGrpcTransport({ baseUrl, sessionManager, readMaxBytes, acceptCompression: [] });
    return { transport, close: () => sessionManager.abort() };
  }

  #connected(host: string, port: number): Socket {
    const bare = host.replace(/^\[|\]$/g, "");
    const servername = this.#secure?.servername ?? (isIP(bare) ? "" : bare);
    const socket =
      this.#secure === undefined
        ? connect({ host: bare, port })
        : connectSecurely({ ...this.#secure, host: bare, port, servername, ALPNProtocols: ["h2"] });
    const timer = setTimeout(() => {
      const error = new Error(`no connection to ${host}:${port} within ${CONNECT_MS / 1000} s`);
      socket.destroy(Object.assign(error, { code: "ETIMEDOUT" }));
    }, CONNECT_MS);
    for (const event of [this.#secure === undefined ? "connect" : "secureConnect", "close"]) {
      socket.once(event, () => clearTimeout(timer));
    }
    return socket;
  }
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
      const why = error instanceof Error ? error.message : String(error);
      throw new InvalidRequestError(`tls: can't read ${name} ${source}: ${why}`, { cause: error });
    }
  }
  if (!content.includes("-----BEGIN ")) throw new InvalidRequestError(`tls: ${name} is not PEM`);
  return content;
}
