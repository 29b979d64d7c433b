/** Route: which of several servers a call has asked in vain. The transport of several servers keeps it. */
import { createContextKey } from "@connectrpc/connect";

export class Route {
  /** Addresses of the servers that were unavailable. */
  readonly tried = new Set<string>();
  /** The server of the attempt under way. */
  current = "";
  /** Whether another server is likely to answer. */
  hasMore = false;
}

export const ROUTE = createContextKey<Route | undefined>(undefined, { description: "the servers of a call" });
