/** From the arguments of a method to its request and its call. */
import type { Connection } from "../connection.js";
import {
  AnalyzeRequestSchema,
  CaptionRequestSchema,
  CountTokensRequestSchema,
  DetectRequestSchema,
  EmbeddingDtype,
  EmbeddingParts,
  EmbeddingPooling,
  EmbedRequestSchema,
  GazeRequestSchema,
  PointRequestSchema,
  QueryRequestSchema,
  RunSkillRequestSchema,
  SegmentRequestSchema,
} from "../gen/kestrel/v1/vision_service_pb.js";
import type { ImageInput, ReadFile } from "../images/images.js";
import type { KnownImages } from "../images/known.js";
import { choice, toHandling, type HandlingOptions } from "../options.js";
import type { Tasks } from "../outcomes.js";
import type { Skill } from "../results.js";
import type { Task } from "../tasks.js";
import { message, RequestImages, toTasks, type PutAgain } from "./requests.js";

export interface EmbedOptions extends HandlingOptions {
  /** The parts of the image that have an embedding each. Default: "image", the whole one. */
  parts?: "image" | "crops" | "image-and-crops";
  /** "mean" gives one vector of length 1 each; "none" one vector for each patch. */
  pooling?: "mean" | "none";
  dtype?: "float32" | "float16";
}

const SCHEMAS = {
  query: QueryRequestSchema,
  caption: CaptionRequestSchema,
  point: PointRequestSchema,
  detect: DetectRequestSchema,
  segment: SegmentRequestSchema,
  gaze: GazeRequestSchema,
  skill: RunSkillRequestSchema,
};
const PARTS = {
  image: EmbeddingParts.IMAGE,
  crops: EmbeddingParts.CROPS,
  "image-and-crops": EmbeddingParts.IMAGE_AND_CROPS,
};
const POOLINGS = { mean: EmbeddingPooling.MEAN, none: EmbeddingPooling.NONE };
const DTYPES = { float32: EmbeddingDtype.FLOAT32, float16: EmbeddingDtype.FLOAT16 };

/** Prepares the calls of one client. The methods throw InvalidRequestError. */
export class Requests {
  constructor(
    private readonly connection: Connection,
    private readonly readFile: ReadFile,
    private readonly known: KnownImages,
    private readonly putAgain: PutAgain,
  ) {}

  /** One task as a call of its own. */
  async task(image: ImageInput | null, task: Task, options: HandlingOptions) {
    const images = new RequestImages(this.connection, this.readFile, options);
    const schema = SCHEMAS[task.skill];
    const request = message<(typeof SCHEMAS)[Skill]>(schema, {
      ...(task.skill === "query" ? await conversation(image, task, images) : await about(image, task, images)),
      options: toHandling(options),
    });
    return { call: await images.call(schema, request, this.known, this.putAgain), request: request as never };
  }

  /** Several tasks on one image. */
  async analysis(image: ImageInput, tasks: Tasks, options: HandlingOptions) {
    const images = new RequestImages(this.connection, this.readFile, options);
    const request = message(AnalyzeRequestSchema, {
      image: await images.seen(image),
      tasks: toTasks(tasks),
      options: toHandling(options),
    });
    return { call: await images.call(AnalyzeRequestSchema, request, this.known, this.putAgain), request };
  }

  /** Tasks to count, about an image or without one. */
  async counting(image: ImageInput | null, tasks: Tasks, options: HandlingOptions) {
    const images = new RequestImages(this.connection, this.readFile, options);
    const seen = await images.optional(image);
    const request = message(CountTokensRequestSchema, {
      images: seen === undefined ? [] : [seen],
      tasks: toTasks(tasks),
      options: toHandling(options),
    });
    return { call: await images.call(CountTokensRequestSchema, request, this.known, this.putAgain), request };
  }

  /** Embeddings of an image. */
  async embedding(image: ImageInput, options: EmbedOptions) {
    const { parts, pooling, dtype } = options;
    const images = new RequestImages(this.connection, this.readFile, options);
    const request = message(EmbedRequestSchema, {
      image: await images.seen(image),
      embed: {
        ...(parts === undefined ? {} : { parts: choice("parts", parts, PARTS) }),
        ...(pooling === undefined ? {} : { pooling: choice("pooling", pooling, POOLINGS) }),
        ...(dtype === undefined ? {} : { dtype: choice("dtype", dtype, DTYPES) }),
      },
      options: toHandling(options),
    });
    return { call: await images.call(EmbedRequestSchema, request, this.known, this.putAgain), request };
  }
}

async function about(image: ImageInput | null, task: Task, images: RequestImages): Promise<object> {
  const seen = task.skill === "skill" ? await images.optional(image) : await images.seen(image as ImageInput);
  return { image: seen, [task.skill]: task.fields };
}

/** The image and the further ones, each counted in the turn that shows it. */
async function conversation(image: ImageInput | null, task: Task, images: RequestImages): Promise<object> {
  const first = await images.optional(image);
  const further = await Promise.all(task.images.flat().map(images.more));
  const all = first === undefined ? further : [first, ...further];
  const { history } = task.fields as { history: object[] };
  const turns = history.map((turn, index) => ({
    ...turn,
    numImages: (task.images[index] ?? []).length + (index === 0 && first !== undefined ? 1 : 0),
  }));
  return { images: all, query: { ...task.fields, history: all.length > 0 ? turns : history } };
}
