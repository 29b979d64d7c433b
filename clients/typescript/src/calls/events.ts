/** The messages of a streaming call as events, and the result at their end. */
import type { CallOptions as Sending } from "@connectrpc/connect";

import type { Connection } from "../connection.js";
import { attempts, type Call } from "./attempts.js";
import { toKestrelError } from "./statuses.js";

/** The event of a message, as protobuf-es gives a oneof. */
export interface StreamEvent {
  case: string | undefined;
  value?: unknown;
}

/** A call that is ready to be opened. */
export interface Opening<M> {
  call: Call;
  open: (sending: Sending) => AsyncIterable<M>;
}

/**
 * Gives the events between `started` and `final`, and what `finish` makes of the latter; undefined if it did not come.
 * The call is repeated only before its first message. Throws KestrelError.
 */
export async function* events<M, R>(
  connection: Connection,
  prepare: () => Promise<Opening<M>>,
  read: (message: M) => StreamEvent,
  finish: (final: never) => R,
  signal: AbortSignal,
): AsyncGenerator<StreamEvent, R | undefined> {
  const { call, open } = await prepare();
  const signalled = { ...call, options: { ...call.options, signal } };
  const { messages, first } = await attempts(connection, signalled, async (sending) => {
    const messages = open(sending)[Symbol.asyncIterator]();
    return { messages, first: await messages.next() };
  });
  let result: R | undefined;
  try {
    for (let next = first; !next.done; next = await messages.next()) {
      const event = read(next.value);
      if (event.case === "final") {
        await call.learn?.(event.value as object);
        result = finish(event.value as never);
      } else if (event.case !== undefined && event.case !== "started") yield event;
    }
  } catch (error) {
    throw toKestrelError(error);
  }
  return result;
}
