/** The settings of a client that do not depend on the platform. */
import type { Transport } from "@connectrpc/connect";

import { InvalidRequestError } from "./errors.js";
import type { ReadFile } from "./images/images.js";
import type { KnownImagesOptions } from "./images/known.js";
import type { CallOptions } from "./options.js";

export const DEFAULT_TIMEOUT_MS = 300_000;
export const DEFAULT_MAX_MESSAGE_BYTES = 33 * 1024 * 1024;
/** Names what a call is about: the digest or id of its image, or a session. */
export const IMAGE_HEADER = "x-kestrel-image";

/** A longer time does not fit into the eight digits of `grpc-timeout`. */
const FOREVER_MS = 1e8;

export interface ClientOptions extends KnownImagesOptions {
  /** A bearer token. Without TLS it is sent to this machine only. */
  token?: string | undefined;
  /** Milliseconds for a call with its retries, if the call has no timeout of its own. Default: 300,000. 0: no limit. */
  timeoutMs?: number | undefined;
  /** Metadata that is sent with every call. */
  headers?: Readonly<Record<string, string>> | undefined;
  /** Limit on the bytes of a message in either direction. Default: 33 MiB, as of the server. */
  maxMessageBytes?: number | undefined;
}

/** What a client needs of the platform that it runs on. */
export interface Platform {
  transport: Transport;
  readFile: ReadFile;
  /** Whether a call may send many messages: not over gRPC-Web. */
  sendsStreams: boolean;
  /** Ends the connections. */
  close: () => void;
}

/** The options of a client, checked. Throws InvalidRequestError, naming the option that is invalid. */
export class Connection {
  readonly maxMessageBytes: number;
  readonly #timeoutMs: number;
  readonly #headers: Readonly<Record<string, string>>;

  /** `address`: for messages. `isSafe`: whether a token may be sent there. */
  constructor(address: string, isSafe: boolean, options: ClientOptions) {
    const {
      token,
      timeoutMs = DEFAULT_TIMEOUT_MS,
      headers = {},
      maxMessageBytes = DEFAULT_MAX_MESSAGE_BYTES,
    } = options;
    if (!(Number.isInteger(maxMessageBytes) && maxMessageBytes >= 1)) {
      throw new InvalidRequestError(`maxMessageBytes=${maxMessageBytes}: must be a whole number of at least 1`);
    }
    this.maxMessageBytes = maxMessageBytes;
    this.#timeoutMs = checkedTimeout(timeoutMs);
    if (token !== undefined && !/^[!-~]+$/.test(token)) {
      throw new InvalidRequestError("token: must be visible ASCII characters");
    }
    if (token !== undefined && !isSafe) {
      throw new InvalidRequestError(`token: would be sent to ${address} unencrypted; use TLS`);
    }
    this.#headers = {
      ...checkedHeaders(headers),
      ...(token === undefined ? {} : { authorization: `Bearer ${token}` }),
    };
  }

  /** Milliseconds that a call may take; undefined for no limit. */
  timeoutMs({ timeoutMs }: CallOptions): number | undefined {
    const chosen = timeoutMs === undefined ? this.#timeoutMs : checkedTimeout(timeoutMs);
    return chosen === 0 || chosen >= FOREVER_MS ? undefined : chosen;
  }

  /** The metadata of a call. `about`: the value of IMAGE_HEADER, if the caller gives none. */
  headers({ headers = {}, session }: CallOptions, about: string): Record<string, string> {
    const subject = session === undefined ? about : checkedSession(session);
    return {
      ...(subject ? { [IMAGE_HEADER]: subject } : {}),
      ...this.#headers,
      ...checkedHeaders(headers),
    };
  }
}

/** Whether a host is this machine. */
export function isLoopback(host: string): boolean {
  const name = host.toLowerCase().replace(/^\[|\]$/g, "");
  return name === "localhost" || name === "::1" || /^127\.\d{1,3}\.\d{1,3}\.\d{1,3}$/.test(name);
}

function checkedTimeout(timeoutMs: number): number {
  if (typeof timeoutMs === "number" && timeoutMs >= 0) return timeoutMs;
  throw new InvalidRequestError(`timeoutMs=${timeoutMs}: must be above 0, or 0 for no limit`);
}

function checkedSession(session: string): string {
  if (typeof session === "string" && /^[!-~]{1,128}$/.test(session)) return session;
  throw new InvalidRequestError(`session=${JSON.stringify(session)}: must be 1 to 128 visible ASCII characters`);
}

function checkedHeaders(headers: Readonly<Record<string, string>>): Record<string, string> {
  const checked: Record<string, string> = {};
  for (const [name, value] of Object.entries(headers)) {
    const key = name.toLowerCase();
    if (!/^[0-9a-z_.-]+$/.test(key)) {
      throw new InvalidRequestError(
        `headers: the key ${JSON.stringify(name)} may contain only letters, digits, '_', '-' and '.'`,
      );
    }
    if (typeof value !== "string" || !/^[ -~]*$/.test(value)) {
      throw new InvalidRequestError(`headers: the value of ${JSON.stringify(name)} must be printable ASCII text`);
    }
    checked[key] = value;
  }
  return checked;
}
