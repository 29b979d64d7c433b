/** The features of an image, which calls take in place of the image. */
import type { ImageSize } from "../gen/kestrel/v1/common_pb.js";
import type { Embedding } from "../gen/kestrel/v1/vision_service_pb.js";
import { InvalidImageError } from "../errors.js";

/**
 * What `embed(image, { pooling: "none" })` gives of the whole image. Another device may run the vision tower, and the
 * server the rest of the same model.
 */
export class ImageFeatures {
  /** `rows` times `dimensions` numbers, little endian: float32, or with half the bytes float16. */
  readonly data: Uint8Array<ArrayBuffer>;

  /**
   * `numbers`: row by row, one row for each patch; the bits of float16 in a Uint16Array. `size`: width and height of the
   * upright image, which results refer to. `adapter`: the one that the image was embedded with. Throws
   * InvalidImageError.
   */
  constructor(
    numbers: Float32Array | Uint16Array,
    readonly rows: number,
    readonly dimensions: number,
    readonly size: Pick<ImageSize, "width" | "height">,
    readonly adapter: string = "",
  ) {
    if (!(numbers instanceof Float32Array || numbers instanceof Uint16Array)) {
      throw new InvalidImageError("features: must be a Float32Array, or a Uint16Array with the bits of float16");
    }
    const sides = { rows, dimensions, "size.width": size.width, "size.height": size.height };
    for (const [name, value] of Object.entries(sides)) {
      if (!Number.isInteger(value) || value < 1)
        throw new InvalidImageError(`features: ${name} is ${value}; it must be a whole number of at least 1`);
    }
    if (numbers.length !== rows * dimensions) {
      throw new InvalidImageError(`features: ${numbers.length} numbers are not ${rows} x ${dimensions}`);
    }
    this.data = new Uint8Array(numbers.byteLength);
    const [view, wide] = [new DataView(this.data.buffer), numbers instanceof Float32Array];
    numbers.forEach((value, at) => (wide ? view.setFloat32(4 * at, value, true) : view.setUint16(2 * at, value, true)));
  }

  /** The features that `embed` gave. `size`: that of the result's image. */
  static of(embedding: Embedding, size: Pick<ImageSize, "width" | "height">, adapter = ""): ImageFeatures {
    const { data, rows, dimensions } = embedding;
    const wide = data.byteLength === 4 * rows * dimensions;
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    const length = Math.floor(data.byteLength / (wide ? 4 : 2));
    const numbers = wide
      ? Float32Array.from({ length }, (_, at) => view.getFloat32(4 * at, true))
      : Uint16Array.from({ length }, (_, at) => view.getUint16(2 * at, true));
    return new ImageFeatures(numbers, rows, dimensions, size, adapter);
  }
}
