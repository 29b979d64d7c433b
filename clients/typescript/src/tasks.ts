/** Tasks: what a skill is asked to do, for a call of its own, for `analyze`, `map` and `frames`. */
import { InvalidRequestError } from "./errors.js";
import { toSpatialRef, toTiles, type SpatialRef, type TilesInput } from "./geometry.js";
import type { Image } from "./gen/kestrel/v1/common_pb.js";
import {
  CaptionLength,
  MaskFormat,
  type CaptionResponse,
  type DetectResponse,
  type PointResponse,
  type QueryResponse,
  type SegmentResponse,
} from "./gen/kestrel/v1/vision_service_pb.js";
import type { ImageInput } from "./images/images.js";
import { checked, choice, toSampling, type SamplingOptions } from "./options.js";

/** The results of the skills, by their names. */
export interface Results {
  query: QueryResponse;
  caption: CaptionResponse;
  point: PointResponse;
  detect: DetectResponse;
  segment: SegmentResponse;
}

export type Skill = keyof Results;

/** An earlier question with its answer, and the images that it showed besides that of the conversation. */
export interface Turn {
  question: string;
  answer: string;
  images?: readonly ImageInput[];
}

export interface QueryOptions extends SamplingOptions {
  /** Whether the model reasons before it answers. */
  reasoning?: boolean | undefined;
  /** Places in the image that the question refers to. */
  spatialRefs?: readonly SpatialRef[] | undefined;
  /** Earlier turns of the conversation, oldest first. */
  history?: readonly Turn[] | undefined;
  /** More images that the question is about. Not in `analyze` and `frames`. */
  images?: readonly ImageInput[] | undefined;
  /** Instructions for the whole conversation. */
  system?: string | undefined;
  /** Objects without which the question has no answer. */
  presupposes?: readonly string[] | undefined;
  /** With `presupposes`: above this probability that one is absent, nothing is generated (`abstained`). */
  maxAbsence?: number | undefined;
  /** The beginning of the answer, which the model continues. The result has only what follows. */
  answerStart?: string | undefined;
  /** Number of answers to generate, 1 to 16 (`samples`). Only in calls of their own that are no streams. */
  numSamples?: number | undefined;
}

export interface CaptionOptions extends SamplingOptions {
  /** Number of descriptions to generate, 1 to 16 (`samples`). Only in calls of their own that are no streams. */
  numSamples?: number | undefined;
}

export interface PointOptions extends SamplingOptions {
  maxObjects?: number | undefined;
  spatialRefs?: readonly SpatialRef[] | undefined;
  /** Points with a lower score are omitted. */
  minScore?: number | undefined;
  /** For small objects: how to cut the image. Not in `analyze` and `frames`. */
  tiles?: TilesInput | undefined;
}

export interface DetectOptions extends SamplingOptions {
  maxObjects?: number | undefined;
  /** Boxes with a lower score are omitted. */
  minScore?: number | undefined;
  /** Of boxes that overlap by more than this, only one stays. In (0, 1). */
  maxOverlap?: number | undefined;
  /** For small objects: how to cut the image. Not in `analyze` and `frames`. */
  tiles?: TilesInput | undefined;
}

export interface SegmentOptions extends SamplingOptions {
  spatialRefs?: readonly SpatialRef[] | undefined;
  /** The encoding of a mask that the server sends besides the path. */
  mask?: "none" | "svg" | "png" | "rle" | "polygons" | undefined;
  /** An outline with a lower score is omitted. */
  minScore?: number | undefined;
  /** False gives the model's own outline; the default refines it if the model has a refiner. */
  refine?: boolean | undefined;
}

export type Length = "short" | "normal" | "long";
export type ToImage = (image: ImageInput) => Promise<Image>;

/** A task whose result is that of the skill `S`. */
export class Task<S extends Skill = Skill> {
  constructor(
    readonly skill: S,
    /** For the client: the fields of the request that belong to the task. Throws InvalidRequestError. */
    readonly fields: (toImage: ToImage) => Promise<object>,
    /** For the client: the options that only a call of its own can have. */
    readonly alone: readonly string[],
  ) {}
}

/** As `query`. */
export function queryTask(question: string, options: QueryOptions = {}): Task<"query"> {
  const fields = async (toImage: ToImage) => {
    const { reasoning, spatialRefs, history, images, system, presupposes, maxAbsence } = options;
    const { answerStart, numSamples } = options;
    return checkedFields({
      question: text("question", question),
      reasoning,
      system,
      answerStart,
      spatialRefs: spatialRefs?.map(toSpatialRef),
      history: history && (await Promise.all(history.map((turn, index) => toTurn(turn, index, toImage)))),
      images: images && (await Promise.all(images.map(toImage))),
      abstention: presupposes === undefined ? undefined : { objects: [...presupposes], maxAbsence },
      numSamples,
      sampling: toSampling(options),
    });
  };
  if (options.maxAbsence !== undefined && options.presupposes === undefined) {
    throw new InvalidRequestError("maxAbsence: needs presupposes");
  }
  return new Task("query", fields, given(options, ["images", "numSamples"]));
}

/** As `caption`. */
export function captionTask(length: Length = "normal", options: CaptionOptions = {}): Task<"caption"> {
  const lengths = { short: CaptionLength.SHORT, normal: CaptionLength.NORMAL, long: CaptionLength.LONG };
  const chosen = choice("length", length, lengths);
  const { numSamples } = options;
  const fields = async () => checkedFields({ length: chosen, numSamples, sampling: toSampling(options) });
  return new Task("caption", fields, given(options, ["numSamples"]));
}

/** As `point`. */
export function pointTask(object: string, options: PointOptions = {}): Task<"point"> {
  return new Task("point", objectFields(object, options), given(options, ["tiles"]));
}

/** As `detect`. */
export function detectTask(object: string, options: DetectOptions = {}): Task<"detect"> {
  return new Task("detect", objectFields(object, options), given(options, ["tiles"]));
}

/** As `segment`. */
export function segmentTask(object: string, options: SegmentOptions = {}): Task<"segment"> {
  const formats = {
    none: MaskFormat.NONE,
    svg: MaskFormat.SVG,
    png: MaskFormat.PNG,
    rle: MaskFormat.RLE,
    polygons: MaskFormat.POLYGONS,
  };
  const { spatialRefs, mask, minScore, refine } = options;
  const maskFormat = mask === undefined ? undefined : choice("mask", mask, formats);
  const fields = async () =>
    checkedFields({
      object: text("object", object),
      spatialRefs: spatialRefs?.map(toSpatialRef),
      maskFormat,
      minScore,
      refine,
      sampling: toSampling(options),
    });
  return new Task("segment", fields, []);
}

/** The fields of Point and Detect besides the name: for one call about several names. */
export function objectFields(object: string | undefined, options: PointOptions & DetectOptions) {
  const { maxObjects, spatialRefs, minScore, maxOverlap, tiles } = options;
  return async () =>
    checkedFields({
      object: object === undefined ? undefined : text("object", object),
      maxObjects,
      spatialRefs: spatialRefs?.map(toSpatialRef),
      minScore,
      maxOverlap,
      tiles: tiles === undefined ? undefined : toTiles(tiles),
      sampling: toSampling(options),
    });
}

async function toTurn({ question, answer, images }: Turn, index: number, toImage: ToImage) {
  return {
    question: text(`history[${index}].question`, question),
    answer: text(`history[${index}].answer`, answer),
    images: images === undefined ? [] : await Promise.all(images.map(toImage)),
  };
}

/** Without the fields that are undefined. */
function checkedFields(fields: Readonly<Record<string, unknown>>): object {
  return checked("request", () =>
    Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)),
  );
}

function text(name: string, value: string): string {
  if (typeof value === "string") return value;
  throw new InvalidRequestError(`${name}: must be a string`);
}

function given(options: object, names: readonly string[]): readonly string[] {
  return names.filter((name) => (options as Record<string, unknown>)[name] !== undefined);
}
