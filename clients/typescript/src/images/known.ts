/**
 * KnownImages: what the client knows of images that servers store.
 *
 * The id of an image holds on one server only. If the server restarts, or calls about the image go to another server,
 * that one does not know the id. The client then sends the image again, and uses the new id in place of the old one.
 */
import { create } from "@bufbuild/protobuf";

import { InvalidRequestError } from "../errors.js";
import { ImageSchema, type Image } from "../gen/kestrel/v1/common_pb.js";
import { digestOf } from "./digests.js";
import { bytesOf, type ImageInput } from "./images.js";

export const DEFAULT_KEPT_IMAGE_BYTES = 64 * 1024 * 1024;
/** Ids that the client remembers, with their digests: a few megabytes. */
const MOST_IDS = 16_384;

/** Gives the image that was stored under an id, or null. */
export type ImageSource = (imageId: string) => ImageInput | null | Promise<ImageInput | null>;

export interface KnownImagesOptions {
  /**
   * Limit on the bytes of sent images that the client keeps, to send them again to a server that does not know their
   * ids. Those that were used last stay. Default: 64 MiB; 0 keeps none.
   */
  keptImageBytes?: number | undefined;
  /** Asked for an image that the client does not keep. */
  imageSource?: ImageSource | undefined;
}

/** Ids, digests and contents of images, for one client. */
export class KnownImages {
  readonly #maxBytes: number;
  readonly #source: ImageSource | undefined;
  /** The digest of the image that was stored under an id. */
  readonly #digests = new Recent<string>();
  /** The id that replaces one that its server did not know. */
  readonly #moved = new Recent<string>();
  /** Ids of images that the caller deleted. They are not sent again. */
  readonly #deleted = new Recent<true>();
  /** By digest, the one that was used least recently first. The bytes are the caller's own, not copies. */
  readonly #contents = new Map<string, Image>();
  #numBytes = 0;

  /** `load` reads an image of any size. Throws InvalidRequestError. */
  constructor(
    { keptImageBytes = DEFAULT_KEPT_IMAGE_BYTES, imageSource }: KnownImagesOptions,
    private readonly load: (image: ImageInput) => Promise<Image>,
  ) {
    if (!(typeof keptImageBytes === "number" && keptImageBytes >= 0)) {
      throw new InvalidRequestError(`keptImageBytes=${keptImageBytes}: must be at least 0`);
    }
    if (imageSource !== undefined && typeof imageSource !== "function") {
      throw new InvalidRequestError("imageSource: must be a function that gives the image of an id, or null");
    }
    this.#maxBytes = keptImageBytes;
    this.#source = imageSource;
  }

  /** The id to send in place of `imageId`. */
  currentId(imageId: string): string {
    return this.#moved.get(imageId) ?? imageId;
  }

  /** What calls about this image have in common: the digest of its contents, or an id whose image is not known. */
  async key(image: Image): Promise<string> {
    const { source } = image;
    return source.case === "imageId" ? (this.#digests.get(source.value) ?? source.value) : digestOf(image);
  }

  /** Remembers that a server stores `image` under `imageId`. Without a digest there is nothing to remember. */
  learn(imageId: string, image: Image, digest: string): void {
    const { source } = image;
    if (!imageId || !digest || source.case === "imageId") return;
    this.#digests.put(imageId, digest);
    const kept = this.#contents.get(digest) ?? create(ImageSchema, { source });
    this.#drop(digest);
    if (bytesOf(image) > this.#maxBytes) return;
    this.#contents.set(digest, kept);
    this.#numBytes += bytesOf(kept);
    for (const oldest of this.#contents.keys()) {
      if (this.#numBytes <= this.#maxBytes) break;
      this.#drop(oldest);
    }
  }

  /** Remembers that an image was sent again and has another id now. */
  replace(imageId: string, newId: string): void {
    if (imageId !== newId) this.#moved.put(imageId, newId);
    const digest = this.#digests.get(newId);
    if (digest !== undefined) this.#digests.put(imageId, digest);
  }

  /** The caller deletes the image. */
  forget(imageId: string): void {
    this.#deleted.put(imageId, true);
    const digest = this.#digests.pop(imageId);
    this.#moved.pop(imageId);
    if (digest !== undefined) this.#drop(digest);
  }

  /**
   * The image that was stored under `imageId`; undefined if the client cannot get it. `held`: the one of the caller's
   * handle. It may have changed since: an image with another digest is not given.
   */
  async contents(imageId: string, held: ImageInput | undefined): Promise<Image | undefined> {
    if (this.#deleted.get(imageId)) return undefined;
    const digest = this.#digests.get(imageId);
    const kept = digest === undefined ? undefined : this.#contents.get(digest);
    // The caller may have written other pixels into the same array.
    if (kept !== undefined && (await digestOf(kept)) === digest) return kept;
    const source = held ?? (await this.#source?.(imageId)) ?? undefined;
    if (source === undefined) return undefined;
    const image = await this.load(source);
    if (image.source.case === "imageId") return undefined;
    return digest !== undefined && (await digestOf(image)) !== digest ? undefined : image;
  }

  #drop(digest: string): void {
    const dropped = this.#contents.get(digest);
    if (dropped === undefined) return;
    this.#contents.delete(digest);
    this.#numBytes -= bytesOf(dropped);
  }
}

/** The values of the ids that were used last. */
class Recent<V> {
  readonly #values = new Map<string, V>();

  get(imageId: string): V | undefined {
    const value = this.#values.get(imageId);
    if (value !== undefined) this.put(imageId, value);
    return value;
  }

  put(imageId: string, value: V): void {
    this.#values.delete(imageId);
    this.#values.set(imageId, value);
    for (const oldest of this.#values.keys()) {
      if (this.#values.size <= MOST_IDS) break;
      this.#values.delete(oldest);
    }
  }

  pop(imageId: string): V | undefined {
    const value = this.#values.get(imageId);
    this.#values.delete(imageId);
    return value;
  }
}
