/** The options of a call, and the parts of a request that they make. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";

import { InvalidRequestError } from "./errors.js";
import type { BoxInput } from "./geometry.js";
import {
  Priority,
  RequestOptionsSchema,
  SamplingSchema,
  TextOptionsSchema,
  type ConstraintSchema,
  type RequestOptions,
  type Sampling,
  type TextOptions as TextMessage,
} from "./gen/kestrel/v1/common_pb.js";

/** How a call is sent. */
export interface CallOptions {
  /** Milliseconds for the whole call, with its retries; default: the client's. 0 means no limit. */
  timeoutMs?: number | undefined;
  /** Ends the call, and its work on the server, with RequestCancelledError. */
  signal?: AbortSignal | undefined;
  /** Metadata that is sent with the call, after the client's own. */
  headers?: Readonly<Record<string, string>> | undefined;
  /**
   * With several servers behind a balancer: calls with the same name go to the same server, whatever their images are.
   * 1 to 128 visible ASCII characters; default: calls about the same image go to the same server.
   */
  session?: string | undefined;
}

/** How a request is handled. The server has a default for each option that is omitted. */
export interface HandlingOptions extends CallOptions {
  /** Name of the model that must answer. */
  model?: string | undefined;
  /** Name of the adapter, a fine-tune of the model, to apply. */
  adapter?: string | undefined;
  /** Your name for the request: 1 to 128 visible ASCII characters. */
  requestId?: string | undefined;
  /** Order in which waiting requests are started. */
  priority?: "low" | "normal" | "high" | undefined;
  /** The server reuses computation only among calls with the same salt; at most 128 bytes of UTF-8. */
  cacheSalt?: string | undefined;
  /** Background colour for a transparent image, like "#ffffff"; without it the server drops the alpha channel. */
  background?: string | undefined;
  /**
   * The part of the image that the model sees. Results and spatial references have coordinates of the whole image.
   * Further images of a query are seen whole.
   */
  region?: BoxInput | undefined;
  /**
   * Limit on the tiles in which the model sees each image, beside the overview: fewer take less time, and small text and
   * objects may be missed. From 1, the overview alone, to the model's own limit.
   */
  maxCrops?: number | undefined;
}

/** What a text must match: exactly one of these. */
export interface Constraint {
  /** One of these texts. */
  choices?: readonly string[];
  /** A regular expression in the notation of Rust's regex crate. */
  regex?: string;
  /** A context-free grammar in Lark's notation, whose start rule is `start`. */
  grammar?: string;
  /** A JSON Schema: an object, or its JSON text. */
  jsonSchema?: string | object;
}

/** How tokens are drawn, and how many. The server has a default for each setting that is omitted. */
export interface SamplingOptions {
  /** 0 is greedy; in [0, 100]. */
  temperature?: number | undefined;
  /** In (0, 1]. */
  topP?: number | undefined;
  /** At least 0; 0 keeps all tokens. */
  topK?: number | undefined;
  /** In [0, 1]: tokens whose probability is below this part of the largest one are not sampled. */
  minP?: number | undefined;
  /** In [0, 2^63): the same seed and request give the same result. Use a bigint above 2^53. */
  seed?: number | bigint | undefined;
  /**
   * Largest number of tokens to generate, at least 1. Reasoning and answer each have this limit, and so has each name. A
   * point takes 2 tokens and a box 3; an incomplete object is dropped.
   */
  maxTokens?: number | undefined;
}

/** How a text is written. The server has a default for each setting that is omitted. */
export interface TextOptions extends SamplingOptions {
  /** The text ends before the first of these texts; at most 16. */
  stop?: string | readonly string[] | undefined;
  /** Whether the result has the log-probability of each token (`logprobs`). */
  logprobs?: boolean | undefined;
  /** With `logprobs`: how many of the likeliest tokens the result has at the place of each token, at most 20. */
  topLogprobs?: number | undefined;
  /** What the text must match. */
  constraint?: Constraint | undefined;
  /** In [0.01, 10]; above 1 the model repeats less. */
  repetitionPenalty?: number | undefined;
  /** In [-2, 2]: subtracted from the logits of all tokens of the text so far. */
  presencePenalty?: number | undefined;
  /** In [-2, 2]: subtracted from the logit of a token for each time that it is in the text so far. */
  frequencyPenalty?: number | undefined;
  /** Numbers in [-100, 100] to add to the logits of at most 300 tokens, by id. */
  logitBias?: Readonly<Record<number, number>> | undefined;
}

const PRIORITIES = { low: Priority.LOW, normal: Priority.NORMAL, high: Priority.HIGH };
const HANDLING = ["model", "adapter", "requestId", "priority", "cacheSalt"] as const;
const SAMPLING = ["temperature", "topP", "topK", "minP", "seed"] as const;
const TEXT = [
  "stop",
  "logprobs",
  "topLogprobs",
  "constraint",
  "repetitionPenalty",
  "presencePenalty",
  "frequencyPenalty",
  "logitBias",
] as const;

/** Undefined if no option is set. */
export function toHandling(options: HandlingOptions): RequestOptions | undefined {
  if (HANDLING.every((name) => options[name] === undefined)) return undefined;
  const { priority, ...given } = options;
  return create(RequestOptionsSchema, {
    ...only(given, HANDLING),
    ...(priority === undefined ? {} : { priority: choice("priority", priority, PRIORITIES) }),
  });
}

/** Undefined if no setting is set. */
export function toSampling(options: SamplingOptions): Sampling | undefined {
  if (SAMPLING.every((name) => options[name] === undefined)) return undefined;
  const { seed, ...plain } = options;
  return checked("sampling", () =>
    create(SamplingSchema, {
      ...only(plain, SAMPLING),
      ...(seed === undefined ? {} : { seed: toSeed(seed) }),
    }),
  );
}

/** Undefined if no setting is set. */
export function toText(options: TextOptions): TextMessage | undefined {
  if (TEXT.every((name) => options[name] === undefined)) return undefined;
  const { stop, constraint, logitBias, ...plain } = options;
  return checked("text", () =>
    create(TextOptionsSchema, {
      ...only(plain, TEXT),
      ...(stop === undefined ? {} : { stop: typeof stop === "string" ? [stop] : [...stop] }),
      ...(constraint === undefined ? {} : { constraint: toConstraint(constraint) }),
      ...(logitBias === undefined
        ? {}
        : { logitBias: Object.entries(logitBias).map(([id, bias]) => ({ id: Number(id), bias })) }),
    }),
  );
}

/** The number of an enumeration for its name. Throws InvalidRequestError. */
export function choice<T>(name: string, value: string, choices: Readonly<Record<string, T>>): T {
  const found = Object.hasOwn(choices, value) ? choices[value] : undefined;
  if (found === undefined) {
    throw new InvalidRequestError(
      `${name}=${JSON.stringify(value)}: must be one of ${Object.keys(choices).join(", ")}`,
    );
  }
  return found;
}

/** Makes a message. Throws InvalidRequestError for a value that its field can't hold. */
export function checked<T>(what: string, make: () => T): T {
  try {
    return make();
  } catch (error) {
    if (error instanceof InvalidRequestError) throw error;
    throw new InvalidRequestError(`${what}: ${error instanceof Error ? error.message : String(error)}`, {
      cause: error,
    });
  }
}

function toSeed(seed: number | bigint): bigint {
  if (typeof seed === "number" && !Number.isSafeInteger(seed)) {
    throw new InvalidRequestError(`seed=${seed}: must be a whole number; above 2^53 a bigint`);
  }
  const whole = BigInt(seed);
  if (whole < 0n || whole >= 1n << 63n) throw new InvalidRequestError(`seed=${seed}: must be in [0, 2^63)`);
  return whole;
}

function toConstraint(given: Constraint): MessageInitShape<typeof ConstraintSchema> {
  const rules = Object.entries(given).filter(([, value]) => value !== undefined);
  const [rule] = rules;
  if (rule === undefined || rules.length > 1) {
    throw new InvalidRequestError("constraint: must have exactly one of choices, regex, grammar and jsonSchema");
  }
  const [kind, value] = rule;
  if (kind === "choices") return { rule: { case: kind, value: { texts: [...(value as readonly string[])] } } };
  const text = typeof value === "object" ? JSON.stringify(value) : (value as string);
  return { rule: { case: kind as "regex" | "grammar" | "jsonSchema", value: text } };
}

function only<T extends object, K extends PropertyKey>(values: T, names: readonly K[]): Pick<T, Extract<keyof T, K>> {
  const kept = Object.entries(values).filter(([name, value]) => names.includes(name as K) && value !== undefined);
  return Object.fromEntries(kept) as Pick<T, Extract<keyof T, K>>;
}
