/** Batches: requests that the server answers later, at low priority, and whose results it keeps. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import { createClient, type CallOptions as Sending, type Client } from "@connectrpc/connect";

import type { Connection, Platform } from "../connection.js";
import {
  DeadlineExceededError,
  InvalidRequestError,
  KestrelError,
  rpcError,
  UnavailableError,
  type RpcError,
} from "../errors.js";
import {
  BatchService,
  type Batch,
  type CreateBatchRequestSchema,
  type StreamBatchResultsResponse,
} from "../gen/kestrel/v1/batch_service_pb.js";
import type { ImageInput } from "../images/images.js";
import type { CallOptions, HandlingOptions } from "../options.js";
import { outcomeOf, Outcomes, type Tasks } from "../outcomes.js";
import type { EmbedResult, Results, Skill } from "../results.js";
import { Task } from "../tasks.js";
import { attempts, sleep } from "./attempts.js";
import type { Requests } from "./preparing.js";
import { toKestrelError } from "./statuses.js";

type Message = MessageInitShape<typeof CreateBatchRequestSchema>;

const MOST_REQUESTS = 50_000;
const LONGEST_ID = 512;
const MOST_INDEX = 2 ** 31 - 1;
const MOST_LISTED = 100;
const PAUSE_MS = 500;
const UNKNOWN = 2;

/** Images (null: none) and what to do with them, by ids of your choice. Several tasks are those of `analyze`. */
export type BatchRequests = Readonly<Record<string, readonly [ImageInput | null, Task | Tasks]>>;

export interface BatchOptions extends HandlingOptions {
  /** Whether the server answers the requests only while nobody else has asked it for a minute. */
  offPeak?: boolean | undefined;
  /** Gets the errors of requests that can't be sent, which the batch then lacks. Default: such a request throws. */
  leftOut?: Map<string, KestrelError> | undefined;
}

export interface BatchResultsOptions extends CallOptions {
  /** The index of the first result. Default: 0. */
  startIndex?: number | undefined;
  /** How long the server may be out of reach, in milliseconds. Default: 60,000. */
  patienceMs?: number | undefined;
}

/** What became of one request. */
export interface BatchResult {
  customId: string;
  /** Its place in the batch, from 0. */
  index: number;
  outcome: Results[Skill] | Outcomes<Record<string, Results[Skill]>> | EmbedResult | RpcError;
}

/** The calls about batches of one client. They throw KestrelError. */
export class Batches {
  readonly #service: Client<typeof BatchService>;

  constructor(
    private readonly connection: Connection,
    private readonly platform: Platform,
    private readonly requests: Requests,
  ) {
    this.#service = createClient(BatchService, platform.transport);
  }

  async create(requests: BatchRequests, { offPeak = false, leftOut, ...options }: BatchOptions): Promise<Batch> {
    if (!this.platform.sendsStreams) {
      throw new InvalidRequestError("createBatch: needs gRPC, which browsers cannot send; use it in Node");
    }
    const entries = checkedEntries(requests);
    const unread = leftOut ?? new Map<string, KestrelError>();
    const prepare = this.#prepared.bind(this);
    async function* messages(): AsyncGenerator<Message> {
      const total = leftOut === undefined ? { totalRequests: entries.length } : {};
      yield { part: { case: "info", value: { offPeak, ...total } } };
      for (const [customId, [image, work]] of entries) {
        const request = await prepare(image, work, options).catch(toKestrelError);
        if (!(request instanceof KestrelError)) {
          yield { part: { case: "request", value: { customId, request } } };
          continue;
        }
        unread.set(customId, request);
        if (leftOut === undefined) return; // The server refuses a batch with fewer requests.
      }
    }
    const sending = {
      headers: this.connection.headers(options, ""),
      timeoutMs: this.connection.timeoutMs(options) ?? 0,
      ...(options.signal === undefined ? {} : { signal: options.signal }),
    };
    try {
      // Once only: two calls would make two batches.
      return known(await this.#service.createBatch(messages(), sending));
    } catch (error) {
      const [first] = unread.values();
      if (first !== undefined && (leftOut === undefined || unread.size === entries.length)) throw first;
      throw toKestrelError(error);
    }
  }

  async get(batchId: string, options: CallOptions): Promise<Batch> {
    return known(await this.#ask(options, (sending) => this.#service.getBatch({ batchId }, sending)));
  }

  async list(options: CallOptions): Promise<Batch[]> {
    const found: Batch[] = [];
    for (let pageToken: string | undefined = ""; pageToken !== undefined;) {
      const page: { pageToken: string; pageSize: number } = { pageToken, pageSize: MOST_LISTED };
      const got = await this.#ask(options, (sending) => this.#service.listBatches(page, sending));
      found.push(...got.batches);
      pageToken = got.nextPageToken || undefined;
    }
    return found;
  }

  async cancel(batchId: string, options: CallOptions): Promise<Batch> {
    return known(await this.#ask(options, (sending) => this.#service.cancelBatch({ batchId }, sending)));
  }

  async delete(batchId: string, options: CallOptions): Promise<void> {
    await this.#ask(options, (sending) => this.#service.deleteBatch({ batchId }, sending));
  }

  async *results(
    batchId: string,
    { startIndex = 0, patienceMs = 60_000, ...options }: BatchResultsOptions,
  ): AsyncGenerator<BatchResult, void> {
    if (!(Number.isInteger(startIndex) && startIndex >= 0 && startIndex <= MOST_INDEX)) {
      throw new InvalidRequestError(`startIndex=${startIndex}: must be a whole number from 0 to ${MOST_INDEX}`);
    }
    if (!(patienceMs >= 0)) throw new InvalidRequestError(`patienceMs=${patienceMs}: must be 0 or more`);
    const timeoutMs = this.connection.timeoutMs({ timeoutMs: options.timeoutMs ?? 0 });
    const endsAt = timeoutMs === undefined ? undefined : performance.now() + timeoutMs;
    const headers = this.connection.headers(options, "");
    for (let since = performance.now(); ;) {
      const leaving = new AbortController(); // The reader may leave before the end.
      const signal = options.signal === undefined ? leaving.signal : AbortSignal.any([options.signal, leaving.signal]);
      const leftMs = endsAt === undefined ? 0 : Math.max(Math.ceil(endsAt - performance.now()), 1);
      try {
        const sending = { headers, timeoutMs: leftMs, signal };
        for await (const message of this.#service.streamBatchResults({ batchId, startIndex }, sending)) {
          startIndex = message.index + 1;
          yield toBatchResult(message);
          since = performance.now();
        }
        return;
      } catch (reason) {
        const error = toKestrelError(reason);
        const now = performance.now();
        if (endsAt !== undefined && now >= endsAt) throw error;
        // The server limits the duration of each stream.
        if (error instanceof DeadlineExceededError) since = now;
        else if (!(error instanceof UnavailableError) || now - since >= patienceMs) throw error;
      } finally {
        leaving.abort();
      }
      await sleep(PAUSE_MS, options.signal);
    }
  }

  #ask<T>(options: CallOptions, send: (sending: Sending) => Promise<T>): Promise<T> {
    return attempts(this.connection, { options, about: "" }, send);
  }

  /** The request as a field of BatchRequest. */
  async #prepared(image: ImageInput | null, work: Task | Tasks, options: HandlingOptions): Promise<never> {
    const { request } =
      work instanceof Task
        ? await this.requests.task(image, work, options)
        : await this.requests.analysis(image as ImageInput, work, options);
    return { case: work instanceof Task ? work.skill : "analyze", value: request } as never;
  }
}

function checkedEntries(requests: BatchRequests) {
  const entries = Object.entries(requests);
  if (!(entries.length >= 1 && entries.length <= MOST_REQUESTS)) {
    throw new InvalidRequestError(`requests: must be 1 to ${MOST_REQUESTS} requests by id, not ${entries.length}`);
  }
  for (const [customId, request] of entries) {
    const where = `requests[${JSON.stringify(customId.slice(0, 100))}]`;
    const length = [...customId].length;
    if (length < 1 || length > LONGEST_ID) {
      throw new InvalidRequestError(`${where}: the id must have 1 to ${LONGEST_ID} characters`);
    }
    if (!(Array.isArray(request) && request.length === 2 && request[1] instanceof Object)) {
      throw new InvalidRequestError(`${where}: must be an image and what to do with it, like ["a.jpg", captionTask()]`);
    }
  }
  return entries;
}

function known({ batch }: { batch?: Batch | undefined }): Batch {
  if (batch === undefined) throw rpcError(UNKNOWN, "the server sent no batch");
  return batch;
}

function toBatchResult({ customId, index, outcome }: StreamBatchResultsResponse): BatchResult {
  const read = outcome.case === "analyze" ? new Outcomes(outcome.value) : outcomeOf({ outcome });
  return { customId, index, outcome: read as BatchResult["outcome"] };
}
