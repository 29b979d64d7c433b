/** The numbers of embeddings. */
import { EmbeddingDtype, type Embedding } from "./gen/kestrel/v1/vision_service_pb.js";
import { KestrelError } from "./errors.js";

/** The vectors of an embedding, row by row: one if they are pooled, otherwise one for each patch. */
export function vectors({ data, rows, dimensions, dtype }: Embedding): Float32Array[] {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const width = dtype === EmbeddingDtype.FLOAT16 ? 2 : 4;
  if (data.byteLength !== rows * dimensions * width) {
    throw new KestrelError(`the embedding has ${data.byteLength} bytes, not ${rows} x ${dimensions} numbers`);
  }
  const read = width === 2 ? (at: number) => half(view.getUint16(at, true)) : (at: number) => view.getFloat32(at, true);
  return Array.from({ length: rows }, (_, row) =>
    Float32Array.from({ length: dimensions }, (_, column) => read((row * dimensions + column) * width)),
  );
}

/** The cosine similarity of two vectors. */
export function similarity(one: Float32Array, other: Float32Array): number {
  if (one.length !== other.length) throw new RangeError(`vectors of ${one.length} and ${other.length} numbers`);
  let [product, first, second] = [0, 0, 0];
  one.forEach((value, index) => {
    const also = other[index] as number;
    product += value * also;
    first += value * value;
    second += also * also;
  });
  return product / Math.sqrt(first * second);
}

/** A number of IEEE 754's binary16. */
function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
