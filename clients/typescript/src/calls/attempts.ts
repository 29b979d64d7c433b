/** The attempts of one call: it is repeated as the server allows it, within one timeout for all attempts. */
import { Code, ConnectError, createContextValues, type CallOptions as Sending } from "@connectrpc/connect";

import type { Connection } from "../connection.js";
import { OverloadedError, rpcError, UnavailableError, type KestrelError } from "../errors.js";
import type { CallOptions } from "../options.js";
import { Route, ROUTE } from "./routes.js";
import { isFromServer, toKestrelError } from "./statuses.js";

const PUSHBACK_KEY = "grpc-retry-pushback-ms";
const MOST_REPEATS = 3;
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 2000;

/** What one call sends besides its message. */
export interface Call {
  options: CallOptions;
  /** What the call is about (IMAGE_HEADER). */
  about: string;
  /** Sends again the images that `error` says are missing. False: it can't help. */
  restore?: (error: KestrelError, options: CallOptions) => Promise<boolean>;
  /** Told of the response, or of the last message of a stream. */
  learn?: (response: object) => Promise<void>;
}

/**
 * Runs `attempt` until it succeeds, or may not be repeated. Every method may be repeated: two calls of it change no
 * more on the server than one. Throws KestrelError.
 */
export async function attempts<T>(
  connection: Connection,
  call: Call,
  attempt: (sending: Sending) => Promise<T>,
): Promise<T> {
  const { signal } = call.options;
  const timeoutMs = connection.timeoutMs(call.options);
  const endsAt = timeoutMs === undefined ? undefined : performance.now() + timeoutMs;
  const headers = connection.headers(call.options, call.about);
  const route = new Route();
  const contextValues = createContextValues().set(ROUTE, route);
  for (let repeats = 0; ;) {
    throwIfAborted(signal);
    const leftMs = endsAt === undefined ? 0 : Math.max(Math.ceil(endsAt - performance.now()), 1);
    const sending = { headers, contextValues, timeoutMs: leftMs, ...(signal === undefined ? {} : { signal }) };
    try {
      return await attempt(sending);
    } catch (reason) {
      const error = toKestrelError(reason);
      if (await call.restore?.(error, { ...call.options, timeoutMs: leftMs })) continue;
      const pause = pauseMs(reason, error, repeats);
      if (pause === undefined) throw error;
      // Another server is asked at once.
      if (error instanceof UnavailableError && route.hasMore) continue;
      route.tried.clear();
      repeats += 1;
      if (repeats > MOST_REPEATS) throw error;
      if (endsAt !== undefined && performance.now() + pause >= endsAt) throw error;
      await sleep(pause, signal);
    }
  }
}

/** Throws RequestCancelledError. */
export function throwIfAborted(signal: AbortSignal | undefined): void {
  if (signal?.aborted) throw rpcError(Code.Canceled, "the call was cancelled", { cause: signal.reason });
}

/** Resolves after `ms`. Rejects with RequestCancelledError. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const onAbort = () => {
      clearTimeout(timer);
      reject(rpcError(Code.Canceled, "the call was cancelled", { cause: signal?.reason }));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", onAbort, { once: true });
    if (signal?.aborted) onAbort();
  });
}

/** Milliseconds until the next attempt; undefined if there must be none. The server's pause takes precedence. */
function pauseMs(reason: unknown, error: KestrelError, repeats: number): number | undefined {
  const backoff = Math.min(FIRST_PAUSE_MS * 2 ** repeats, LONGEST_PAUSE_MS) * (0.8 + 0.4 * Math.random());
  if (!(reason instanceof ConnectError)) return undefined;
  if (!(error instanceof UnavailableError || (error instanceof OverloadedError && isFromServer(reason))))
    return undefined;
  const asked = reason.metadata.get(PUSHBACK_KEY);
  if (asked === null) return backoff;
  const pause = Number(asked);
  return Number.isFinite(pause) && pause >= 0 ? pause : undefined;
}
