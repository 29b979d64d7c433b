/** What the package offers on all platforms. */
export { fromStatus, toKestrelError } from "./calls/statuses.js";
export type { BatchOptions, BatchRequests, BatchResult, BatchResultsOptions } from "./calls/batches.js";
export type { FrameOptions, FrameResult, FrameSource } from "./calls/frames.js";
export type { MapOptions } from "./calls/mapping.js";
export type { EmbedOptions } from "./calls/preparing.js";
export type { EventOf } from "./client.js";
export type { ClientOptions } from "./connection.js";
export { similarity, vectors } from "./embeddings.js";
export * from "./errors.js";
export { toPixels, type BoxInput, type PointInput, type SpatialRef, type TilesInput } from "./geometry.js";
export { ImageFeatures } from "./images/features.js";
export { ImageHandle, type ImageInput, type RawPixels } from "./images/images.js";
export type { ImageSource, KnownImagesOptions } from "./images/known.js";
export type { CallOptions, Constraint, HandlingOptions, SamplingOptions, TextOptions } from "./options.js";
export { Outcomes, type ResultsOf, type Tasks } from "./outcomes.js";
export type {
  CaptionResult,
  DetectResult,
  EmbedResult,
  GazeResult,
  PointResult,
  QueryResult,
  Results,
  SegmentResult,
  Skill,
  SkillResult,
} from "./results.js";
export { KestrelStream } from "./stream.js";
export {
  captionTask,
  detectTask,
  gazeTask,
  pointTask,
  queryTask,
  segmentTask,
  skillTask,
  type CaptionOptions,
  type DetectOptions,
  type GazeOptions,
  type Length,
  type Names,
  type PointOptions,
  type QueryOptions,
  type SegmentOptions,
  type SkillTaskOptions,
  type Task,
  type Turn,
} from "./tasks.js";
export { VERSION } from "./version.js";
export { BatchState, type Batch } from "./gen/kestrel/v1/batch_service_pb.js";
export {
  FinishReason,
  type Box,
  type ImageSize,
  type Logprobs,
  type Point,
  type RequestInfo,
  type Timings,
  type Usage,
} from "./gen/kestrel/v1/common_pb.js";
export {
  ModelState,
  type Adapter,
  type GetLoadResponse,
  type GetServerInfoResponse,
  type Model,
} from "./gen/kestrel/v1/model_service_pb.js";
export type {
  Answer,
  Detection,
  Embedding,
  ObjectSearch,
  Outline,
  Reasoning,
} from "./gen/kestrel/v1/vision_service_pb.js";
