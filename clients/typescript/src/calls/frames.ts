/** A stream of frames: the same tasks on every frame, over one call in both directions. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions as Sending } from "@connectrpc/connect";

import type { Connection } from "../connection.js";
import type { RpcError } from "../errors.js";
import {
  DropReason,
  FramesConfigSchema,
  LateFrames,
  type FrameWork,
  type FramesConfig,
  type StreamFramesRequestSchema,
  type StreamFramesResponse,
} from "../gen/kestrel/v1/vision_service_pb.js";
import type { ImageInput, ReadFile } from "../images/images.js";
import { choice, toHandling, type HandlingOptions } from "../options.js";
import { Outcomes, type ResultsOf, type Tasks } from "../outcomes.js";
import { RequestImages, toTasks } from "./requests.js";
import { fromStatus, toKestrelError } from "./statuses.js";

type Request = MessageInitShape<typeof StreamFramesRequestSchema>;

export interface FrameOptions {
  /** How long a frame may wait. With a budget, a newer frame takes the place of one that waits. */
  latencyBudgetMs?: number | undefined;
  /** What becomes of a frame that would be answered after the budget. Default: "keep". */
  late?: "keep" | "overview" | undefined;
  /** Frames that are computed at the same time. Default: 2. */
  maxInFlight?: number | undefined;
}

/** The images of a camera or of a screen, as they come. */
export type FrameSource = AsyncIterable<ImageInput> | Iterable<ImageInput>;

/** What became of a frame. */
export interface FrameResult<T extends Tasks> {
  /** The frame's number: 1 for the first image of the source. */
  id: bigint;
  /** The results of the tasks; undefined for a frame that was dropped or failed. */
  outcomes: Outcomes<ResultsOf<T>> | undefined;
  /** Why the frame was dropped: a newer one came, or it had waited too long. */
  dropped: "newer" | "stale" | undefined;
  /** Why the frame failed. */
  error: RpcError | undefined;
  /** How the frame was computed. */
  work: FrameWork | undefined;
}

/** Gives a result for each frame, in the order in which they end. Throws KestrelError. */
export async function* frames<T extends Tasks>(
  connection: Connection,
  readFile: ReadFile,
  open: (requests: AsyncIterable<Request>, sending: Sending) => AsyncIterable<StreamFramesResponse>,
  tasks: T,
  source: FrameSource,
  options: HandlingOptions & FrameOptions,
): AsyncGenerator<FrameResult<T>, void> {
  const { latencyBudgetMs, late, maxInFlight } = options;
  const leaving = new AbortController();
  const signal = options.signal === undefined ? leaving.signal : AbortSignal.any([options.signal, leaving.signal]);
  const config = create(FramesConfigSchema, {
    tasks: toTasks(tasks),
    late: late === undefined ? LateFrames.UNSPECIFIED : lateFrames(late),
    ...(latencyBudgetMs === undefined ? {} : { latencyBudgetMs }),
    ...(maxInFlight === undefined ? {} : { maxInFlight }),
    ...optionsOf(options),
  });
  const sending = {
    headers: connection.headers(options, ""),
    timeoutMs: options.timeoutMs ?? 0,
    signal,
  };
  try {
    for await (const message of open(requests(connection, readFile, config, source, options), sending)) {
      yield toResult(message);
    }
  } catch (error) {
    throw toKestrelError(error);
  } finally {
    leaving.abort(); // The reader may leave before the end.
  }
}

async function* requests(
  connection: Connection,
  readFile: ReadFile,
  config: FramesConfig,
  source: FrameSource,
  options: HandlingOptions,
): AsyncGenerator<Request> {
  yield { part: { case: "config", value: config } };
  let id = 0n;
  for await (const input of source) {
    const image = await new RequestImages(connection, readFile, options).seen(input);
    id += 1n;
    yield { part: { case: "frame", value: { frameId: id, image } } };
  }
}

function toResult<T extends Tasks>({ frameId, outcome, work }: StreamFramesResponse): FrameResult<T> {
  const result: FrameResult<T> = { id: frameId, outcomes: undefined, dropped: undefined, error: undefined, work };
  if (outcome.case === "results") {
    result.outcomes = new Outcomes(outcome.value);
  } else if (outcome.case === "dropped") {
    result.dropped = outcome.value === DropReason.STALE ? "stale" : "newer";
  } else if (outcome.case === "error") {
    result.error = fromStatus(outcome.value);
  }
  return result;
}

function lateFrames(late: string): LateFrames {
  return choice("late", late, { keep: LateFrames.KEEP, overview: LateFrames.OVERVIEW });
}

function optionsOf(options: HandlingOptions) {
  const handling = toHandling(options);
  return handling === undefined ? {} : { options: handling };
}
