// Which calls are repeated, and what becomes of the connection: against a gRPC server of connect-es.
import assert from "node:assert/strict";
import { constants, createServer, type Http2Server } from "node:http2";
import type { AddressInfo } from "node:net";
import { after, test } from "node:test";

import type { DescMessage, MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, type ConnectRouter } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import {
  captionTask,
  ConnectionLostError,
  DeadlineExceededError,
  ImageHandle,
  IncompleteStreamError,
  InvalidArgumentError,
  KestrelClient,
  NotFoundError,
  OverloadedError,
  RequestCancelledError,
  RpcError,
  UnavailableError,
  UnimplementedError,
  type NodeOptions,
} from "kestrel-client";
import {
  ImageService,
  VisionService,
  type StreamCaptionResponseSchema,
  type StreamQueryResponseSchema,
} from "kestrel-client/protos";
import { KestrelClient as WebClient } from "kestrel-client/web";

type Messages<D extends DescMessage> = AsyncGenerator<MessageInitShape<D>>;

const IMAGE = new Uint8Array([1, 2, 3]);
const open: { server: Http2Server; client: KestrelClient }[] = [];

after(() => {
  for (const { server, client } of open) {
    client.close();
    server.close();
  }
});

/** `refused`: how many calls the server refuses, before it begins them. */
async function served(routes: (router: ConnectRouter) => void, options: NodeOptions = {}, refused = 0) {
  const adapter = connectNodeAdapter({ routes, connect: false, grpcWeb: false });
  const server = createServer((request, response) => {
    if (refused-- > 0) request.stream.close(constants.NGHTTP2_REFUSED_STREAM);
    else adapter(request, response);
  });
  const sessions = new Set<{ destroy: () => void }>();
  server.on("session", (session) => sessions.add(session));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const client = new KestrelClient(`127.0.0.1:${(server.address() as AddressInfo).port}`, options);
  open.push({ server, client });
  return { client, drop: () => sessions.forEach((session) => session.destroy()) };
}

/** A query that fails with `errors`, one after the other, and then succeeds. */
function failing(errors: ConnectError[]) {
  const times: number[] = [];
  const routes = (router: ConnectRouter) =>
    router.service(VisionService, {
      query: () => {
        const error = errors[times.length];
        times.push(performance.now());
        if (error !== undefined) throw error;
        return { answers: [{ text: "yes" }] };
      },
    });
  return { times, routes };
}

const overloaded = (pushback?: string) =>
  new ConnectError("the queue is full", Code.ResourceExhausted, pushback ? { "grpc-retry-pushback-ms": pushback } : {});

test("a call is repeated after the pause that the server requests", async () => {
  const { times, routes } = failing([overloaded("150"), new ConnectError("starting", Code.Unavailable)]);
  const { client } = await served(routes);
  assert.equal((await client.query(null, "Is it?")).answer, "yes");
  assert.equal(times.length, 3);
  assert.ok((times[1] as number) - (times[0] as number) >= 145);
});

test("a call that the server refuses by HTTP/2 is repeated", async () => {
  const { times, routes } = failing([]);
  const { client } = await served(routes, {}, 2);
  assert.equal((await client.query(null, "Is it?")).answer, "yes");
  assert.equal(times.length, 1);
  const always = await served(routes, {}, 9);
  await assert.rejects(always.client.query(null, "Is it?"), UnavailableError);
});

test("a call is repeated three times, and never against the server's word", async () => {
  const many = failing(Array.from({ length: 9 }, () => new ConnectError("starting", Code.Unavailable)));
  const { client } = await served(many.routes);
  await assert.rejects(client.query(null, "Is it?"), UnavailableError);
  assert.equal(many.times.length, 4);
  const cases: [ConnectError, typeof RpcError][] = [
    [overloaded("-1"), OverloadedError],
    [overloaded("soon"), OverloadedError],
    [new ConnectError("bad", Code.InvalidArgument), InvalidArgumentError],
    [new ConnectError("late", Code.DeadlineExceeded), DeadlineExceededError],
  ];
  for (const [error, kind] of cases) {
    const once = failing([error]);
    await assert.rejects((await served(once.routes)).client.query(null, "Is it?"), kind);
    assert.equal(once.times.length, 1);
  }
});

test("the timeout covers all attempts", async () => {
  const { times, routes } = failing(Array.from({ length: 9 }, () => overloaded("400")));
  const { client } = await served(routes);
  const began = performance.now();
  await assert.rejects(client.query(null, "Is it?", { timeoutMs: 600 }), OverloadedError);
  assert.ok(performance.now() - began < 600);
  assert.equal(times.length, 2);
});

test("a signal ends the pause between attempts", async () => {
  const { times, routes } = failing([overloaded("60000")]);
  const { client } = await served(routes);
  const controller = new AbortController();
  const asked = client.query(null, "Is it?", { signal: controller.signal });
  while (times.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
  controller.abort(new Error("enough"));
  await assert.rejects(asked, (error: RequestCancelledError) => {
    assert.ok(error instanceof RequestCancelledError);
    assert.equal((error.cause as Error).message, "enough");
    return true;
  });
});

test("a unary call whose connection is lost is repeated, a stream that has begun is not", async () => {
  let calls = 0;
  const { client, drop } = await served((router) =>
    router.service(VisionService, {
      query: async (_, { signal }) => {
        calls += 1;
        if (calls > 1) return { answers: [{ text: "yes" }] };
        setTimeout(drop, 20);
        return new Promise((resolve) => signal.addEventListener("abort", () => resolve({})));
      },
      streamQuery: async function* (_, { signal }): Messages<typeof StreamQueryResponseSchema> {
        yield { event: { case: "started", value: {} } };
        yield { event: { case: "textDelta", value: { text: "ye" } } };
        setTimeout(drop, 20);
        await new Promise((resolve) => signal.addEventListener("abort", resolve));
      },
    }),
  );
  assert.equal((await client.query(null, "Is it?")).answer, "yes");
  assert.equal(calls, 2);
  const texts: string[] = [];
  const reading = async () => {
    for await (const event of client.streamQuery(null, "Is it?")) {
      if (event.case === "textDelta") texts.push(event.value.text);
    }
  };
  await assert.rejects(reading(), ConnectionLostError);
  assert.deepEqual(texts, ["ye"]);
});

test("a server that is not there is unavailable", async () => {
  await assert.rejects(new KestrelClient("127.0.0.1:1").query(null, "Is it?"), UnavailableError);
  await assert.rejects(new KestrelClient("unix:/nowhere.sock").query(null, "Is it?"), UnavailableError);
  await assert.rejects(new WebClient("http://127.0.0.1:1").query(null, "Is it?"), UnavailableError);
  await assert.rejects(new KestrelClient("127.0.0.1:1").waitReady({ timeoutMs: 300 }), DeadlineExceededError);
});

test("a stream ends with its result, without one, or where its reader leaves it", async () => {
  let ended = 0;
  const { client } = await served((router) =>
    router.service(VisionService, {
      streamCaption: async function* ({ caption }, { signal }): Messages<typeof StreamCaptionResponseSchema> {
        signal.addEventListener("abort", () => (ended += 1));
        yield { event: { case: "started", value: {} } };
        yield { event: { case: "textDelta", value: { text: "a " } } };
        if (caption?.length === 1) return;
        if (caption?.length === 3) await new Promise((resolve) => signal.addEventListener("abort", resolve));
        yield { event: { case: "final", value: { captions: [{ text: "a cat" }] } } };
      },
    }),
  );
  assert.equal((await client.streamCaption(IMAGE).result()).caption, "a cat");
  const stream = client.streamCaption(IMAGE);
  for await (const event of stream) assert.equal(event.value.text, "a ");
  assert.equal((await stream.result()).caption, "a cat");
  assert.equal((await stream.result()).caption, "a cat");
  await assert.rejects(client.streamCaption(IMAGE, "short").result(), IncompleteStreamError);
  const before = ended;
  const left = client.streamCaption(IMAGE, "long");
  for await (const _ of left) break;
  await assert.rejects(left.result(), RequestCancelledError);
  while (ended === before) await new Promise((resolve) => setTimeout(resolve, 5));
});

/** Servers that know no id: a front gives each call to another one. */
async function forgetful(options: NodeOptions = {}) {
  const calls: string[] = [];
  const { client } = await served((router) => {
    router.service(ImageService, {
      putImage: () => ({ image: { imageId: `img_${calls.push("put")}` } }),
    });
    router.service(VisionService, {
      query: ({ images }) => {
        const all = images.map((each) => each.source);
        calls.push(all.map((each) => (each.case === "imageId" ? each.value : each.case)).join(" "));
        if (all.some((each) => each.case === "imageId" && each.value !== "known")) throw notFound();
        return { answers: [{ text: "yes" }], info: { images: all.map((_, place) => ({ imageId: `new_${place}` })) } };
      },
      streamQuery: async function* ({ images: [image] }): Messages<typeof StreamQueryResponseSchema> {
        calls.push(`stream ${image?.source.case}`);
        if (image?.source.case === "imageId") throw notFound();
        yield {
          event: { case: "final", value: { answers: [{ text: "yes" }], info: { images: [{ imageId: "new_s" }] } } },
        };
      },
    });
  }, options);
  return { client, calls };
}

test("an image that the server does not know is sent with the repeated call", async () => {
  const { client, calls } = await forgetful();
  const handle = await client.putImage(IMAGE);
  const byId = new ImageHandle(handle.imageId);
  assert.equal((await client.query(byId, "?")).answer, "yes");
  await assert.rejects(client.query(handle, "?", { images: [new ImageHandle("img_x")] }), NotFoundError);
  assert.equal((await client.streamQuery(handle, "?").result()).answer, "yes");
  // The id of the server that answered last takes the place of all earlier ones.
  await client.query(handle, "?", { images: [new ImageHandle("known"), byId] });
  assert.deepEqual(calls, [
    ...["put", "img_1", "encoded"],
    ...["new_0 img_x", "encoded img_x"],
    ...["stream imageId", "stream encoded"],
    ...["new_s known new_s", "encoded known encoded"],
  ]);
  await client.query(new ImageHandle("img_y", undefined, IMAGE), "?");
  assert.deepEqual(calls.slice(-2), ["img_y", "encoded"], "the source of the handle");
});

test("an image without room in the request is put", async () => {
  const image = new Uint8Array(300_000).fill(7);
  const { client, calls } = await forgetful({ maxMessageBytes: 500_000 });
  const handle = await client.putImage(image);
  // Two images of this size do not fit into a message, nor does one beside a long question.
  await assert.rejects(client.query(handle, "?".repeat(250_000)), NotFoundError);
  assert.deepEqual(calls, ["put", "img_1", "put", "img_3", "put", "img_5", "put", "img_7"]);
});

test("what the client keeps has a limit, and others are asked for", async () => {
  const asked: string[] = [];
  const others = new Map([["img_a", Uint8Array.of(9)]]);
  const imageSource = async (imageId: string) => {
    asked.push(imageId);
    return others.get(imageId) ?? null;
  };
  const { client, calls } = await forgetful({ keptImageBytes: 4, imageSource });
  const ids = [];
  for (const byte of [1, 2]) ids.push((await client.putImage(Uint8Array.of(byte, 0, 0))).imageId);
  await assert.rejects(client.query(new ImageHandle(ids[0] as string), "?"), NotFoundError);
  await client.query(new ImageHandle(ids[1] as string), "?");
  await client.query(new ImageHandle("img_a"), "?");
  assert.deepEqual(asked, [ids[0], "img_a"]);
  // An array that its owner has changed since is not the image that was stored.
  const reused = Uint8Array.of(4, 5);
  const handle = await client.putImage(reused);
  reused[0] = 6;
  await assert.rejects(client.query(handle, "?"), NotFoundError);
  reused[0] = 4;
  await client.query(handle, "?");
  await assert.rejects(client.deleteImage(handle), UnimplementedError);
  await assert.rejects(client.query(handle, "?"), NotFoundError, "the caller has deleted it");
  assert.equal(calls.filter((each) => each === "put").length, 3);
});

/** NOT_FOUND with google.rpc.ErrorInfo{reason: "IMAGE_NOT_FOUND"}. */
function notFound(): ConnectError {
  const error = new ConnectError("no such image", Code.NotFound);
  const reason = new TextEncoder().encode("IMAGE_NOT_FOUND");
  error.details.push({ type: "google.rpc.ErrorInfo", value: Uint8Array.of(0x0a, reason.length, ...reason) });
  return error;
}

test("map keeps the order, bounds its requests, and gives errors in place of results", async () => {
  let [running, most] = [0, 0];
  let threeRun = () => {};
  const three = new Promise<void>((resolve) => (threeRun = resolve));
  const { client } = await served((router) =>
    router.service(VisionService, {
      caption: async ({ image }) => {
        most = Math.max(most, ++running);
        if (running === 3) threeRun();
        await three; // Also on a busy machine, three requests run at once.
        await new Promise((resolve) => setTimeout(resolve, 5));
        running -= 1;
        const [number] = image?.source.value as Uint8Array;
        if (number === 3) throw new ConnectError("bad", Code.InvalidArgument);
        return { captions: [{ text: String(number) }] };
      },
    }),
  );
  const images = Array.from({ length: 10 }, (_, number) => Uint8Array.of(number, 0));
  const done: number[] = [];
  const results = await client.map(images, captionTask(), { concurrency: 3, progress: (count) => done.push(count) });
  const shown = results.map((each) => (each instanceof Error ? each.name : each.caption));
  assert.deepEqual(shown, ["0", "1", "2", "InvalidArgumentError", "4", "5", "6", "7", "8", "9"]);
  assert.deepEqual(done, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
  assert.equal(most, 3);
  await assert.rejects(client.map(images, captionTask(), { concurrency: 0 }), /concurrency=0/);
});
