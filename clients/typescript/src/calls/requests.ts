/** Makes the requests of calls, with their images. */
import { create, toBinary, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import type { Connection } from "../connection.js";
import { InvalidRequestError, RequestTooLargeError } from "../errors.js";
import { toRegion } from "../geometry.js";
import { BoxSchema, type Image } from "../gen/kestrel/v1/common_pb.js";
import { bytesOf, ImageHandle, toImage, type ImageInput, type ReadFile } from "../images/images.js";
import type { KnownImages } from "../images/known.js";
import type { AnalyzeTaskSchema } from "../gen/kestrel/v1/vision_service_pb.js";
import { checked, type CallOptions, type HandlingOptions } from "../options.js";
import type { Tasks } from "../outcomes.js";
import { Task } from "../tasks.js";
import type { Call } from "./attempts.js";
import { imagesOf, Restoring, type Named, type Put } from "./restoring.js";

/** Stores an image again, on the server of the call `about`. Gives its new id. */
export type PutAgain = (image: Image, options: CallOptions, about: string) => Promise<string>;

/** Bytes of a message besides its images. */
export const ROOM_BYTES = 64 * 1024;

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

  /** The field of a request with the image that the call is about. `null`: none, if it is not required. */
  async field(input: ImageInput | null, isRequired = true): Promise<{ image?: Image }> {
    if (input === null && !isRequired) {
      if (this.options.region !== undefined) throw new InvalidRequestError("region: needs an image");
      return {};
    }
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
    const images = [...imagesOf(schema, request)];
    const [first] = images;
    if (first === undefined) return { options, about: "" };
    const digest = await known.key(first);
    const about = options.session === undefined ? digest : "";
    const { maxMessageBytes } = this.connection;
    const put: Put = (image, handling) => putAgain(image, handling, about);
    const restoring =
      this.#named.length > 0 ? new Restoring(known, schema, request, this.#named, maxMessageBytes, put) : undefined;
    const learn = async (response: object) => {
      for (const [place, imageId] of idsOf(response).entries()) {
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

/** The ids under which the server that answered stores the images of the request, in their order. */
function idsOf(response: { images?: readonly { imageId: string }[]; imageId?: string }): readonly string[] {
  const { images = [], imageId = "" } = response;
  return images.length > 0 ? images.map((each) => each.imageId) : [imageId];
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
