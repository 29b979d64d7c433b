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
  const digest = await sha256(source.case === "encoded" ? source.value : withHead(source));
  return Array.from(digest ?? [], (byte) => byte.toString(16).padStart(2, "0"))
    .join("")
    .slice(0, CHARACTERS);
}

/** Undefined where the platform has no SHA-256, as on a page without TLS. */
export async function sha256(bytes: Uint8Array): Promise<Uint8Array<ArrayBuffer> | undefined> {
  const subtle = globalThis.crypto?.subtle;
  return subtle && new Uint8Array(await subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>));
}

function withHead({ case: kind, value }: Extract<Image["source"], { case: "raw" | "features" }>): Uint8Array {
  const text = kind === "raw" ? `${value.width}x${value.height}:${value.format}:` : "features:";
  const head = new TextEncoder().encode(text);
  const whole = new Uint8Array(head.length + value.data.length);
  whole.set(head);
  whole.set(value.data, head.length);
  return whole;
}
