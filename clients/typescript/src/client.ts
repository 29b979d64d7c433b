/** Client: the methods of a Kestrel server, on any platform. */
import { create, type DescService } from "@bufbuild/protobuf";
import { createClient, type CallOptions as Sending, type Client as ConnectClient } from "@connectrpc/connect";

import { attempts, sleep, type Call } from "./calls/attempts.js";
import {
  Batches,
  type BatchOptions,
  type BatchRequests,
  type BatchResult,
  type BatchResultsOptions,
} from "./calls/batches.js";
import { events, type Opening, type StreamEvent } from "./calls/events.js";
import { frames, type FrameOptions, type FrameResult, type FrameSource } from "./calls/frames.js";
import { mapped, type MapOptions } from "./calls/mapping.js";
import { Requests, type EmbedOptions } from "./calls/preparing.js";
import { ROOM_BYTES } from "./calls/requests.js";
import { Connection, type Platform } from "./connection.js";
import {
  DeadlineExceededError,
  InvalidRequestError,
  RequestTooLargeError,
  rpcError,
  UnavailableError,
  type KestrelError,
} from "./errors.js";
import type { Batch } from "./gen/kestrel/v1/batch_service_pb.js";
import { ImageSchema, type Image } from "./gen/kestrel/v1/common_pb.js";
import { ImageService } from "./gen/kestrel/v1/image_service_pb.js";
import {
  ModelService,
  type Adapter,
  type GetLoadResponse,
  type GetServerInfoResponse,
  type Model,
} from "./gen/kestrel/v1/model_service_pb.js";
import {
  VisionService,
  type CaptionRequest,
  type CountTokensResponse,
  type DetectRequest,
  type GazeRequest,
  type PointRequest,
  type QueryRequest,
  type RunSkillRequest,
  type SegmentRequest,
  type StreamAnalyzeResponse,
  type StreamCaptionResponse,
  type StreamDetectResponse,
  type StreamEmbedResponse,
  type StreamGazeResponse,
  type StreamPointResponse,
  type StreamQueryResponse,
  type StreamRunSkillResponse,
  type StreamSegmentResponse,
} from "./gen/kestrel/v1/vision_service_pb.js";
import { sha256 } from "./images/digests.js";
import { bytesOf, ImageHandle, toImage, type ImageInput } from "./images/images.js";
import { KnownImages, type KnownImagesOptions } from "./images/known.js";
import { pieces, UPLOAD_BYTES } from "./images/uploads.js";
import type { CallOptions, HandlingOptions } from "./options.js";
import { Outcomes, type ResultsOf, type Tasks } from "./outcomes.js";
import {
  toResult,
  type CaptionResult,
  type DetectResult,
  type EmbedResult,
  type GazeResult,
  type PointResult,
  type QueryResult,
  type Results,
  type SegmentResult,
  type Skill,
  type SkillResult,
} from "./results.js";
import { KestrelStream, type Run } from "./stream.js";
import {
  captionTask,
  detectTask,
  pointTask,
  queryTask,
  gazeTask,
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
} from "./tasks.js";

type Page = { pageToken: string };

const LARGEST_UPLOAD_BYTES = 1024 ** 3;
const DEADLINE_EXCEEDED = 4;

type Streamed<M> = M extends { event: infer E } ? E : never;
/** The events of a stream that are neither its beginning nor its end: `{ case, value }`. */
export type EventOf<M> = Exclude<Streamed<M>, { case: "started" | "final" | undefined }>;

/**
 * A client of one server, or of several behind a balancer. Safe for many calls at once. Every method throws
 * KestrelError. Use the class KestrelClient of the platform.
 */
export class Client {
  readonly #connection: Connection;
  readonly #platform: Platform;
  readonly #vision: ConnectClient<typeof VisionService>;
  readonly #images: ConnectClient<typeof ImageService>;
  readonly #models: ConnectClient<typeof ModelService>;
  readonly #requests: Requests;
  readonly #known: KnownImages;
  readonly #batches: Batches;

  constructor(connection: Connection, platform: Platform, options: KnownImagesOptions) {
    this.#connection = connection;
    this.#platform = platform;
    this.#vision = createClient(VisionService, platform.transport);
    this.#images = createClient(ImageService, platform.transport);
    this.#models = createClient(ModelService, platform.transport);
    this.#known = new KnownImages(options, (image) => toImage(image, LARGEST_UPLOAD_BYTES, platform.readFile));
    this.#requests = new Requests(connection, platform.readFile, this.#known, async (image, options, about) => {
      return (await this.#put(image, options, about)).imageId;
    });
    this.#batches = new Batches(connection, platform, this.#requests);
  }

  /** Ends the connections, and the calls that are under way. */
  close(): void {
    this.#platform.close();
  }

  /** Answers a question, about an image or (with null) without one. */
  query(
    image: ImageInput | null,
    question: string,
    options: QueryOptions & HandlingOptions = {},
  ): Promise<QueryResult> {
    return this.#task(image, () => queryTask(question, options), options);
  }

  /** Describes an image. */
  caption(
    image: ImageInput,
    length: Length = "normal",
    options: CaptionOptions & HandlingOptions = {},
  ): Promise<CaptionResult> {
    return this.#task(image, () => captionTask(length, options), options);
  }

  /** Finds the centre of every object of a kind, or of several kinds: one list, with the names as labels. */
  point(image: ImageInput, objects: Names, options: PointOptions & HandlingOptions = {}): Promise<PointResult> {
    return this.#task(image, () => pointTask(objects, options), options);
  }

  /** Finds the bounding box of every object of a kind, or of several kinds: one list, with the names as labels. */
  detect(image: ImageInput, objects: Names, options: DetectOptions & HandlingOptions = {}): Promise<DetectResult> {
    return this.#task(image, () => detectTask(objects, options), options);
  }

  /** Outlines one object of each name. */
  segment(image: ImageInput, objects: Names, options: SegmentOptions & HandlingOptions = {}): Promise<SegmentResult> {
    return this.#task(image, () => segmentTask(objects, options), options);
  }

  /** Finds what people look at. Each gaze has an `eye`, and a `target` unless that is outside the image. */
  gaze(image: ImageInput, options: GazeOptions & HandlingOptions = {}): Promise<GazeResult> {
    return this.#task(image, () => gazeTask(options), options);
  }

  /** Runs several tasks on one image at once. A task that fails does not affect the others. */
  async analyze<T extends Tasks>(
    image: ImageInput,
    tasks: T,
    options: HandlingOptions = {},
  ): Promise<Outcomes<ResultsOf<T>>> {
    const { call, request } = await this.#requests.analysis(image, tasks, options);
    return new Outcomes(await this.#unary(call, (sending) => this.#vision.analyze(request, sending)));
  }

  /** Runs any skill of the server by its name. `null`: the skill takes no image. */
  runSkill(
    skill: string,
    image: ImageInput | null,
    options: SkillTaskOptions & HandlingOptions = {},
  ): Promise<SkillResult> {
    return this.#task(image, () => skillTask(skill, options), options);
  }

  /** Counts the positions of the context that tasks would take. The model computes nothing. `null`: without an image. */
  async countTokens(
    image: ImageInput | null,
    tasks: Tasks,
    options: HandlingOptions = {},
  ): Promise<CountTokensResponse> {
    const { call, request } = await this.#requests.counting(image, tasks, options);
    return this.#unary(call, (sending) => this.#vision.countTokens(request, sending));
  }

  /** Returns embeddings of an image, for search and comparison; `vectors` reads them. */
  async embed(image: ImageInput, options: EmbedOptions = {}): Promise<EmbedResult> {
    const { call, request } = await this.#requests.embedding(image, options);
    return toResult(await this.#unary(call, (sending) => this.#vision.embed(request, sending)));
  }

  /** As `query`, with the text as it is generated: events `textDelta` and `reasoningDelta`. */
  streamQuery(
    image: ImageInput | null,
    question: string,
    options: QueryOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamQueryResponse>, QueryResult> {
    const open = (request: QueryRequest, sending: Sending) => this.#vision.streamQuery(request, sending);
    return this.#streamTask(image, () => queryTask(question, options), options, open);
  }

  /** As `caption`, with the text as it is generated: events `textDelta`. */
  streamCaption(
    image: ImageInput,
    length: Length = "normal",
    options: CaptionOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamCaptionResponse>, CaptionResult> {
    const open = (request: CaptionRequest, sending: Sending) => this.#vision.streamCaption(request, sending);
    return this.#streamTask(image, () => captionTask(length, options), options, open);
  }

  /** As `point`, with each object as soon as it is found: events `detection`, and `search` at the end of each name. */
  streamPoint(
    image: ImageInput,
    objects: Names,
    options: PointOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamPointResponse>, PointResult> {
    const open = (request: PointRequest, sending: Sending) => this.#vision.streamPoint(request, sending);
    return this.#streamTask(image, () => pointTask(objects, options), options, open);
  }

  /** As `detect`, with each object as soon as it is found: events `detection`, and `search` at the end of each name. */
  streamDetect(
    image: ImageInput,
    objects: Names,
    options: DetectOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamDetectResponse>, DetectResult> {
    const open = (request: DetectRequest, sending: Sending) => this.#vision.streamDetect(request, sending);
    return this.#streamTask(image, () => detectTask(objects, options), options, open);
  }

  /** As `segment`: an object's box as event `detection`, its path in events `pathPiece`, then `search`. */
  streamSegment(
    image: ImageInput,
    objects: Names,
    options: SegmentOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamSegmentResponse>, SegmentResult> {
    const open = (request: SegmentRequest, sending: Sending) => this.#vision.streamSegment(request, sending);
    return this.#streamTask(image, () => segmentTask(objects, options), options, open);
  }

  /** As `gaze`: each face that the model finds as event `detection`, then `search`; and each `gaze`. */
  streamGaze(
    image: ImageInput,
    options: GazeOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamGazeResponse>, GazeResult> {
    const open = (request: GazeRequest, sending: Sending) => this.#vision.streamGaze(request, sending);
    return this.#streamTask(image, () => gazeTask(options), options, open);
  }

  /** As `analyze`, with the events of all tasks as they happen, each with the `key` of its task. */
  streamAnalyze<T extends Tasks>(
    image: ImageInput,
    tasks: T,
    options: HandlingOptions = {},
  ): KestrelStream<EventOf<StreamAnalyzeResponse> & { key: keyof T & string }, Outcomes<ResultsOf<T>>> {
    const prepare = async () => {
      const { call, request } = await this.#requests.analysis(image, tasks, options);
      return { call, open: (sending: Sending) => this.#vision.streamAnalyze(request, sending) };
    };
    return this.#stream(
      options,
      prepare,
      (each) => (each.event.case === undefined ? each.event : { ...each.event, key: each.key as keyof T & string }),
      (final) => new Outcomes<ResultsOf<T>>(final),
    );
  }

  /** As `runSkill`, with the events of the skill as they happen. */
  streamRunSkill(
    skill: string,
    image: ImageInput | null,
    options: SkillTaskOptions & HandlingOptions = {},
  ): KestrelStream<EventOf<StreamRunSkillResponse>, SkillResult> {
    const open = (request: RunSkillRequest, sending: Sending) => this.#vision.streamRunSkill(request, sending);
    return this.#streamTask(image, () => skillTask(skill, options), options, open);
  }

  /** As `embed`, with the embeddings one by one. Together they may exceed the limit of a message. */
  streamEmbed(image: ImageInput, options: EmbedOptions = {}): KestrelStream<EventOf<StreamEmbedResponse>, EmbedResult> {
    const prepare = async () => {
      const { call, request } = await this.#requests.embedding(image, options);
      return { call, open: (sending: Sending) => this.#vision.streamEmbed(request, sending) };
    };
    return this.#stream(options, prepare, (each) => each.event);
  }

  /**
   * Runs one task on each image. The results have the order of the images; a request that fails gives its KestrelError
   * in place of a result.
   */
  map<S extends Skill>(
    images: Iterable<ImageInput> | AsyncIterable<ImageInput>,
    task: Task<S>,
    options: HandlingOptions & MapOptions = {},
  ): Promise<(Results[S] | KestrelError)[]> {
    return mapped(images, (image) => this.#task(image, () => task, options), options);
  }

  /**
   * Runs the same tasks on every frame of `source`, and gives what became of each. Not over gRPC-Web, because a browser
   * sends one message in a call.
   */
  frames<T extends Tasks>(
    tasks: T,
    source: FrameSource,
    options: HandlingOptions & FrameOptions = {},
  ): AsyncGenerator<FrameResult<T>, void> {
    if (!this.#platform.sendsStreams) {
      throw new InvalidRequestError("frames: needs gRPC, which browsers cannot send; use it in Node");
    }
    const { streamFrames } = this.#vision;
    return frames(this.#connection, this.#platform.readFile, streamFrames, tasks, source, options);
  }

  /**
   * Leaves requests with the server, like `{ a: ["a.jpg", captionTask()], b: ["b.jpg", { found: detectTask("cup") }] }`,
   * which it answers at low priority. Not over gRPC-Web. The server needs `--batches`.
   */
  createBatch(requests: BatchRequests, options: BatchOptions = {}): Promise<Batch> {
    return this.#batches.create(requests, options);
  }

  /** The present state of a batch. Throws NotFoundError, as the next ones. */
  getBatch(batchId: string, options: CallOptions = {}): Promise<Batch> {
    return this.#batches.get(batchId, options);
  }

  /** The caller's batches, the newest first. */
  listBatches(options: CallOptions = {}): Promise<Batch[]> {
    return this.#batches.list(options);
  }

  /** Ends a batch. Its results so far are kept. */
  cancelBatch(batchId: string, options: CallOptions = {}): Promise<Batch> {
    return this.#batches.cancel(batchId, options);
  }

  /** Ends a batch, and deletes it with its results. */
  deleteBatch(batchId: string, options: CallOptions = {}): Promise<void> {
    return this.#batches.delete(batchId, options);
  }

  /**
   * The results of a batch in the order of its requests, each as soon as it is there, until the batch is done. Goes on
   * after a broken connection. Leaving the loop does not end the batch. `timeoutMs` is of the whole; default: no limit.
   */
  batchResults(batchId: string, options: BatchResultsOptions = {}): AsyncGenerator<BatchResult, void> {
    return this.#batches.results(batchId, options);
  }

  /** Stores an image on the server. Later calls take the handle in place of the image. */
  async putImage(image: ImageInput, options: CallOptions = {}): Promise<ImageHandle> {
    const { maxMessageBytes } = this.#connection;
    const { sendsStreams, readFile } = this.#platform;
    const limit = sendsStreams ? LARGEST_UPLOAD_BYTES : maxMessageBytes;
    const source = image instanceof ImageHandle && image.source !== undefined ? image.source : image;
    const message = await toImage(source, limit, readFile, options.signal);
    return this.#put(message, options, "", source instanceof ImageHandle ? undefined : source);
  }

  /** Deletes an image from its server. Gives whether it was stored there. */
  async deleteImage(image: ImageHandle | string, options: CallOptions = {}): Promise<boolean> {
    const given = image instanceof ImageHandle ? image.imageId : image;
    if (typeof given !== "string" || !given) throw new InvalidRequestError("image: must be an ImageHandle or an id");
    const about = await this.#known.key(create(ImageSchema, { source: { case: "imageId", value: given } }));
    const imageId = this.#known.currentId(given);
    this.#known.forget(given); // It is not to be put again.
    const call = { options, about };
    return (await this.#unary(call, (sending) => this.#images.deleteImage({ imageId }, sending))).existed;
  }

  /** The models of the server, the default model first. */
  async listModels(options: CallOptions = {}): Promise<Model[]> {
    const list = (page: Page, sending: Sending) => this.#models.listModels(page, sending);
    return (await this.#pages(list, options)).flatMap((page) => page.models);
  }

  /** The adapters of a model; default: of the server's default model. */
  async listAdapters(model?: string, options: CallOptions = {}): Promise<Adapter[]> {
    const of = model === undefined ? {} : { model };
    const list = (page: Page, sending: Sending) => this.#models.listAdapters({ ...of, ...page }, sending);
    return (await this.#pages(list, options)).flatMap((page) => page.adapters);
  }

  /** One model; default: the server's default model. Throws NotFoundError. */
  async getModel(model?: string, options: CallOptions = {}): Promise<Model> {
    const request = model === undefined ? {} : { model };
    const response = await this.#unary({ options, about: "" }, (sending) => this.#models.getModel(request, sending));
    if (response.model === undefined) throw rpcError(2, "the server sent no model");
    return response.model;
  }

  /** The server's versions, limits and capabilities. */
  serverInfo(options: CallOptions = {}): Promise<GetServerInfoResponse> {
    return this.#unary({ options, about: "" }, (sending) => this.#models.getServerInfo({}, sending));
  }

  /** How busy the server is. */
  serverLoad(options: CallOptions = {}): Promise<GetLoadResponse> {
    return this.#unary({ options, about: "" }, (sending) => this.#models.getLoad({}, sending));
  }

  /** Waits until the server answers requests. Throws DeadlineExceededError after `timeoutMs` (default: 60,000). */
  async waitReady({ timeoutMs = 60_000, ...options }: CallOptions = {}): Promise<void> {
    const endsAt = performance.now() + timeoutMs;
    for (let left = timeoutMs; left > 0; left = endsAt - performance.now()) {
      try {
        if ((await this.serverLoad({ ...options, timeoutMs: Math.max(left, 1) })).ready) return;
      } catch (error) {
        if (!(error instanceof UnavailableError || error instanceof DeadlineExceededError)) throw error;
      }
      await sleep(Math.min(100, Math.max(endsAt - performance.now(), 0)), options.signal);
    }
    throw rpcError(DEADLINE_EXCEEDED, `the server was not ready within ${timeoutMs} ms`);
  }

  /**
   * A client of connect-es for one service, such as AdminService, with this client's connection, token and headers. Its
   * calls throw ConnectError; `toKestrelError` reads it.
   */
  raw<S extends DescService>(service: S): ConnectClient<S> {
    const { transport } = this.#platform;
    const connection = this.#connection;
    const headersOf = (own: HeadersInit | undefined) => {
      const headers = new Headers(connection.headers({}, ""));
      new Headers(own).forEach((value, name) => headers.set(name, value));
      return headers;
    };
    return createClient(service, {
      unary: (method, signal, timeoutMs, header, input, values) =>
        transport.unary(method, signal, timeoutMs ?? connection.timeoutMs({}), headersOf(header), input, values),
      stream: (method, signal, timeoutMs, header, input, values) =>
        transport.stream(method, signal, timeoutMs ?? connection.timeoutMs({}), headersOf(header), input, values),
    });
  }

  async #task<S extends Skill>(
    image: ImageInput | null,
    make: () => Task<S>,
    options: HandlingOptions,
  ): Promise<Results[S]> {
    const task = make();
    const { call, request } = await this.#requests.task(image, task, options);
    const vision = this.#vision;
    const send: { [K in Skill]: (sending: Sending) => Promise<object> } = {
      query: (sending) => vision.query(request, sending),
      caption: (sending) => vision.caption(request, sending),
      point: (sending) => vision.point(request, sending),
      detect: (sending) => vision.detect(request, sending),
      segment: (sending) => vision.segment(request, sending),
      gaze: (sending) => vision.gaze(request, sending),
      skill: (sending) => vision.runSkill(request, sending),
    };
    return toResult(await this.#unary(call, send[task.skill]));
  }

  /** `about`: selects the server; empty for the image itself. `source`: the image as the caller gave it. */
  async #put(image: Image, options: CallOptions, about: string, source?: ImageInput): Promise<ImageHandle> {
    const { maxMessageBytes } = this.#connection;
    const file = image.source.case === "encoded" ? image.source.value : new Uint8Array();
    const isUpload = file.length > UPLOAD_BYTES && this.#platform.sendsStreams;
    const size = bytesOf(image) + ROOM_BYTES;
    if (!isUpload && size > maxMessageBytes) throw new RequestTooLargeError(size, maxMessageBytes);
    const digest = await this.#known.key(image);
    const call = { options, about: about || (options.session === undefined ? digest : "") };
    const hash = isUpload ? await sha256(file) : undefined;
    const { image: stored } = isUpload
      ? await this.#unary(call, (sending) => this.#images.uploadImage(pieces(file, hash), sending))
      : await this.#unary(call, (sending) => this.#images.putImage({ image }, sending));
    const handle = new ImageHandle(stored?.imageId ?? "", stored?.size, source);
    this.#known.learn(handle.imageId, image, digest);
    return handle;
  }

  async #pages<P extends { nextPageToken: string }>(
    list: (page: Page, sending: Sending) => Promise<P>,
    options: CallOptions,
  ): Promise<P[]> {
    const pages: P[] = [];
    for (let pageToken: string | undefined = ""; pageToken !== undefined;) {
      const page: Page = { pageToken };
      const got = await this.#unary({ options, about: "" }, (sending) => list(page, sending));
      pages.push(got);
      pageToken = got.nextPageToken || undefined;
    }
    return pages;
  }

  async #unary<T extends object>(call: Call, send: (sending: Sending) => Promise<T>): Promise<T> {
    const response = await attempts(this.#connection, call, send);
    await call.learn?.(response);
    return response;
  }

  #streamTask<S extends Skill, M extends { event: StreamEvent }>(
    image: ImageInput | null,
    make: () => Task<S>,
    options: HandlingOptions,
    open: (request: never, sending: Sending) => AsyncIterable<M>,
  ): KestrelStream<EventOf<M>, Results[S]> {
    const prepare = async () => {
      const { call, request } = await this.#requests.task(image, make(), options);
      return { call, open: (sending: Sending) => open(request, sending) };
    };
    return this.#stream(options, prepare, (each) => each.event);
  }

  /** `read` gives the event of a message, `finish` makes the result from the last one. */
  #stream<M, E, R>(
    options: CallOptions,
    prepare: () => Promise<Opening<M>>,
    read: (message: M) => StreamEvent,
    finish: (final: never) => R = (final) => toResult(final),
  ): KestrelStream<E, R> {
    const run: Run<StreamEvent, R> = (signal) => events(this.#connection, prepare, read, finish, signal);
    return new KestrelStream(run as Run<never, R>, options.signal);
  }
}
