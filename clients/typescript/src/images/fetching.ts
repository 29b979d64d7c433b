/** Downloads images from addresses. The client does this, because a server never fetches anything for gRPC. */
import { throwIfAborted } from "../calls/attempts.js";
import { InvalidImageError } from "../errors.js";

const TIMEOUT_MS = 30_000;

/** The bytes at `url`: at most `limit`, within 30 s. Throws InvalidImageError. */
export async function fetched(url: string, limit: number, signal?: AbortSignal): Promise<Uint8Array<ArrayBuffer>> {
  const shown = url.length > 200 ? `${url.slice(0, 200)}…` : url;
  const ends = AbortSignal.timeout(TIMEOUT_MS);
  try {
    const response = await fetch(url, { signal: signal === undefined ? ends : AbortSignal.any([signal, ends]) });
    if (!response.ok) throw new InvalidImageError(`can't fetch ${shown}: ${response.status} ${response.statusText}`);
    if (/^(text\/html|application\/xhtml)/i.test(response.headers.get("content-type") ?? "")) {
      throw new InvalidImageError(`${shown} is a web page, not an image`);
    }
    const pieces: Uint8Array[] = [];
    let size = 0;
    for (const reader = response.body?.getReader(); reader !== undefined;) {
      const { done, value } = await reader.read();
      if (done) break;
      size += value.byteLength;
      if (size > limit) {
        await reader.cancel();
        throw new InvalidImageError(`${shown} has more than the limit of ${limit} bytes`);
      }
      pieces.push(value);
    }
    return joined(pieces, size);
  } catch (error) {
    if (error instanceof InvalidImageError) throw error;
    throwIfAborted(signal);
    const why = ends.aborted ? `it took more than ${TIMEOUT_MS / 1000} s` : reasonOf(error);
    throw new InvalidImageError(`can't fetch ${shown}: ${why}`, { cause: error });
  }
}

function joined(pieces: readonly Uint8Array[], size: number): Uint8Array<ArrayBuffer> {
  const whole = new Uint8Array(size);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.byteLength;
  }
  return whole;
}

/** fetch says only "fetch failed"; its cause has more. */
function reasonOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return error.cause instanceof Error && error.cause.message ? error.cause.message : error.message;
}
