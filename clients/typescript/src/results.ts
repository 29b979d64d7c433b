/** The results of the skills: the responses of kestrel.v1, with what most callers read first. */
import type { Box, ImageSize, Point, RequestInfo, Timings, Usage } from "./gen/kestrel/v1/common_pb.js";
import type {
  CaptionResponse,
  DetectResponse,
  Detection,
  EmbedResponse,
  GazeResponse,
  Outline,
  PointResponse,
  QueryResponse,
  RunSkillResponse,
  SegmentResponse,
} from "./gen/kestrel/v1/vision_service_pb.js";

/** A response as a server sends it: it always has these fields. */
type Sent<M> = Omit<M, "info" | "timings" | "detections"> & {
  info: RequestInfo;
  timings: Timings;
  /** Size of the upright image, which coordinates refer to; undefined without an image. */
  imageSize: ImageSize | undefined;
};
type Used<M> = Sent<Omit<M, "usage">> & { usage: Usage };
type Found<M, D> = Used<M> & { imageSize: ImageSize; detections: (Detection & D)[] };

/** `answer`: the text of the first of `answers`. */
export type QueryResult = Used<QueryResponse> & { answer: string };
/** `caption`: the text of the first of `captions`. */
export type CaptionResult = Used<CaptionResponse> & { caption: string };
export type PointResult = Found<PointResponse, { point: Point }>;
export type DetectResult = Found<DetectResponse, { box: Box }>;
export type SegmentResult = Found<SegmentResponse, { box: Box; outline: Outline }>;
export type GazeResult = Used<GazeResponse> & { imageSize: ImageSize };
export type SkillResult = Used<RunSkillResponse>;
export type EmbedResult = Used<EmbedResponse>;

/** The results of the skills, by their names; `skill` is that of any skill by its name. */
export interface Results {
  query: QueryResult;
  caption: CaptionResult;
  point: PointResult;
  detect: DetectResult;
  segment: SegmentResult;
  gaze: GazeResult;
  skill: SkillResult;
}

export type Skill = keyof Results;

/** Size of the first image. */
export function imageSizeOf(info: RequestInfo | undefined): ImageSize | undefined {
  return info?.images[0]?.size;
}

/** The result of a response, which it becomes. */
export function toResult<R>(response: { info?: RequestInfo | undefined }): R {
  const { answers } = response as Partial<QueryResponse>;
  const { captions } = response as Partial<CaptionResponse>;
  return Object.assign(response, {
    imageSize: imageSizeOf(response.info),
    ...(answers === undefined ? {} : { answer: answers[0]?.text ?? "" }),
    ...(captions === undefined ? {} : { caption: captions[0]?.text ?? "" }),
  }) as R;
}
