// Every method against a Kestrel server, over gRPC and over gRPC-Web. KESTREL_GRPC and KESTREL_HTTP are its addresses,
// KESTREL_IMAGE a path: that of the server's demo image. KESTREL_SECURE is a server with TLS that needs KESTREL_TOKEN.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { connect, createServer as createRelay, type AddressInfo, type Socket } from "node:net";
import { after, describe, test } from "node:test";
import { promisify } from "node:util";

import {
  BatchState,
  captionTask,
  DeadlineExceededError,
  detectTask,
  FinishReason,
  fromStatus,
  gazeTask,
  ImageFeatures,
  ImageHandle,
  InvalidArgumentError,
  InvalidImageError,
  InvalidRequestError,
  KestrelClient,
  NotFoundError,
  Outcomes,
  PermissionDeniedError,
  queryTask,
  RequestCancelledError,
  RpcError,
  similarity,
  skillTask,
  toKestrelError,
  UnauthenticatedError,
  UnavailableError,
  vectors,
  type BatchRequests,
  type BatchResult,
  type DetectResult,
  type KestrelError,
} from "kestrel-client";
import { AdminService } from "kestrel-client/protos";
import { KestrelClient as WebClient } from "kestrel-client/web";

function given(name: string): string {
  const value = process.env[name];
  assert.ok(value, `${name} must be set`);
  return value;
}

const PATH = given("KESTREL_IMAGE");
const IMAGE = new Uint8Array(await readFile(PATH));
const QUESTION = "How many green crescents are there?";
const node = new KestrelClient(given("KESTREL_GRPC"));
const web = new WebClient(`http://${given("KESTREL_HTTP")}`);
after(() => node.close());

for (const [name, client] of [
  ["gRPC", node],
  ["gRPC-Web", web],
] as const) {
  describe(name, () => {
    test("the five skills", async () => {
      await client.waitReady();
      const answer = await client.query(IMAGE, QUESTION, { temperature: 0, logprobs: true, topLogprobs: 2, seed: 7 });
      assert.equal(answer.answer, "2");
      assert.equal(answer.answers[0]?.finishReason, FinishReason.STOP);
      assert.equal(answer.info.seed, 7n);
      assert.equal(answer.answers[0]?.logprobs?.tokens[0]?.top.length, 2);
      assert.ok(answer.timings.totalMs > 0 && answer.imageSize && answer.info.requestId);
      assert.match((await client.caption(IMAGE, "short", { temperature: 0 })).caption, /green crescent/);
      assert.equal((await client.point(IMAGE, "green crescent")).detections.length, 2);
      const { detections, imageSize } = await client.detect(IMAGE, "green crescent", { maxObjects: 5 });
      assert.equal(detections.length, 2);
      assert.ok(detections.every(({ box, score }) => box.xMin < box.xMax && score > 0.5) && imageSize.width > 0);
      const { gazes, search } = await client.gaze(IMAGE, { eyes: [{ x: 0.25, y: 0.5 }] });
      assert.equal(gazes[0]?.eye?.x, 0.25);
      assert.equal(search, undefined);
      await assert.rejects(client.gaze(IMAGE, { eyes: { x: 2, y: 0 } }), /gaze\.eyes\[0\]: 2/);
      assert.throws(() => gazeTask({ faces: [{ x: 0, y: 0 } as never] }), /faces\[0\]: is not a box/);
      const [found] = (await client.segment(IMAGE, "pink star", { mask: "polygons" })).detections;
      assert.ok(found?.box && found.outline.svgPath && found.outline.mask?.encoding.case === "polygons");
    });

    test("options of a query", async () => {
      const first = await client.query(IMAGE, QUESTION, { temperature: 0, requestId: "mine-1", priority: "high" });
      assert.equal(first.info.requestId, "mine-1");
      const history = [{ question: QUESTION, answer: first.answer }];
      const second = await client.query(IMAGE, "And squares?", { temperature: 0, history, system: "Be brief." });
      assert.ok(second.usage.cachedTokens >= 0 && second.answer);
      const plain = await client.query(IMAGE, QUESTION, { temperature: 0 });
      const rest = await client.query(IMAGE, QUESTION, { temperature: 0, answerStart: "There are" });
      assert.ok(rest.usage.inputTokens > plain.usage.inputTokens);
      const yes = await client.query(IMAGE, "Is it?", { constraint: { choices: ["yes", "no"] }, maxTokens: 5 });
      assert.match(yes.answer, /^(yes|no)$/);
      const drawn = await client.query(IMAGE, QUESTION, { numSamples: 3, seed: 1n, temperature: 1 });
      assert.deepEqual(
        drawn.answers.map((each) => each.seed),
        [1n, 2n, 3n],
      );
      const part = await client.query(IMAGE, QUESTION, { region: { xMin: 0, yMin: 0, xMax: 0.5, yMax: 0.5 } });
      assert.ok(part.answer);
      const quick = await client.query(IMAGE, QUESTION, { maxCrops: 1 });
      assert.equal(quick.info?.images[0]?.numCrops, 1);
      const none = await client.query(IMAGE, "What colour is the dog?", { presupposes: ["dog"], maxAbsence: 0 });
      assert.equal(none.abstained, true);
      const thought = await client.query(IMAGE, QUESTION, { reasoning: true, maxReasoningTokens: 3 });
      assert.equal(thought.answers[0]?.reasoning?.finishReason, FinishReason.LENGTH);
      const pointed = await client.query(IMAGE, "What is here?", { spatialRefs: [{ x: 0.5, y: 0.5 }], stop: "." });
      assert.ok(!pointed.answer.includes("."));
    });

    test("streams give the events and then the result", async () => {
      const stream = client.streamCaption(IMAGE, "long", { temperature: 0 });
      let text = "";
      let events = 0;
      for await (const event of stream) {
        text += event.value.text;
        events += 1;
      }
      assert.ok(events > 3, "not all at once");
      assert.equal((await stream.result()).caption, text);
      const answers = client.streamQuery(IMAGE, QUESTION, { reasoning: true, temperature: 0, maxReasoningTokens: 4 });
      const cases = new Set<string>();
      for await (const event of answers) cases.add(event.case);
      assert.deepEqual([...cases], ["reasoningDelta", "textDelta"]);
      const boxes = [];
      for await (const event of client.streamDetect(IMAGE, "green crescent")) {
        if (event.case === "detection") boxes.push(event.value.box);
      }
      assert.equal(boxes.length, 2);
      assert.equal((await client.streamPoint(IMAGE, "pink star").result()).detections.length, 1);
      const kinds: string[] = [];
      for await (const event of client.streamSegment(IMAGE, "pink star")) kinds.push(event.case);
      assert.deepEqual(kinds.slice(0, 2), ["detection", "pathPiece"]);
      assert.equal(kinds.at(-1), "search");
    });

    test("several tasks and several names", async () => {
      const tasks = {
        about: captionTask("short", { temperature: 0 }),
        found: detectTask("green crescent"),
        wrong: queryTask("Why?", { topP: 2 }),
        named: skillTask("query", { arguments: { question: QUESTION }, temperature: 0 }),
      };
      const results = await client.analyze(IMAGE, tasks);
      assert.match(results.get("about").caption, /cross/);
      assert.equal(results.get("found").detections.length, 2);
      assert.equal(results.get("named").output?.["answer"], "2");
      assert.throws(() => results.get("wrong"), InvalidArgumentError);
      assert.equal(results.errors.get("wrong")?.fieldViolations[0]?.field, "tasks[2].query.sampling.top_p");
      const stream = client.streamAnalyze(IMAGE, { about: tasks.about, found: tasks.found });
      const keys = new Set<string>();
      for await (const event of stream) keys.add(`${event.key} ${event.case}`);
      for (const key of ["about textDelta", "found detection", "found search", "found taskFinal"]) {
        assert.ok(keys.has(key), [...keys].join());
      }
      assert.equal((await stream.result()).get("found").detections.length, 2);
      const found = await client.detect(IMAGE, ["green crescent", " ", "pink star"]);
      assert.deepEqual(
        found.detections.map((each) => each.label),
        ["green crescent", "green crescent", "pink star"],
      );
      const [, failed] = found.searches;
      assert.ok(failed?.error && fromStatus(failed.error) instanceof InvalidArgumentError);
      assert.equal(fromStatus(failed.error).fieldViolations[0]?.field, "detect.objects[1]");
      assert.deepEqual(
        found.searches.map((each) => (each.absence ?? 1) < 0.5),
        [true, false, true],
      );
    });

    test("stored images", async () => {
      const handle = await client.putImage(IMAGE);
      assert.match(handle.imageId, /^img_/);
      assert.equal((await client.query(handle, QUESTION, { temperature: 0 })).answer, "2");
      assert.equal(await client.deleteImage(new ImageHandle(handle.imageId)), true);
      await assert.rejects(client.query(handle, QUESTION), NotFoundError, "what the caller deletes is not sent again");
      const lost = new ImageHandle(`img_${"1".repeat(32)}`, undefined, IMAGE);
      assert.equal((await client.query(lost, QUESTION, { temperature: 0 })).answer, "2");
      const unknown = new ImageHandle(`img_${"0".repeat(32)}`);
      await assert.rejects(client.caption(unknown), (error: NotFoundError) => {
        assert.ok(error instanceof NotFoundError);
        assert.equal(error.reason, "IMAGE_NOT_FOUND");
        return true;
      });
    });

    test("embeddings, skills by name, models and load", async () => {
      const result = await client.embed(IMAGE, { parts: "image-and-crops" });
      const [one] = vectors(result.embeddings[0] as never);
      assert.ok(one && Math.abs(similarity(one, one) - 1) < 1e-5);
      const half = await client.embed(IMAGE, { dtype: "float16" });
      const [other] = vectors(half.embeddings[0] as never);
      assert.ok(other && similarity(one, other) > 0.999);
      assert.ok((await client.streamEmbed(IMAGE).result()).info.model);
      const { embeddings, info } = await client.embed(IMAGE, { pooling: "none" });
      const features = ImageFeatures.of(embeddings[0] as never, info?.images[0]?.size as never);
      assert.equal((await client.query(features, QUESTION, { temperature: 0 })).answer, "2");
      const count = await client.countTokens(IMAGE, { mine: queryTask(QUESTION) });
      assert.equal(count.inputTokens, (await client.query(IMAGE, QUESTION)).usage.inputTokens);
      const options = { arguments: { question: QUESTION }, settings: { temperature: 0 } };
      assert.deepEqual((await client.runSkill("query", IMAGE, options)).output?.["answer"], "2");
      assert.equal((await client.streamRunSkill("query", IMAGE, options).result()).output?.["answer"], "2");
      assert.deepEqual(
        (await client.listModels()).map((model) => model.name),
        ["kestrel-tiny"],
      );
      assert.equal((await client.getModel()).family, "moondream3");
      assert.deepEqual(await client.listAdapters("kestrel-tiny"), []);
      await assert.rejects(client.getModel("none"), NotFoundError);
      assert.equal((await client.serverInfo()).limits?.maxImages, 16);
      assert.equal((await client.serverLoad()).ready, true);
    });

    test("errors have the field, the reason and the request's id", async () => {
      await assert.rejects(client.query(IMAGE, "What?", { topP: 1.5 }), (error: InvalidArgumentError) => {
        assert.ok(error instanceof InvalidArgumentError);
        assert.deepEqual(error.fieldViolations, [
          { field: "query.sampling.top_p", description: "1.5 is not in (0, 1]" },
        ]);
        assert.equal(error.code, "INVALID_ARGUMENT");
        assert.equal(error.reason, "INVALID_REQUEST");
        assert.ok(error.requestId);
        return true;
      });
      const stream = client.streamQuery(IMAGE, "What?", { topP: 1.5 });
      await assert.rejects(stream.result(), (error: InvalidArgumentError) => {
        return error.fieldViolations[0]?.field === "query.sampling.top_p";
      });
      await assert.rejects(client.caption(Uint8Array.of(1, 2, 3)), /IMAGE_|image/);
      await assert.rejects(client.query(IMAGE, "What?", { timeoutMs: 1 }), DeadlineExceededError);
      const aborted = AbortSignal.abort(new Error("enough"));
      await assert.rejects(client.query(IMAGE, "What?", { signal: aborted }), RequestCancelledError);
    });

    test("a stream that is left ends its request on the server", async () => {
      const stream = client.streamCaption(IMAGE, "long", { temperature: 1 });
      for await (const _ of stream) break;
      for (let waits = 0; (await client.serverLoad()).runningRequests > 0; waits += 1) {
        assert.ok(waits < 500);
        await new Promise((resolve) => setTimeout(resolve, 10));
      }
      await assert.rejects(stream.result(), RequestCancelledError);
    });

    test("images as Blob, pixels and addresses", async () => {
      const blob = new Blob([IMAGE]);
      const data = `data:image/jpeg;base64,${Buffer.from(IMAGE).toString("base64")}`;
      const server = createServer((_, response) => response.end(IMAGE)).listen(0, "127.0.0.1");
      await new Promise((resolve) => server.once("listening", resolve));
      const address = `http://127.0.0.1:${(server.address() as AddressInfo).port}/picture.jpg`;
      const pixels = { data: new Uint8ClampedArray(16 * 16 * 4).fill(200), width: 16, height: 16 };
      for (const image of [blob, IMAGE.buffer, data, address, new URL(address)]) {
        assert.equal((await client.query(image, QUESTION, { temperature: 0 })).answer, "2");
      }
      assert.deepEqual((await client.caption(pixels, "short", { maxTokens: 3 })).imageSize?.width, 16);
      server.close();
      server.closeAllConnections();
    });
  });
}

async function* endless() {
  for (;;) yield IMAGE;
}

test("gRPC alone: paths, uploads in pieces, frames, and AdminService", async () => {
  assert.equal((await node.query(PATH, QUESTION, { temperature: 0 })).answer, "2");
  // Above 4 MiB: decoders of JPEG ignore what follows the image.
  const large = await node.putImage(Buffer.concat([IMAGE, Buffer.alloc(5 * 1024 * 1024)]));
  assert.equal((await node.query(large, QUESTION, { temperature: 0 })).answer, "2");
  const ids: bigint[] = [];
  for await (const frame of node.frames({ found: detectTask("green crescent") }, [IMAGE, PATH, Uint8Array.of(1)])) {
    ids.push(frame.id);
    if (frame.id === 3n) assert.ok(frame.error instanceof InvalidArgumentError);
    else assert.equal(frame.outcomes?.get("found").detections.length, 2);
  }
  assert.deepEqual(ids.sort(), [1n, 2n, 3n]);
  for await (const frame of node.frames({ found: detectTask("star") }, endless())) if (frame.id === 2n) break;
  for (let waits = 0; (await node.serverLoad()).runningRequests > 0; waits += 1) {
    assert.ok(waits < 500, "the frames go on");
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  const admin = node.raw(AdminService);
  await assert.rejects(
    admin.setLogLevel({ level: 1 }),
    (error) => toKestrelError(error) instanceof PermissionDeniedError,
  );
});

test("batches, whose results go on after a broken connection", async () => {
  const [host, port] = given("KESTREL_GRPC").split(":");
  const open = new Set<Socket>();
  const relay = createRelay((near) => {
    const far = connect(Number(port), host);
    for (const [one, other] of [
      [near, far],
      [far, near],
    ] as const) {
      open.add(one);
      one.pipe(other).on("error", () => one.destroy());
    }
  }).listen(0, "127.0.0.1");
  await once(relay, "listening");
  const client = new KestrelClient(`127.0.0.1:${(relay.address() as AddressInfo).port}`);
  const short = captionTask("short", { temperature: 0, maxTokens: 3 });
  const requests: BatchRequests = {
    star: [IMAGE, detectTask("pink star")],
    both: [PATH, { a: short, b: detectTask("green crescent") }],
    none: [null, queryTask("Why?", { maxTokens: 2 })],
    broken: [Uint8Array.of(1, 2, 3), short],
  };
  const batch = await client.createBatch(requests);
  assert.equal(batch.totalRequests, 4);
  const found: BatchResult[] = [];
  for await (const result of client.batchResults(batch.batchId)) {
    found.push(result);
    for (const socket of open) socket.destroy();
    open.clear();
  }
  assert.deepEqual(
    found.map(({ customId, index }) => [customId, index]),
    Object.keys(requests).map((customId, index) => [customId, index]),
  );
  const [star, both, none, broken] = found.map(({ outcome }) => outcome);
  assert.equal((star as DetectResult).detections.length, 1);
  assert.ok(both instanceof Outcomes && both.keys.length === 2 && both.get("a") && none && !(none instanceof RpcError));
  assert.ok(broken instanceof InvalidArgumentError);
  const state = await client.getBatch(batch.batchId);
  assert.deepEqual([state.state, state.done, state.failedRequests], [BatchState.COMPLETED, true, 1]);
  const { value: last } = await client.batchResults(batch.batchId, { startIndex: 3 }).next();
  assert.equal(last && last.customId, "broken");
  assert.equal((await client.cancelBatch(batch.batchId)).state, BatchState.COMPLETED);
  assert.ok((await client.listBatches()).some((each) => each.batchId === batch.batchId));
  await client.deleteBatch(batch.batchId);
  await assert.rejects(client.getBatch(batch.batchId), NotFoundError);
  const unreadable: BatchRequests = { ...requests, lost: ["/no/such.png", short] };
  await assert.rejects(client.createBatch(unreadable), InvalidImageError);
  const leftOut = new Map<string, KestrelError>();
  const rest = await client.createBatch(unreadable, { leftOut, offPeak: true });
  assert.deepEqual([rest.totalRequests, rest.offPeak, ...leftOut.keys()], [4, true, "lost"]);
  const signal = AbortSignal.timeout(50);
  await assert.rejects(client.batchResults(rest.batchId, { signal }).next(), RequestCancelledError);
  await assert.rejects(client.batchResults(rest.batchId, { timeoutMs: 50 }).next(), DeadlineExceededError);
  await client.deleteBatch(rest.batchId);
  for (const wrong of [{}, { "": requests["star"] }, { a: [IMAGE] }]) {
    await assert.rejects(client.createBatch(wrong as BatchRequests), /requests(: must be 1 to|\[".*"\]: )/);
  }
  for (const startIndex of [-1, 0.5, 2 ** 31]) {
    await assert.rejects(client.batchResults(rest.batchId, { startIndex }).next(), InvalidRequestError);
  }
  await assert.rejects(web.createBatch(requests), InvalidRequestError);
  client.close();
  relay.close();
});

test("TLS and tokens", async () => {
  const secure = given("KESTREL_SECURE");
  const rootCertificates = given("KESTREL_CA");
  const options = { tls: { rootCertificates }, token: given("KESTREL_TOKEN") };
  const client = new KestrelClient(secure, options);
  assert.equal((await client.query(IMAGE, QUESTION, { temperature: 0 })).answer, "2");
  assert.ok((await client.raw(AdminService).getStatistics({})).uptimeMs > 0);
  const stranger = new KestrelClient(secure, { ...options, token: "wrong" });
  await assert.rejects(stranger.query(null, "What?"), UnauthenticatedError);
  const unknown = new KestrelClient(secure, { tls: true });
  await assert.rejects(unknown.query(null, "What?"), UnavailableError);
  const plain = new KestrelClient(secure);
  await assert.rejects(plain.query(null, "What?"), UnavailableError);
  for (const each of [client, stranger, unknown, plain]) each.close();
});

test("a program ends when its calls have ended, without close", async () => {
  const program = `
    import { KestrelClient } from "kestrel-client";
    const client = new KestrelClient("${given("KESTREL_GRPC")}");
    console.log((await client.listModels()).length);
    for await (const event of client.streamCaption(process.argv[1], "long")) break;
  `;
  const here = new URL("../..", import.meta.url);
  const run = promisify(execFile)(process.execPath, ["--input-type=module", "-e", program, PATH], {
    cwd: here,
    timeout: 20_000,
  });
  assert.equal((await run).stdout, "1\n");
});
