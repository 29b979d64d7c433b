/** Outcomes: the results of several tasks, by their keys. */
import { fromStatus } from "./calls/statuses.js";
import { InvalidRequestError, rpcError, RpcError } from "./errors.js";
import type { ImageSize, RequestInfo, Usage } from "./gen/kestrel/v1/common_pb.js";
import type { StreamBatchResultsResponse } from "./gen/kestrel/v1/batch_service_pb.js";
import type { AnalyzeResponse, TaskResult } from "./gen/kestrel/v1/vision_service_pb.js";
import { imageSizeOf, toResult, type Results } from "./results.js";
import type { Task } from "./tasks.js";

/** Tasks by your names for them: 1 to 128 visible ASCII characters each. */
export type Tasks = Readonly<Record<string, Task>>;

/** The results of tasks, by the names of the tasks. */
export type ResultsOf<T extends Tasks> = { [K in keyof T]: T[K] extends Task<infer S> ? Results[S] : never };

const UNKNOWN = 2;

/** The results by key. A task that failed has an error in place of its result, and does not affect the others. */
export class Outcomes<M extends object> {
  readonly #outcomes: ReadonlyMap<string, unknown>;
  readonly usage: Usage;
  readonly info: RequestInfo;
  /** Size of the upright image. */
  readonly imageSize: ImageSize | undefined;

  constructor(response: AnalyzeResponse) {
    this.#outcomes = new Map(response.results.map((each) => [each.key, outcomeOf(each)]));
    this.usage = response.usage as Usage; // A server always sends both.
    this.info = response.info as RequestInfo;
    this.imageSize = imageSizeOf(response.info);
  }

  /** The keys, in the order of the request. */
  get keys(): readonly (keyof M & string)[] {
    return [...this.#outcomes.keys()] as (keyof M & string)[];
  }

  /** The result of a task. Throws the task's RpcError. */
  get<K extends keyof M & string>(key: K): M[K] {
    const outcome = this.outcome(key);
    if (outcome instanceof RpcError) throw outcome;
    return outcome;
  }

  /** The result of a task, or its error. */
  outcome<K extends keyof M & string>(key: K): M[K] | RpcError {
    if (!this.#outcomes.has(key)) throw new InvalidRequestError(`there is no result for ${JSON.stringify(key)}`);
    return this.#outcomes.get(key) as M[K] | RpcError;
  }

  /** The errors of the tasks that failed, by key. */
  get errors(): ReadonlyMap<string, RpcError> {
    const failed = [...this.#outcomes].filter((each): each is [string, RpcError] => each[1] instanceof RpcError);
    return new Map(failed);
  }
}

/** The result of one task, or its error. */
export function outcomeOf({ outcome }: Pick<TaskResult | StreamBatchResultsResponse, "outcome">): unknown {
  if (outcome.case === undefined) return rpcError(UNKNOWN, "the server sent an outcome that this client does not know");
  return outcome.case === "error" ? fromStatus(outcome.value) : toResult(outcome.value);
}
