/** From the arguments of a method to its request and its call. */
import type { JsonObject } from "@bufbuild/protobuf";

import type { Connection } from "../connection.js";
import { InvalidRequestError } from "../errors.js";
import {
  AnalyzeRequestSchema,
  CaptionRequestSchema,
  DetectRequestSchema,
  EmbeddingDtype,
  EmbeddingPooling,
  EmbedRequestSchema,
  PointRequestSchema,
  QueryRequestSchema,
  RunSkillRequestSchema,
  SegmentRequestSchema,
  type AnalyzeRequest,
} from "../gen/kestrel/v1/vision_service_pb.js";
import type { ImageInput, ReadFile } from "../images/images.js";
import type { KnownImages } from "../images/known.js";
import { choice, toHandling, toSampling, type HandlingOptions, type SamplingOptions } from "../options.js";
import type { Tasks } from "../outcomes.js";
import { objectFields, type DetectOptions, type PointOptions, type Skill, type Task } from "../tasks.js";
import { message, RequestImages, toTasks, type PutAgain } from "./requests.js";

export interface EmbedOptions extends HandlingOptions {
  /** Whether to return the embedding of the whole image. Default: true. */
  wholeImage?: boolean;
  /** Whether to return those of its crops. Default: false. */
  crops?: boolean;
  /** "mean" gives one vector of length 1 each; "none" one vector for each patch. */
  pooling?: "mean" | "none";
  dtype?: "float32" | "float16";
}

export interface SkillOptions extends HandlingOptions, SamplingOptions {
  /** Plain values by name; the skill defines them. */
  arguments?: JsonObject | undefined;
  settings?: JsonObject | undefined;
}

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
    const schemas = {
      query: QueryRequestSchema,
      caption: CaptionRequestSchema,
      point: PointRequestSchema,
      detect: DetectRequestSchema,
      segment: SegmentRequestSchema,
    };
    const images = new RequestImages(this.connection, this.readFile, options);
    const schema = schemas[task.skill];
    const request = message<(typeof schemas)[Skill]>(schema, {
      ...(await images.field(image, task.skill !== "query")),
      ...(await task.fields(images.more)),
      options: toHandling(options),
    });
    return { call: await images.call(schema, request, this.known, this.putAgain), request: request as never };
  }

  /** Several names in one call, with the same options. */
  async several<D extends typeof PointRequestSchema | typeof DetectRequestSchema>(
    schema: D,
    image: ImageInput,
    objects: readonly string[],
    options: PointOptions & DetectOptions & HandlingOptions,
  ) {
    if (!Array.isArray(objects) || objects.length === 0 || objects.some((each) => typeof each !== "string")) {
      throw new InvalidRequestError("objects: must be a list of one name or more");
    }
    const images = new RequestImages(this.connection, this.readFile, options);
    const request = message(schema, {
      ...(await images.field(image)),
      ...(await objectFields(undefined, options)()),
      objects: [...objects],
      options: toHandling(options),
    });
    return { call: await images.call(schema, request, this.known, this.putAgain), request };
  }

  /** Several tasks on one image. */
  async analysis(image: ImageInput, tasks: Tasks, options: HandlingOptions) {
    const images = new RequestImages(this.connection, this.readFile, options);
    const request: AnalyzeRequest = message(AnalyzeRequestSchema, {
      ...(await images.field(image)),
      tasks: await toTasks(tasks, images),
      options: toHandling(options),
    });
    return { call: await images.call(AnalyzeRequestSchema, request, this.known, this.putAgain), request };
  }

  /** A skill by its name. */
  async skill(skill: string, image: ImageInput | null, options: SkillOptions) {
    const images = new RequestImages(this.connection, this.readFile, options);
    const request = message(RunSkillRequestSchema, {
      ...(await images.field(image, false)),
      skill,
      ...structs({ arguments: options.arguments, settings: options.settings }),
      sampling: toSampling(options),
      options: toHandling(options),
    });
    return { call: await images.call(RunSkillRequestSchema, request, this.known, this.putAgain), request };
  }

  /** Embeddings of an image. */
  async embedding(image: ImageInput, options: EmbedOptions) {
    const { wholeImage, crops, pooling, dtype } = options;
    const images = new RequestImages(this.connection, this.readFile, options);
    const poolings = { mean: EmbeddingPooling.MEAN, none: EmbeddingPooling.NONE };
    const dtypes = { float32: EmbeddingDtype.FLOAT32, float16: EmbeddingDtype.FLOAT16 };
    const request = message(EmbedRequestSchema, {
      ...(await images.field(image)),
      wholeImage,
      crops,
      ...(pooling === undefined ? {} : { pooling: choice("pooling", pooling, poolings) }),
      ...(dtype === undefined ? {} : { dtype: choice("dtype", dtype, dtypes) }),
      options: toHandling(options),
    });
    return { call: await images.call(EmbedRequestSchema, request, this.known, this.putAgain), request };
  }
}

/** Those that are given. Throws InvalidRequestError. */
function structs(given: Readonly<Record<string, JsonObject | undefined>>): object {
  const kept = Object.entries(given).filter(([, value]) => value !== undefined);
  for (const [name, value] of kept) {
    if (typeof value !== "object" || value === null || Array.isArray(value)) {
      throw new InvalidRequestError(`${name}: must be an object of plain values by name`);
    }
  }
  return Object.fromEntries(kept);
}
