/** The digest of an image, by which balancers send calls about one image to one server. */
import type { Image } from "../gen/kestrel/v1/common_pb.js";

const CHARACTERS = 32;

/**
 * The first 32 hexadecimal digits of the SHA-256 of a file, or of pixels with their size and format; the id of a stored
 * image. Empty where the platform has no SHA-256.
 */
export async function digestOf({ source }: Image): Promise<string> {
  if (source.case === "imageId") return source.value;
  if (source.case === undefined) return "";
  const digest = await sha256(source.case === "encoded" ? source.value : withShape(source.value));
  return Array.from(digest ?? [], (byte) => byte.toString(16).padStart(2, "0"))
    .join("")
    .slice(0, CHARACTERS);
}

/** Undefined where the platform has no SHA-256, as on a page without TLS. */
export async function sha256(bytes: Uint8Array): Promise<Uint8Array<ArrayBuffer> | undefined> {
  const subtle = globalThis.crypto?.subtle;
  return subtle && new Uint8Array(await subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>));
}

function withShape(raw: { data: Uint8Array; width: number; height: number; format: number }): Uint8Array {
  const shape = new TextEncoder().encode(`${raw.width}x${raw.height}:${raw.format}:`);
  const whole = new Uint8Array(shape.length + raw.data.length);
  whole.set(shape);
  whole.set(raw.data, shape.length);
  return whole;
}
