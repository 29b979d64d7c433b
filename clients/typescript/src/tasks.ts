/** Tasks: what a skill is asked to do, for a call of its own, for `analyze`, `map` and `frames`. */
import type { JsonObject } from "@bufbuild/protobuf";

import { InvalidRequestError } from "./errors.js";
import {
  toPlaces,
  toSpatialRef,
  toTiles,
  type BoxInput,
  type PointInput,
  type SpatialRef,
  type TilesInput,
} from "./geometry.js";
import { CaptionLength, MaskFormat, Refinement } from "./gen/kestrel/v1/vision_service_pb.js";
import type { ImageInput } from "./images/images.js";
import { checked, choice, toSampling, toText, type SamplingOptions, type TextOptions } from "./options.js";
import type { Skill } from "./results.js";

/** An earlier question with its answer, and the images that it showed besides that of the conversation. */
export interface Turn {
  question: string;
  answer: string;
  images?: readonly ImageInput[];
}

export interface QueryOptions extends TextOptions {
  /** Whether the model reasons before it answers. */
  reasoning?: boolean | undefined;
  /**
   * With reasoning: largest number of tokens of the reasoning, at least 1; `maxTokens` then limits the answer alone. The
   * reasoning's `finishReason` tells whether it was cut.
   */
  maxReasoningTokens?: number | undefined;
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
  /** Number of answers to generate, 1 to 16 (`answers`). Not in a stream of its own. */
  numSamples?: number | undefined;
}

export interface CaptionOptions extends TextOptions {
  /** Number of descriptions to generate, 1 to 16 (`captions`). Not in a stream of its own. */
  numSamples?: number | undefined;
}

export interface PointOptions extends SamplingOptions {
  /** Largest number of detections of each name. */
  maxObjects?: number | undefined;
  spatialRefs?: readonly SpatialRef[] | undefined;
  /** Points with a lower score are omitted. */
  minScore?: number | undefined;
  /** For small objects: how to cut the image. */
  tiles?: TilesInput | undefined;
}

export interface DetectOptions extends SamplingOptions {
  /** Largest number of detections of each name. */
  maxObjects?: number | undefined;
  /** Boxes with a lower score are omitted. */
  minScore?: number | undefined;
  /** Of boxes that overlap by more than this, only one stays. In (0, 1). */
  maxOverlap?: number | undefined;
  /** For small objects: how to cut the image. */
  tiles?: TilesInput | undefined;
}

export interface SegmentOptions extends SamplingOptions {
  spatialRefs?: readonly SpatialRef[] | undefined;
  /** The encoding of a mask that the server sends besides the path. */
  mask?: "svg" | "png" | "rle" | "polygons" | undefined;
  /** An outline with a lower score is omitted. */
  minScore?: number | undefined;
  /** False gives the model's own outline; the default refines it if the model has a refiner. */
  refine?: boolean | undefined;
}

export interface GazeOptions extends SamplingOptions {
  /** Places of eyes, at most 256. */
  eyes?: PointInput | readonly PointInput[] | undefined;
  /** In place of eyes: faces, at most 256. Default: every face that the model finds. */
  faces?: BoxInput | readonly BoxInput[] | undefined;
  /** Largest number of faces that the model finds. */
  maxFaces?: number | undefined;
  /** Looks 20 times for each face, and takes the mean without outliers. Not with `eyes`. */
  accurate?: boolean | undefined;
}

export interface SkillTaskOptions extends TextOptions {
  /** Plain values by name; the skill defines them. */
  arguments?: JsonObject | undefined;
  settings?: JsonObject | undefined;
}

export type Length = "short" | "normal" | "long";
/** The name of what to find, or up to 256 names. */
export type Names = string | readonly string[];

/** A task whose result is that of the skill `S`. */
export class Task<S extends Skill = Skill> {
  constructor(
    readonly skill: S,
    /** For the client: the fields of the task's message. */
    readonly fields: object,
    /** For the client: the images of the turns of a query, and last the further ones of its question. */
    readonly images: readonly (readonly ImageInput[])[] = [],
  ) {}
}

/** As `query`. */
export function queryTask(question: string, options: QueryOptions = {}): Task<"query"> {
  const { reasoning, spatialRefs, history = [], images = [], system, presupposes, maxAbsence } = options;
  const { answerStart, numSamples, maxReasoningTokens } = options;
  if (maxAbsence !== undefined && presupposes === undefined) {
    throw new InvalidRequestError("maxAbsence: needs presupposes");
  }
  const fields = checkedFields({
    question: text("question", question),
    reasoning,
    maxReasoningTokens,
    system,
    answerStart,
    spatialRefs: spatialRefs?.map((ref, index) => toSpatialRef(ref, index)),
    history: history.map(toTurn),
    abstention: presupposes === undefined ? undefined : { objects: [...presupposes], maxAbsence },
    numSamples,
    ...textFields(options),
  });
  return new Task("query", fields, [...history.map((turn) => turn.images ?? []), images]);
}

/** As `caption`. */
export function captionTask(length: Length = "normal", options: CaptionOptions = {}): Task<"caption"> {
  const lengths = { short: CaptionLength.SHORT, normal: CaptionLength.NORMAL, long: CaptionLength.LONG };
  const { numSamples } = options;
  const chosen = choice("length", length, lengths);
  return new Task("caption", checkedFields({ length: chosen, numSamples, ...textFields(options) }));
}

/** As `point`. */
export function pointTask(objects: Names, options: PointOptions = {}): Task<"point"> {
  return new Task("point", objectFields(objects, options));
}

/** As `detect`. */
export function detectTask(objects: Names, options: DetectOptions = {}): Task<"detect"> {
  return new Task("detect", objectFields(objects, options));
}

/** As `segment`. */
export function segmentTask(objects: Names, options: SegmentOptions = {}): Task<"segment"> {
  const formats = { svg: MaskFormat.SVG, png: MaskFormat.PNG, rle: MaskFormat.RLE, polygons: MaskFormat.POLYGONS };
  const { spatialRefs, mask, minScore, refine } = options;
  const fields = checkedFields({
    objects: names(objects),
    spatialRefs: spatialRefs?.map((ref, index) => toSpatialRef(ref, index)),
    maskFormat: mask === undefined ? undefined : choice("mask", mask, formats),
    minScore,
    refinement: refine === undefined ? undefined : refine ? Refinement.REQUIRED : Refinement.NONE,
    ...samplingFields(options),
  });
  return new Task("segment", fields);
}

/** As `gaze`. */
export function gazeTask(options: GazeOptions = {}): Task<"gaze"> {
  const { eyes, faces, maxFaces, accurate } = options;
  const fields = checkedFields({
    eyes: toPlaces("eyes", "point", eyes),
    faces: toPlaces("faces", "box", faces),
    maxFaces,
    accurate,
    ...samplingFields(options),
  });
  return new Task("gaze", fields);
}

/** As `runSkill`. */
export function skillTask(name: string, options: SkillTaskOptions = {}): Task<"skill"> {
  const { arguments: given, settings } = options;
  for (const [key, value] of Object.entries({ arguments: given, settings })) {
    if (value !== undefined && (typeof value !== "object" || value === null || Array.isArray(value))) {
      throw new InvalidRequestError(`${key}: must be an object of plain values by name`);
    }
  }
  const fields = { name: text("name", name), arguments: given, settings, ...textFields(options) };
  return new Task("skill", checkedFields(fields));
}

function objectFields(objects: Names, options: PointOptions & DetectOptions) {
  const { maxObjects, spatialRefs, minScore, maxOverlap, tiles } = options;
  return checkedFields({
    objects: names(objects),
    maxObjects,
    spatialRefs: spatialRefs?.map((ref, index) => toSpatialRef(ref, index)),
    minScore,
    maxOverlap,
    tiles: tiles === undefined ? undefined : toTiles(tiles),
    ...samplingFields(options),
  });
}

function samplingFields(options: SamplingOptions) {
  return { maxTokens: options.maxTokens, sampling: toSampling(options) };
}

function textFields(options: TextOptions) {
  return { ...samplingFields(options), text: toText(options) };
}

function names(objects: Names): string[] {
  const all = typeof objects === "string" ? [objects] : objects;
  if (!Array.isArray(all) || all.length === 0 || all.some((each) => typeof each !== "string")) {
    throw new InvalidRequestError("objects: must be a name, or a list of one name or more");
  }
  return [...all];
}

function toTurn({ question, answer }: Turn, index: number) {
  return {
    question: text(`history[${index}].question`, question),
    answer: text(`history[${index}].answer`, answer),
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
