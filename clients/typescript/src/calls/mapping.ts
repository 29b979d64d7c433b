/** One task on each of many images. */
import { KestrelError, InvalidRequestError } from "../errors.js";
import type { ImageInput } from "../images/images.js";

export interface MapOptions {
  /** Most requests at once; default: 8. Images are read no faster than requests start. */
  concurrency?: number | undefined;
  /** Called after each image. `total` is undefined for an iterable without a length. */
  progress?: ((done: number, total: number | undefined) => void) | undefined;
}

/** The results in the order of the images. Errors other than KestrelError end the whole. */
export async function mapped<T>(
  images: Iterable<ImageInput> | AsyncIterable<ImageInput>,
  work: (image: ImageInput) => Promise<T>,
  { concurrency = 8, progress }: MapOptions,
): Promise<(T | KestrelError)[]> {
  if (!(Number.isInteger(concurrency) && concurrency >= 1)) {
    throw new InvalidRequestError(`concurrency=${concurrency}: must be a whole number of at least 1`);
  }
  const total = Array.isArray(images) ? images.length : undefined;
  const results: (T | KestrelError)[] = [];
  let started = 0;
  let done = 0;
  // The workers share one iterator, which answers one at a time.
  const queue = entries(images);
  const worker = async () => {
    for await (const image of queue) {
      const index = started++;
      results[index] = await work(image).catch((error: unknown) => {
        if (error instanceof KestrelError) return error;
        throw error;
      });
      progress?.(++done, total);
    }
  };
  await Promise.all(Array.from({ length: concurrency }, worker));
  return results;
}

/** An async iterable whose loops do not close it, so that several can share it. */
function entries(images: Iterable<ImageInput> | AsyncIterable<ImageInput>): AsyncIterable<ImageInput> {
  const all = (async function* () {
    yield* images;
  })();
  return { [Symbol.asyncIterator]: () => ({ next: () => all.next() }) };
}
