/** Server: one of several, with its connection, its calls, and whether it serves. */
import { createContextValues, type Transport } from "@connectrpc/connect";
import type { DescMethodUnary } from "@bufbuild/protobuf";

import {
  HealthCheckRequestSchema,
  HealthCheckResponse_ServingStatus,
  HealthCheckResponseSchema,
} from "../gen/kestrel/client/internal/wire_pb.js";
import { UnavailableError, DeadlineExceededError } from "../errors.js";
import { toKestrelError } from "../calls/statuses.js";

const CHECK_MS = 5000;
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 5000;

/** grpc.health.v1.Health/Check: the messages are copies under another name. */
const CHECK = {
  kind: "rpc",
  methodKind: "unary",
  name: "Check",
  localName: "check",
  parent: { kind: "service", typeName: "grpc.health.v1.Health" },
  input: HealthCheckRequestSchema,
  output: HealthCheckResponseSchema,
  idempotency: 0,
  toString: () => "rpc grpc.health.v1.Health.Check",
} as unknown as DescMethodUnary<typeof HealthCheckRequestSchema, typeof HealthCheckResponseSchema>;

export class Server {
  #isServing = true;
  #isChecking = false;
  #pauseMs = FIRST_PAUSE_MS;
  #checkAt = 0;
  #numCalls = 0;
  #isLeft = false;

  constructor(
    readonly address: string,
    readonly transport: Transport,
    private readonly close: () => void,
  ) {}

  /** Whether calls may go to it. If not, this asks it again from time to time. */
  serves(): boolean {
    if (!this.#isServing && !this.#isChecking && performance.now() >= this.#checkAt) void this.#check();
    return this.#isServing;
  }

  /** A call was unavailable there. Calls go elsewhere until the server reports that it serves. */
  failed(): void {
    if (!this.#isServing) return;
    this.#isServing = false;
    this.#checkAt = 0;
  }

  /** A call begins. Gives what reports its end, which may be called again. */
  begin(): () => void {
    this.#numCalls += 1;
    let isOver = false;
    return () => {
      if (isOver) return;
      isOver = true;
      this.#numCalls -= 1;
      this.#closeIfUnused();
    };
  }

  /** No call will begin any more. Those under way go on. */
  leave(): void {
    this.#isLeft = true;
    this.#closeIfUnused();
  }

  /** Ends the connection, and the calls that are under way. */
  abort(): void {
    this.#isLeft = true;
    this.close();
  }

  #closeIfUnused(): void {
    if (this.#isLeft && this.#numCalls === 0) this.close();
  }

  async #check(): Promise<void> {
    this.#isChecking = true;
    const done = this.begin();
    try {
      const values = createContextValues();
      const { message } = await this.transport.unary(CHECK, undefined, CHECK_MS, undefined, {}, values);
      this.#isServing = message.status === HealthCheckResponse_ServingStatus.SERVING;
    } catch (reason) {
      // A server that answers in another way has no health service.
      const error = toKestrelError(reason);
      this.#isServing = !(error instanceof UnavailableError || error instanceof DeadlineExceededError);
    } finally {
      this.#isChecking = false;
      this.#checkAt = performance.now() + this.#pauseMs;
      this.#pauseMs = this.#isServing ? FIRST_PAUSE_MS : Math.min(2 * this.#pauseMs, LONGEST_PAUSE_MS);
      done();
    }
  }
}
