/** Images as callers give them, and as messages. */
import { create } from "@bufbuild/protobuf";

import { InvalidImageError, InvalidRequestError, RequestTooLargeError } from "../errors.js";
import { ImageSchema, PixelFormat, type Image, type ImageSize } from "../gen/kestrel/v1/common_pb.js";
import { ImageFeatures } from "./features.js";
import { fetched } from "./fetching.js";

/** Uncompressed pixels, such as a browser's ImageData: rows from top to bottom, channels interleaved. */
export interface RawPixels {
  data: Uint8Array | Uint8ClampedArray;
  width: number;
  height: number;
  /** Default: by the number of bytes for each pixel. */
  format?: "rgb" | "rgba" | "gray" | "bgr";
}

/**
 * An image: the bytes of a file, a Blob or File, an address (http, https, data; in Node also file), pixels, an image
 * that the server stores; as a string an address, or in Node a path; and in place of an image its features.
 */
export type ImageInput = Uint8Array | ArrayBuffer | Blob | URL | string | RawPixels | ImageHandle | ImageFeatures;

/** An image that the server stores, in place of an image. `new ImageHandle(id)` names one by an id of a result. */
export class ImageHandle {
  constructor(
    readonly imageId: string,
    /** Undefined if it is not known. */
    readonly size?: ImageSize | undefined,
    /** The image itself, which the client sends to a server that does not know the id. */
    readonly source?: ImageInput | undefined,
  ) {
    if (!imageId) throw new InvalidRequestError("imageId: must not be empty; the server may store no images");
  }
}

/** Reads a file in Node; in a browser there are none. `limit`: in bytes. */
export type ReadFile = (path: string | URL, limit: number) => Promise<Uint8Array>;

const FORMATS = {
  rgb: PixelFormat.RGB8,
  rgba: PixelFormat.RGBA8,
  gray: PixelFormat.GRAY8,
  bgr: PixelFormat.BGR8,
};
const CHANNELS = { rgb: 3, rgba: 4, gray: 1, bgr: 3 };
const BY_CHANNELS: Partial<Record<number, keyof typeof FORMATS>> = { 1: "gray", 3: "rgb", 4: "rgba" };

/** Loads an image. Throws InvalidImageError, RequestTooLargeError. */
export async function toImage(
  input: ImageInput,
  limit: number,
  readFile: ReadFile,
  signal?: AbortSignal,
): Promise<Image> {
  if (input instanceof ImageHandle) {
    return create(ImageSchema, { source: { case: "imageId", value: input.imageId } });
  }
  if (input instanceof ImageFeatures) {
    const { data, rows, dimensions, size, adapter } = input;
    checkSize(data.byteLength, limit);
    const value = { data, rows, dimensions, width: size.width, height: size.height, ...(adapter && { adapter }) };
    return create(ImageSchema, { source: { case: "features", value } });
  }
  const raw = rawPixels(input);
  if (raw !== undefined) {
    checkSize(raw.data.byteLength, limit);
    return create(ImageSchema, { source: { case: "raw", value: raw } });
  }
  const value = await encoded(input, limit, readFile, signal);
  if (value.byteLength === 0) throw new InvalidImageError("the image is empty");
  checkSize(value.byteLength, limit);
  return create(ImageSchema, { source: { case: "encoded", value } });
}

/** The number of bytes of its file, of its pixels or of its features; 0 for an id. */
export function bytesOf({ source }: Image): number {
  if (source.case === "encoded") return source.value.byteLength;
  return source.case === "raw" || source.case === "features" ? source.value.data.byteLength : 0;
}

async function encoded(
  input: ImageInput,
  limit: number,
  readFile: ReadFile,
  signal: AbortSignal | undefined,
): Promise<Uint8Array<ArrayBuffer>> {
  if (input instanceof Uint8Array) return input as Uint8Array<ArrayBuffer>;
  if (input instanceof ArrayBuffer) return new Uint8Array(input);
  if (typeof Blob !== "undefined" && input instanceof Blob) {
    checkSize(input.size, limit);
    try {
      return new Uint8Array(await input.arrayBuffer());
    } catch (error) {
      throw new InvalidImageError(`can't read the image: ${String(error)}`, { cause: error }); // A file may be gone.
    }
  }
  if (input instanceof URL || typeof input === "string") {
    const text = String(input);
    if (/^(https?|data|blob):/i.test(text)) return fetched(text, limit, signal);
    return (await readFile(input, limit)) as Uint8Array<ArrayBuffer>;
  }
  throw new InvalidImageError(
    "the image must be a Uint8Array, an ArrayBuffer, a Blob, an address, pixels, an ImageHandle, ImageFeatures, or in Node a path",
  );
}

function rawPixels(input: ImageInput) {
  if (typeof input !== "object" || input === null || input instanceof ImageFeatures || !("data" in input))
    return undefined;
  const { data, width, height, format } = input;
  if (!(data instanceof Uint8Array || data instanceof Uint8ClampedArray)) {
    throw new InvalidImageError("the pixels' data must be a Uint8Array or a Uint8ClampedArray");
  }
  if (![width, height].every((side) => Number.isInteger(side) && side >= 1)) {
    throw new InvalidImageError(`pixels of ${width} x ${height}: width and height must be whole numbers of at least 1`);
  }
  const kind = format ?? BY_CHANNELS[data.length / (width * height)];
  if (kind === undefined || !Object.hasOwn(FORMATS, kind) || data.length !== width * height * CHANNELS[kind]) {
    const wanted = kind === undefined ? "1, 3 or 4 bytes a pixel" : `format ${kind}`;
    throw new InvalidImageError(`pixels of ${width} x ${height} and ${data.length} bytes are not of ${wanted}`);
  }
  const bytes = new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
  return { data: bytes, width, height, format: FORMATS[kind] };
}

function checkSize(size: number, limit: number): void {
  if (size > limit) throw new RequestTooLargeError(size, limit);
}
