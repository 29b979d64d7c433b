/** What the package offers on all platforms. */
export { toKestrelError } from "./calls/statuses.js";
export type { FrameOptions, FrameResult, FrameSource } from "./calls/frames.js";
export type { MapOptions } from "./calls/mapping.js";
export type { EmbedOptions, SkillOptions } from "./calls/preparing.js";
export type { EventOf } from "./client.js";
export type { ClientOptions } from "./connection.js";
export { similarity, vectors } from "./embeddings.js";
export * from "./errors.js";
export { toPixels, type BoxInput, type PointInput, type SpatialRef, type TilesInput } from "./geometry.js";
export { ImageHandle, type ImageInput, type RawPixels } from "./images/images.js";
export type { ImageSource, KnownImagesOptions } from "./images/known.js";
export type { CallOptions, Constraint, HandlingOptions, SamplingOptions } from "./options.js";
export { Outcomes, type ResultsOf, type Tasks } from "./outcomes.js";
export { KestrelStream } from "./stream.js";
export {
  captionTask,
  detectTask,
  pointTask,
  queryTask,
  segmentTask,
  type CaptionOptions,
  type DetectOptions,
  type Length,
  type PointOptions,
  type QueryOptions,
  type Results,
  type SegmentOptions,
  type Skill,
  type Task,
  type Turn,
} from "./tasks.js";
export { VERSION } from "./version.js";
export {
  FinishReason,
  type Box,
  type ImageSize,
  type Logprobs,
  type Point,
  type Timings,
  type Usage,
} from "./gen/kestrel/v1/common_pb.js";
export {
  ModelState,
  type GetLoadResponse,
  type GetServerInfoResponse,
  type Model,
} from "./gen/kestrel/v1/model_service_pb.js";
export type {
  CaptionResponse,
  DetectResponse,
  Embedding,
  EmbedResponse,
  PointResponse,
  QueryResponse,
  RunSkillResponse,
  SegmentResponse,
} from "./gen/kestrel/v1/vision_service_pb.js";
