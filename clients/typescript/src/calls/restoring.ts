/** The images of one call that servers store, and how they are sent again to a server that does not know them. */
import { toBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";

import { InvalidImageError, NotFoundError, RequestTooLargeError, type KestrelError } from "../errors.js";
import type { Image } from "../gen/kestrel/v1/common_pb.js";
import { bytesOf, type ImageInput } from "../images/images.js";
import type { KnownImages } from "../images/known.js";
import type { CallOptions } from "../options.js";

const IMAGE_NOT_FOUND = "IMAGE_NOT_FOUND";
/** How often the images of one call are sent again. Calls may move once more in the meantime. */
const MOST_ATTEMPTS = 3;
/** Of a message: tags and lengths around images. */
const OTHER_BYTES = 1024;

/** Stores an image, on the server of the call that needs it. Gives its id. */
export type Put = (image: Image, options: CallOptions) => Promise<string>;

/** An image of a request that names it by an id, with the id and the image that the caller gave. */
export interface Named {
  image: Image;
  imageId: string;
  held: ImageInput | undefined;
}

/**
 * Repeats a call with its images in place of their ids. Then it does not matter which of several servers gets the call:
 * a front may give the next one to another. An image that is too large for that is put first.
 */
export class Restoring<D extends DescMessage> {
  /** The images that the request names by id. */
  #named: readonly Named[];
  /** The ids of those that it holds instead. */
  readonly #sent = new Map<Image, string>();
  #attempts = 0;

  /** `images`: those of `request` that have ids. It is changed. */
  constructor(
    private readonly known: KnownImages,
    private readonly schema: D,
    private readonly request: MessageShape<D>,
    images: readonly Named[],
    private readonly maxMessageBytes: number,
    private readonly put: Put,
  ) {
    this.#named = images;
    this.#useCurrentIds();
  }

  /** Whether the call can be repeated after `error`, with the images that were missing. Reads files. */
  async restore(error: KestrelError, options: CallOptions): Promise<boolean> {
    if (!(error instanceof NotFoundError) || error.reason !== IMAGE_NOT_FOUND) return false;
    this.#attempts += 1;
    if (this.#named.length === 0 || this.#attempts > MOST_ATTEMPTS) return false;
    let found = false;
    for (const imageId of new Set(this.#named.map((each) => each.imageId))) {
      const contents = await this.#contents(imageId);
      if (contents === undefined) continue;
      found = true;
      if (this.#hold(imageId, contents)) continue;
      this.known.replace(imageId, await this.put(contents, options));
      this.#useCurrentIds();
    }
    return found;
  }

  /** The server that answered the call stores `image`, one of the request, under `imageId`. */
  answered(image: Image, imageId: string): void {
    const given = this.#sent.get(image);
    if (given !== undefined) this.known.replace(given, imageId);
  }

  async #contents(imageId: string): Promise<Image | undefined> {
    const held = this.#named.find((each) => each.imageId === imageId && each.held !== undefined)?.held;
    try {
      return await this.known.contents(imageId, held);
    } catch (error) {
      // The caller learns what the server said.
      if (error instanceof InvalidImageError || error instanceof RequestTooLargeError) return undefined;
      throw error;
    }
  }

  /** Puts the image into the request. Gives whether there is room. */
  #hold(imageId: string, contents: Image): boolean {
    const places = this.#named.filter((each) => each.imageId === imageId).map((each) => each.image);
    const size = toBinary(this.schema, this.request).length + places.length * bytesOf(contents);
    if (size + OTHER_BYTES > this.maxMessageBytes) return false;
    for (const image of places) {
      image.source = contents.source;
      this.#sent.set(image, imageId);
    }
    this.#named = this.#named.filter((each) => each.imageId !== imageId);
    return true;
  }

  #useCurrentIds(): void {
    for (const { image, imageId } of this.#named) {
      image.source = { case: "imageId", value: this.known.currentId(imageId) };
    }
  }
}
