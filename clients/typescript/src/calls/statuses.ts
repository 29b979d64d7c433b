/** Reads the errors of calls: the status, and google.rpc's details in it. */
import { fromBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";

import { ConnectionLostError, KestrelError, rpcError, type RpcError, type StatusDetails } from "../errors.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  QuotaFailureSchema,
  RetryInfoSchema,
} from "../gen/google/rpc/error_details_pb.js";
import type { Status } from "../gen/google/rpc/status_pb.js";

const REQUEST_ID_KEY = "x-request-id";
/** The reason of a ConnectionLostError, which no server can send. */
const CONNECTION_LOST = "CONNECTION_LOST";
/** Another server, or another worker of the same one, answers at once. */
const LOST_RETRY_MS = 100;

/** Whether the server itself sent this status, and not the client, a proxy or the network. */
export function isFromServer(error: ConnectError): boolean {
  return error.metadata.has("grpc-status") || error.metadata.has("grpc-status-details-bin");
}

/** The client's error for a failed call. An error of the client stays as it is. */
export function toKestrelError(reason: unknown): KestrelError {
  if (reason instanceof KestrelError) return reason;
  const error = ConnectError.from(reason);
  if (error.cause instanceof KestrelError) return error.cause;
  if (isRefused(error)) return rpcError(Code.Unavailable, "the server refused the call", { cause: error });
  if (isLost(error)) {
    const message = "the connection ended before the answer did; the call may be sent again";
    const details = { reason: CONNECTION_LOST, retryAfterMs: LOST_RETRY_MS, cause: error };
    return new ConnectionLostError(Code.Unavailable, message, details);
  }
  if (isUnreachable(error)) return rpcError(Code.Unavailable, error.rawMessage, { cause: error });
  const details: StatusDetails = { requestId: error.metadata.get(REQUEST_ID_KEY) ?? "" };
  for (const [kind, value] of detailsOf(error)) readDetail(details, kind, value);
  if (error.code === Code.Canceled) details.cause = error.cause ?? error;
  else if (!isFromServer(error)) details.cause = error;
  return rpcError(error.code, error.rawMessage, details);
}

/** The error of one task, name or frame: the error that a separate call would have thrown. */
export function fromStatus({ code, message, details }: Status): RpcError {
  const found: StatusDetails = {};
  for (const { typeUrl, value } of details) readDetail(found, typeUrl.slice(typeUrl.lastIndexOf("/") + 1), value);
  return rpcError(code, message, found);
}

/** Whether the server refused the stream, as one that drains may. HTTP/2 says that it has not begun then. */
function isRefused(error: ConnectError): boolean {
  if (isFromServer(error)) return false;
  const cause = error.cause instanceof Error ? error.cause.message : "";
  return /REFUSED_STREAM/.test(`${error.rawMessage} ${cause}`);
}

/** Whether the connection ended while the server answered. */
function isLost(error: ConnectError): boolean {
  if (isFromServer(error)) return false;
  if (error.code === Code.Aborted) return true;
  // A signal of the caller would be the reason itself.
  if (error.code === Code.Canceled) return /http\/2 stream closed/.test(error.rawMessage);
  const causes = [error.rawMessage, error.cause instanceof Error ? error.cause.message : ""].join(" ");
  return (
    (error.code === Code.Internal || error.code === Code.Unknown || error.code === Code.Unavailable) &&
    /missing trailer|premature|session|http\/2 stream|GOAWAY|terminated|EPIPE/i.test(causes)
  );
}

/**
 * Whether there was no connection: connect-es has a code of its own only for some of Node's errors, and none of
 * fetch's.
 */
function isUnreachable(error: ConnectError): boolean {
  if (isFromServer(error) || (error.code !== Code.Internal && error.code !== Code.Unknown)) return false;
  for (let cause = error.cause; cause instanceof Error; cause = cause.cause) {
    const isOfNode = "code" in cause && typeof cause.code === "string" && !cause.code.startsWith("ERR_HTTP2_");
    if (isOfNode || (cause instanceof TypeError && /fetch|network|load failed/i.test(cause.message))) return true;
  }
  return false;
}

function* detailsOf(error: ConnectError): Generator<[string, Uint8Array]> {
  for (const detail of error.details) {
    if ("type" in detail) yield [detail.type, detail.value];
  }
}

function readDetail(details: StatusDetails, kind: string, value: Uint8Array): void {
  if (kind === "google.rpc.BadRequest") {
    const found = read(BadRequestSchema, value)?.fieldViolations ?? [];
    const violations = found.map(({ field, description }) => ({ field, description }));
    details.fieldViolations = [...(details.fieldViolations ?? []), ...violations];
  } else if (kind === "google.rpc.ErrorInfo") {
    details.reason = read(ErrorInfoSchema, value)?.reason ?? "";
  } else if (kind === "google.rpc.RetryInfo") {
    const delay = read(RetryInfoSchema, value)?.retryDelay;
    if (delay !== undefined) details.retryAfterMs = Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  } else if (kind === "google.rpc.QuotaFailure") {
    const found = read(QuotaFailureSchema, value)?.violations ?? [];
    const violations = found.map(({ subject, description }) => ({ subject, description }));
    details.quotaViolations = [...(details.quotaViolations ?? []), ...violations];
  }
}

/** An unreadable detail is ignored. */
function read<D extends DescMessage>(schema: D, value: Uint8Array): MessageShape<D> | undefined {
  try {
    return fromBinary(schema, value);
  } catch {
    return undefined;
  }
}
