/**
 * The errors of the client.
 *
 * KestrelError
 * ├── InvalidRequestError       an argument is invalid, nothing was sent
 * │   ├── InvalidImageError     the image can't be read or has an unsupported form
 * │   └── RequestTooLargeError  the message exceeds the client's limit
 * ├── IncompleteStreamError     a stream ended without an error and without its result
 * └── RpcError                  the call ended with a status other than OK
 *     ├── InvalidArgumentError      INVALID_ARGUMENT, OUT_OF_RANGE: see `fieldViolations`
 *     ├── NotFoundError             NOT_FOUND: no such model, skill or image
 *     ├── FailedPreconditionError   FAILED_PRECONDITION: the model lacks the skill
 *     ├── UnauthenticatedError      UNAUTHENTICATED: the token is missing or invalid
 *     ├── PermissionDeniedError     PERMISSION_DENIED: the token does not allow this
 *     ├── OverloadedError           RESOURCE_EXHAUSTED: queue full, or message too large for the server
 *     ├── UnavailableError          UNAVAILABLE: the server is not reachable, starting or stopping
 *     │   └── ConnectionLostError   the connection ended before the call
 *     ├── DeadlineExceededError     DEADLINE_EXCEEDED
 *     ├── RequestCancelledError     CANCELLED: the signal of the call was aborted
 *     ├── UnimplementedError        UNIMPLEMENTED: an older server, or another kind of server
 *     └── ServerError               INTERNAL, UNKNOWN, DATA_LOSS and all other codes
 */
import { Code } from "@connectrpc/connect";

/** Base of all errors of the client. */
export class KestrelError extends Error {}

/** An argument is invalid; nothing was sent. */
export class InvalidRequestError extends KestrelError {}

/** The image can't be read, or has an unsupported form. */
export class InvalidImageError extends InvalidRequestError {}

/** The message would exceed the client's limit; nothing was sent. */
export class RequestTooLargeError extends InvalidRequestError {
  constructor(
    /** In bytes. */
    readonly size: number,
    readonly limit: number,
  ) {
    super(
      `the request has ${size} bytes, the limit is maxMessageBytes=${limit}; ` +
        "send a smaller or compressed image, or raise the limit here and on the server",
    );
  }
}

/** The stream ended without an error and without its result. */
export class IncompleteStreamError extends KestrelError {}

/** An invalid field of the request. */
export interface FieldViolation {
  /** The field's path in the request, like `sampling.top_p`. */
  readonly field: string;
  readonly description: string;
}

/** A limit that refused the call. */
export interface QuotaViolation {
  /** Its owner: a principal, "anonymous" for callers without a name, or "server" for a limit of the whole server. */
  readonly subject: string;
  readonly description: string;
}

/** What a status says besides its code and message. */
export interface StatusDetails {
  fieldViolations?: readonly FieldViolation[];
  reason?: string;
  retryAfterMs?: number | undefined;
  quotaViolations?: readonly QuotaViolation[];
  requestId?: string;
  cause?: unknown;
}

/** The names of gRPC's status codes. */
export type StatusName = (typeof STATUS_NAMES)[number];

const STATUS_NAMES = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
] as const;

/** A call ended with a status other than OK. */
export class RpcError extends KestrelError {
  readonly code: StatusName;
  /** The server's text, without the code. */
  readonly rawMessage: string;
  readonly fieldViolations: readonly FieldViolation[];
  /** A machine-readable word like QUEUE_FULL; empty if the server sent none. */
  readonly reason: string;
  /** Milliseconds to wait before a retry; undefined if the server sent no hint. */
  readonly retryAfterMs: number | undefined;
  /** The limits that refused the call. */
  readonly quotaViolations: readonly QuotaViolation[];
  /** The id of the request, for the server's log; empty if the server sent none. */
  readonly requestId: string;

  constructor(code: number, message: string, details: StatusDetails = {}) {
    const name = STATUS_NAMES[code] ?? "UNKNOWN";
    const violations = details.fieldViolations ?? [];
    const unnamed = violations.filter((each) => !message.includes(each.field) || !message.includes(each.description));
    const fields = unnamed.map((each) => `\n  ${each.field}: ${each.description}`).join("");
    super(`${name}: ${message}${fields}`, details.cause === undefined ? undefined : { cause: details.cause });
    this.code = name;
    this.rawMessage = message;
    this.fieldViolations = violations;
    this.reason = details.reason ?? "";
    this.retryAfterMs = details.retryAfterMs;
    this.quotaViolations = details.quotaViolations ?? [];
    this.requestId = details.requestId ?? "";
  }
}

/** The server found a field missing, malformed or out of range. */
export class InvalidArgumentError extends RpcError {}

/** The server has no such model, skill or image; `reason` says which is missing. */
export class NotFoundError extends RpcError {}

/** The server or the model does not support this call, or not in its present state. */
export class FailedPreconditionError extends RpcError {}

/** The server requires a valid token or certificate. */
export class UnauthenticatedError extends RpcError {}

/** The caller has no permission for this call. */
export class PermissionDeniedError extends RpcError {}

/** A limit of the server refused the call, or the message is too large for the server. */
export class OverloadedError extends RpcError {}

/** The server can't be reached, or is starting or stopping. */
export class UnavailableError extends RpcError {}

/**
 * The server, or its connection, ended while it answered. The client repeats unary calls before it throws this. `reason`
 * is CONNECTION_LOST and `retryAfterMs` is set, by the client.
 */
export class ConnectionLostError extends UnavailableError {}

/** The timeout passed before the call ended. */
export class DeadlineExceededError extends RpcError {}

/** The call was cancelled; `cause` is the reason of its signal. */
export class RequestCancelledError extends RpcError {}

/** The server doesn't know this method. */
export class UnimplementedError extends RpcError {}

/** The server failed while it processed the call. */
export class ServerError extends RpcError {}

const BY_CODE: Partial<Record<number, typeof RpcError>> = {
  [Code.InvalidArgument]: InvalidArgumentError,
  [Code.OutOfRange]: InvalidArgumentError,
  [Code.NotFound]: NotFoundError,
  [Code.FailedPrecondition]: FailedPreconditionError,
  [Code.Unauthenticated]: UnauthenticatedError,
  [Code.PermissionDenied]: PermissionDeniedError,
  [Code.ResourceExhausted]: OverloadedError,
  [Code.Unavailable]: UnavailableError,
  [Code.DeadlineExceeded]: DeadlineExceededError,
  [Code.Canceled]: RequestCancelledError,
  [Code.Unimplemented]: UnimplementedError,
};

/** The error of a status, of the class of its code. */
export function rpcError(code: number, message: string, details: StatusDetails = {}): RpcError {
  const kind = BY_CODE[code] ?? ServerError;
  return new kind(code, message, details);
}

// The keys keep the names, where a minifier gives the classes other ones.
const NAMED = {
  KestrelError,
  InvalidRequestError,
  InvalidImageError,
  RequestTooLargeError,
  IncompleteStreamError,
  RpcError,
  InvalidArgumentError,
  NotFoundError,
  FailedPreconditionError,
  UnauthenticatedError,
  PermissionDeniedError,
  OverloadedError,
  UnavailableError,
  ConnectionLostError,
  DeadlineExceededError,
  RequestCancelledError,
  UnimplementedError,
  ServerError,
};
for (const [name, kind] of Object.entries(NAMED)) Object.defineProperty(kind.prototype, "name", { value: name });
