/** Outcomes: the results of several tasks, or of several names, by their keys. */
import { fromTaskError } from "./calls/statuses.js";
import { InvalidRequestError, rpcError, RpcError } from "./errors.js";
import type { ImageSize, Usage } from "./gen/kestrel/v1/common_pb.js";
import type { TaskResult } from "./gen/kestrel/v1/vision_service_pb.js";
import type { Results, Task } from "./tasks.js";

/** Tasks by your names for them: 1 to 128 visible ASCII characters each. */
export type Tasks = Readonly<Record<string, Task>>;

/** The results of tasks, by the names of the tasks. */
export type ResultsOf<T extends Tasks> = { [K in keyof T]: T[K] extends Task<infer S> ? Results[S] : never };

const UNKNOWN = 2;

/** The results by key. A task that failed has an error in place of its result, and does not affect the others. */
export class Outcomes<M extends object> {
  readonly #outcomes: ReadonlyMap<string, unknown>;
  readonly usage: Usage | undefined;
  readonly model: string;
  readonly requestId: string;
  /** Size of the upright image. */
  readonly imageSize: ImageSize | undefined;
  /** Id of the stored image, for ImageHandle; empty if the server does not store it. */
  readonly imageId: string;

  /** `names`: the keys in place of those of the results, by their positions. */
  constructor(response: Shared, names?: readonly string[]) {
    this.#outcomes = new Map(response.results.map((each) => [nameOf(each, names), outcomeOf(each)]));
    this.usage = response.usage;
    this.model = response.model;
    this.requestId = response.requestId;
    this.imageSize = response.imageSize;
    this.imageId = response.imageId;
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

interface Shared {
  results: readonly TaskResult[];
  usage?: Usage | undefined;
  model: string;
  requestId: string;
  imageSize?: ImageSize | undefined;
  imageId: string;
}

/** The result of one task, or its error. */
export function outcomeOf({ outcome }: TaskResult): Results[keyof Results] | RpcError {
  if (outcome.case === undefined) return rpcError(UNKNOWN, "the server sent an outcome that this client does not know");
  return outcome.case === "error" ? fromTaskError(outcome.value) : outcome.value;
}

function nameOf({ key }: TaskResult, names: readonly string[] | undefined): string {
  return names?.[Number(key)] ?? key;
}
