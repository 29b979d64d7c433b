/** Makes the requests of calls: loads their images, and puts again the stored ones that the server has dropped. */
import { create, toBinary, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import type { Connection } from "../connection.js";
import { InvalidRequestError, NotFoundError, RequestTooLargeError, type KestrelError } from "../errors.js";
import { toRegion } from "../geometry.js";
import { BoxSchema, type Image } from "../gen/kestrel/v1/common_pb.js";
import { digestOf } from "../images/digests.js";
import { ImageHandle, toImage, type ImageInput, type ReadFile } from "../images/images.js";
import type { AnalyzeTaskSchema } from "../gen/kestrel/v1/vision_service_pb.js";
import { checked, type CallOptions, type HandlingOptions } from "../options.js";
import type { Tasks } from "../outcomes.js";
import { Task } from "../tasks.js";
import type { Call } from "./attempts.js";

const IMAGE_NOT_FOUND = "IMAGE_NOT_FOUND";
/** How often the images of one call are put again. */
const MOST_PUTS = 3;
/** Bytes of a message besides its images. */
export const ROOM_BYTES = 64 * 1024;

/** Stores an image again, on the server of the call `about`. Gives its new id. */
export type PutAgain = (image: Image, options: CallOptions, about: string) => Promise<string>;

/** The images of one call. */
export class RequestImages {
  readonly #stored: { handle: ImageHandle; image: Image }[] = [];
  #first: Image | undefined;
  #size = 0;
  #puts = 0;

  constructor(
    private readonly connection: Connection,
    private readonly readFile: ReadFile,
    private readonly options: HandlingOptions,
  ) {}

  /** The field of a request with the image that the call is about. `null`: none, if it is not required. */
  async field(input: ImageInput | null, isRequired = true): Promise<{ image?: Image }> {
    if (input === null && !isRequired) return {};
    return { image: await this.seen(input as ImageInput) };
  }

  /** The image that the call is about, with its region. */
  async seen(input: ImageInput): Promise<Image> {
    const image = await this.more(input);
    const { region } = this.options;
    if (region !== undefined) image.region = create(BoxSchema, toRegion(region));
    return image;
  }

  /** A further image. */
  readonly more = async (input: ImageInput): Promise<Image> => {
    const { maxMessageBytes } = this.connection;
    const image = await toImage(input, maxMessageBytes, this.readFile, this.options.signal);
    const { background } = this.options;
    if (background !== undefined) image.background = background;
    const { source } = image;
    this.#size +=
      source.case === "encoded" ? source.value.length : source.case === "raw" ? source.value.data.length : 0;
    if (this.#size + ROOM_BYTES > maxMessageBytes)
      throw new RequestTooLargeError(this.#size + ROOM_BYTES, maxMessageBytes);
    if (input instanceof ImageHandle) this.#stored.push({ handle: input, image });
    this.#first ??= image;
    return image;
  };

  /** The call of a request with these images. */
  async call(putAgain: PutAgain): Promise<Call> {
    if (this.#first === undefined && this.options.region !== undefined) {
      throw new InvalidRequestError("region: needs an image");
    }
    const about = this.#first === undefined || this.options.session !== undefined ? "" : await this.#about();
    const restore = (error: KestrelError, options: CallOptions) => this.#restore(error, options, putAgain, about);
    return { options: this.options, about, ...(this.#stored.length > 0 ? { restore } : {}) };
  }

  /** The digest of the first image: of a stored one, that of its contents if they are known. */
  async #about(): Promise<string> {
    const first = this.#first as Image;
    const stored = this.#stored.find(({ image }) => image.source === first.source)?.handle;
    return digestOf(stored?.source ?? first);
  }

  async #restore(error: KestrelError, options: CallOptions, putAgain: PutAgain, about: string): Promise<boolean> {
    if (!(error instanceof NotFoundError) || error.reason !== IMAGE_NOT_FOUND) return false;
    if (this.#puts >= MOST_PUTS || this.#stored.some(({ handle }) => handle.source === undefined)) return false;
    this.#puts += 1;
    for (const { handle, image } of this.#stored) {
      const sent = image.source.value;
      // Another call may have put the image meanwhile.
      if (handle.currentId === sent) handle.currentId = await putAgain(handle.source as Image, options, about);
      image.source.value = handle.currentId;
    }
    return true;
  }
}

/** The tasks of an analysis. Throws InvalidRequestError. */
export async function toTasks(
  tasks: Tasks,
  images: RequestImages,
): Promise<MessageInitShape<typeof AnalyzeTaskSchema>[]> {
  return Promise.all(
    Object.entries(tasks).map(async ([key, task]) => {
      if (!(task instanceof Task)) throw new InvalidRequestError(`tasks.${key}: is no task, like queryTask("…")`);
      if (task.alone.length > 0) {
        throw new InvalidRequestError(`tasks.${key}: ${task.alone.join(" and ")} can stand in a call of its own only`);
      }
      return { key, task: { case: task.skill, value: await task.fields(images.more) } as never };
    }),
  );
}

/** A message of a request. Throws InvalidRequestError for a value that its field can't hold. */
export function message<D extends DescMessage>(schema: D, init: object): MessageShape<D> {
  return checked("request", () => {
    const made = create(schema, init as MessageInitShape<D>);
    // The encoder checks the values. The images, which may be large, are bytes in any case.
    toBinary(schema, { ...made, image: undefined, images: [] });
    return made;
  });
}
