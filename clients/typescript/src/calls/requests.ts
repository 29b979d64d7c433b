/** Makes the requests of calls, with their images. */
import { create, toBinary, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import type { Connection } from "../connection.js";
import { InvalidRequestError, RequestTooLargeError } from "../errors.js";
import { toRegion } from "../geometry.js";
import { BoxSchema, type Image, type RequestInfo } from "../gen/kestrel/v1/common_pb.js";
import { bytesOf, ImageHandle, toImage, type ImageInput, type ReadFile } from "../images/images.js";
import type { KnownImages } from "../images/known.js";
import type { TaskSchema } from "../gen/kestrel/v1/vision_service_pb.js";
import { checked, type CallOptions, type HandlingOptions } from "../options.js";
import type { Tasks } from "../outcomes.js";
import { Task } from "../tasks.js";
import type { Call } from "./attempts.js";
import { Restoring, type Named, type Put } from "./restoring.js";

/** Stores an image again, on the server of the call `about`. Gives its new id. */
export type PutAgain = (image: Image, options: CallOptions, about: string) => Promise<string>;

/** Bytes of a message besides its images. */
export const ROOM_BYTES = 64 * 1024;

interface HasImages {
  image?: Image | undefined;
  images?: readonly Image[];
}

/** The images of one call. */
export class RequestImages {
  /** The images that the caller named by an id. */
  readonly #named: Named[] = [];
  #size = 0;

  constructor(
    private readonly connection: Connection,
    private readonly readFile: ReadFile,
    private readonly options: HandlingOptions,
  ) {}

  /** The image that the call is about, if it is about one. */
  async optional(input: ImageInput | null): Promise<Image | undefined> {
    if (input !== null) return this.seen(input);
    if (this.options.region !== undefined) throw new InvalidRequestError("region: needs an image");
    return undefined;
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
    const { background, maxCrops } = this.options;
    if (background !== undefined) image.background = background;
    if (maxCrops !== undefined) image.maxCrops = maxCrops;
    this.#size += bytesOf(image);
    if (this.#size + ROOM_BYTES > maxMessageBytes)
      throw new RequestTooLargeError(this.#size + ROOM_BYTES, maxMessageBytes);
    if (input instanceof ImageHandle) this.#named.push({ image, imageId: input.imageId, held: input.source });
    return image;
  };

  /** The call of a request with these images. */
  async call<D extends DescMessage>(
    schema: D,
    request: MessageShape<D>,
    known: KnownImages,
    putAgain: PutAgain,
  ): Promise<Call> {
    const { options } = this;
    const images = imagesOf(request as HasImages);
    const [first] = images;
    if (first === undefined) return { options, about: "" };
    const digest = await known.key(first);
    const about = options.session === undefined ? digest : "";
    const { maxMessageBytes } = this.connection;
    const put: Put = (image, handling) => putAgain(image, handling, about);
    const restoring =
      this.#named.length > 0 ? new Restoring(known, schema, request, this.#named, maxMessageBytes, put) : undefined;
    const learn = async ({ info }: { info?: RequestInfo | undefined }) => {
      for (const [place, { imageId }] of (info?.images ?? []).entries()) {
        const image = images[place];
        if (image === undefined || !imageId) continue;
        known.learn(imageId, image, place === 0 ? digest : await known.key(image));
        restoring?.answered(image, imageId);
      }
    };
    return {
      options,
      about,
      learn,
      ...(restoring === undefined ? {} : { restore: restoring.restore.bind(restoring) }),
    };
  }
}

/** The images of a request, in the order of the prompt. */
function imagesOf({ image, images }: HasImages): readonly Image[] {
  return images ?? (image === undefined ? [] : [image]);
}

/** The tasks of an analysis. Throws InvalidRequestError. */
export function toTasks(tasks: Tasks): MessageInitShape<typeof TaskSchema>[] {
  return Object.entries(tasks).map(([key, task]) => {
    if (!(task instanceof Task)) throw new InvalidRequestError(`tasks.${key}: is no task, like queryTask("…")`);
    if (task.images.some((each) => each.length > 0)) {
      throw new InvalidRequestError(`tasks.${key}: all tasks are about one image; ask about more with query`);
    }
    return { key, task: { case: task.skill, value: task.fields } as never };
  });
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
