// What the client checks and converts itself, without a server.
import assert from "node:assert/strict";
import { mkdtemp, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

import * as kestrel from "kestrel-client";
import {
  ImageFeatures,
  InvalidImageError,
  InvalidRequestError,
  KestrelClient,
  queryTask,
  RequestCancelledError,
  RequestTooLargeError,
  similarity,
  toPixels,
  UnavailableError,
  vectors,
  type ImageInput,
} from "kestrel-client";
import {
  AdminService,
  EmbeddingDtype,
  ImageService,
  ModelService,
  VisionService,
  type Embedding,
} from "kestrel-client/protos";
import { KestrelClient as WebClient } from "kestrel-client/web";

/** A port where nothing listens: a call that is sent fails with UNAVAILABLE, at once. */
const NOWHERE = "127.0.0.1:1";
const IMAGE = new Uint8Array([1, 2, 3]);

test("targets", () => {
  for (const good of ["host", "host:1", "[::1]:50051", "::1", "unix:/run/kestrel.sock", "unix:///run/kestrel.sock"]) {
    new KestrelClient(good).close();
  }
  for (const bad of ["", "http://host", "host:99999", "host:0", "a b", "host:1/x", "user@host", "unix:", "[::1"]) {
    assert.throws(() => new KestrelClient(bad), InvalidRequestError, bad);
  }
  new WebClient("http://127.0.0.1:2020/");
  for (const bad of ["127.0.0.1:2020", "ftp://host", "http://", "https://me:secret@host"]) {
    assert.throws(() => new WebClient(bad), InvalidRequestError, bad);
  }
});

test("targets of several servers", async () => {
  for (const good of [["host", "10.0.0.1:1"], ["[::1]:1"], "a:1, b:2", "dns:///name:1", "dns:name", "directory:/x"]) {
    new KestrelClient(good).close();
  }
  for (const bad of [
    [],
    [""],
    ["a", "http://b"],
    ["dns:///a"],
    "directory:",
    "dns:",
    "dns:///a/b",
    "a:1,",
    7 as never,
  ]) {
    assert.throws(() => new KestrelClient(bad), InvalidRequestError, String(bad));
  }
  assert.throws(() => new KestrelClient(["127.0.0.1", "10.0.0.1"], { token: "t" }), /unencrypted/);
  new KestrelClient(["127.0.0.1", "[::1]:1"], { token: "t" }).close();
  new KestrelClient(["10.0.0.1"], { token: "t", tls: { serverName: "kestrel" } }).close();
  // Of a list that is read later, later.
  const folder = await mkdtemp(join(tmpdir(), "kestrel-"));
  const file = join(folder, "servers");
  await writeFile(file, "10.0.0.1:1\n");
  const client = new KestrelClient(`directory:${file}`, { token: "t" });
  await assert.rejects(client.listModels(), /^InvalidRequestError: token: would be sent to other machines unencrypted/);
  await writeFile(file, "127.0.0.1:1\n");
  await assert.rejects(client.listModels(), UnavailableError);
});

test("a token is sent without TLS to this machine only", () => {
  for (const target of ["localhost", "127.0.0.2:1", "[::1]:1", "unix:/x"]) new KestrelClient(target, { token: "t" });
  assert.throws(() => new KestrelClient("example.org", { token: "t" }), /unencrypted/);
  assert.throws(() => new KestrelClient("127.0.0.1.example.org", { token: "t" }), /unencrypted/);
  assert.throws(() => new WebClient("http://example.org", { token: "t" }), /unencrypted/);
  new KestrelClient("example.org", { token: "t", tls: true });
  new WebClient("https://example.org", { token: "t" });
  assert.throws(() => new KestrelClient("localhost", { token: "a\nb" }), /visible ASCII/);
});

test("options that cannot be sent name themselves", async () => {
  const client = new KestrelClient(NOWHERE);
  const cases: [RegExp, object][] = [
    [/^seed=1\.5/, { seed: 1.5 }],
    [/^seed=-1/, { seed: -1 }],
    [/^seed=9223372036854775808/, { seed: 1n << 63n }],
    [/^constraint: must have exactly one/, { constraint: { regex: "a", choices: ["a"] } }],
    [/^priority="urgent": must be one of low, normal, high/, { priority: "urgent" }],
    [/^priority="toString"/, { priority: "toString" }],
    [/^spatialRefs\[1\]: needs/, { spatialRefs: [{ x: 0, y: 0 }, { x: 0 }] }],
    [/^spatialRefs\[0\]: needs/, { spatialRefs: [null] }],
    [/^region: needs/, { region: { xMin: 0 } }],
    [/^session=/, { session: "a b" }],
    [/^timeoutMs=-1/, { timeoutMs: -1 }],
    [/^timeoutMs=NaN/, { timeoutMs: NaN }],
    [/^headers: the key "a b"/, { headers: { "a b": "c" } }],
    [/^headers: the value of "a"/, { headers: { a: "ä" } }],
    [/^maxAbsence: needs presupposes/, { maxAbsence: 0.5 }],
    [/^history\[0\]\.answer: must be a string/, { history: [{ question: "What?" }] }],
  ];
  for (const [said, options] of cases) {
    await assert.rejects(
      async () => client.query(IMAGE, "What?", options),
      (error: Error) => error instanceof InvalidRequestError && said.test(error.message),
      String(said),
    );
  }
  await assert.rejects(async () => client.caption(IMAGE, "huge" as never), /length="huge"/);
  await assert.rejects(async () => client.detect(IMAGE, "cat", { tiles: "2" as never }), /tiles="2"/);
  await assert.rejects(async () => client.detect(IMAGE, []), /objects: must be a name, or a list/);
  await assert.rejects(async () => client.query(IMAGE, 1 as never), /question: must be a string/);
  await assert.rejects(client.analyze(IMAGE, { a: "caption" as never }), /tasks\.a: is no task/);
  const several = queryTask("What?", { images: [IMAGE] });
  await assert.rejects(client.analyze(IMAGE, { a: several }), /tasks\.a: all tasks are about one image/);
  await assert.rejects(client.query(IMAGE, "What?", { maxTokens: 1.5 }), /max_tokens.* 1\.5/);
  await assert.rejects(client.detect(IMAGE, "cat", { maxObjects: 1.5 }), /max_objects.* 1\.5/);
  await assert.rejects(
    async () => client.runSkill("query", null, { arguments: "x" as never }),
    /arguments: must be an object/,
  );
  await assert.rejects(
    async () => client.runSkill("query", null, { settings: [1] as never }),
    /settings: must be an object/,
  );
  assert.throws(() => new KestrelClient(NOWHERE, { maxMessageBytes: 0 }), /maxMessageBytes=0/);
  assert.throws(() => new KestrelClient(NOWHERE, { tls: { certificate: "x" } }), /given together/);
  assert.throws(() => new KestrelClient(NOWHERE, { tls: { rootCertificates: "/nowhere.pem" } }), /can't read rootCert/);
  assert.throws(() => new WebClient("http://127.0.0.1:1").frames({}, []), /needs gRPC/);
});

test("images that cannot be read", async () => {
  const client = new KestrelClient(NOWHERE, { maxMessageBytes: 100_000 });
  const pixels = { data: new Uint8Array(11), width: 2, height: 2 };
  const cases: [ImageInput, RegExp | typeof InvalidImageError][] = [
    [tmpdir(), /is no file|EISDIR/],
    ["/dev/zero", /is no file/],
    ["/nowhere/picture.jpg", /can't read .*ENOENT/],
    ["file:///nowhere/picture.jpg", /can't read .*ENOENT/],
    [new URL("file:///nowhere/picture.jpg"), /can't read .*ENOENT/],
    ["http://127.0.0.1:1/a.jpg", /can't fetch/],
    ["data:text/html,<p>", /is a web page/],
    ["data:image/png;base64,", /is empty/],
    [new Uint8Array(), /is empty/],
    [new Blob([]), /is empty/],
    [pixels, /2 x 2 and 11 bytes are not of 1, 3 or 4 bytes a pixel/],
    [{ ...pixels, data: new Uint8Array(12), format: "rgba" }, /12 bytes are not of format rgba/],
    [{ ...pixels, width: 0 }, /0 x 2/],
    [{ ...pixels, data: [1] as never }, /must be a Uint8Array/],
    [5 as never, InvalidImageError],
    [null as never, InvalidImageError],
    [{} as never, InvalidImageError],
  ];
  for (const [image, said] of cases) await assert.rejects(client.caption(image), said);
  const large = new Uint8Array(100_000);
  await assert.rejects(client.caption(large), RequestTooLargeError);
  await assert.rejects(client.caption(new Blob([large, large])), RequestTooLargeError);
  const half = new Uint8Array(30_000);
  await assert.rejects(client.query(half, "What?", { images: [half] }), RequestTooLargeError);
  const raw = { data: new Uint8Array(300 * 300), width: 300, height: 300 };
  await assert.rejects(client.putImage(raw), RequestTooLargeError);
  await assert.rejects(
    new WebClient("http://127.0.0.1:1", { maxMessageBytes: 9 }).putImage(large),
    RequestTooLargeError,
  );
  const aborted = { signal: AbortSignal.abort() };
  await assert.rejects(client.caption("http://127.0.0.1:1/a.jpg", "short", aborted), RequestCancelledError);
  const path = join(await mkdtemp(join(tmpdir(), "kestrel-")), "large.bin");
  await writeFile(path, new Uint8Array(100_001));
  await assert.rejects(client.caption(path), RequestTooLargeError);
  await assert.rejects(client.caption(pathToFileURL(path)), RequestTooLargeError);
});

test("an address is read up to the limit only", async () => {
  let sent = 0;
  const server = createServer((_, response) => {
    response.writeHead(200, { "content-type": "image/jpeg" });
    const more = () => {
      while (sent < 1e8 && response.write(Buffer.alloc(65_536))) sent += 65_536;
    };
    response.on("drain", more);
    more();
  }).listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const { port } = server.address() as AddressInfo;
  const client = new KestrelClient(NOWHERE, { maxMessageBytes: 1_000_000 });
  await assert.rejects(client.caption(`http://127.0.0.1:${port}/`), /more than the limit of 1000000 bytes/);
  assert.ok(sent < 5e7);
  server.closeAllConnections();
  server.close();
});

test("pixels, vectors and similarity", () => {
  const size = { width: 200, height: 100 };
  assert.deepEqual(toPixels({ x: 1, y: 0.5 }, size), { x: 199, y: 50 });
  assert.deepEqual(toPixels({ xMin: 0, yMin: 0.25, xMax: 0.5, yMax: 1 }, size), {
    left: 0,
    top: 25,
    right: 100,
    bottom: 100,
  });
  const halves = [0x3c00, 0xc000, 0x0001, 0x7c00];
  const data = new Uint8Array(new Uint16Array(halves).buffer);
  const embedding = { data, rows: 2, dimensions: 2, dtype: EmbeddingDtype.FLOAT16 } as Embedding;
  assert.deepEqual(
    vectors(embedding).map((each) => [...each]),
    [
      [1, -2],
      [2 ** -24, Infinity],
    ],
  );
  assert.throws(() => vectors({ ...embedding, dimensions: 3 }), /not 2 x 3/);
  assert.ok(Math.abs(similarity(Float32Array.of(1, 0), Float32Array.of(1, 1)) - Math.SQRT1_2) < 1e-6);
});

test("features", async () => {
  const size = { width: 40, height: 30 };
  const wide = new ImageFeatures(Float32Array.of(1, -2, 3, 0.5, 0, 4), 2, 3, size, "mine@1");
  assert.deepEqual([...wide.data.subarray(0, 8)], [0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
  const half = new ImageFeatures(Uint16Array.of(0x3c00, 0x0001), 1, 2, size);
  assert.deepEqual([...half.data], [0, 0x3c, 1, 0]);
  const { data, rows, dimensions } = half;
  assert.deepEqual(ImageFeatures.of({ data, rows, dimensions } as Embedding, size), half);
  for (const [make, said] of [
    [() => new ImageFeatures(Float32Array.of(1), 1, 2, size), /1 numbers are not 1 x 2/],
    [() => new ImageFeatures([1] as never, 1, 1, size), /must be a Float32Array, or a Uint16Array/],
    [() => new ImageFeatures(Float32Array.of(1), 1, 1, { width: 0, height: 1 }), /size\.width is 0/],
    [() => new ImageFeatures(Float32Array.of(), 0, 1, size), /rows is 0/],
  ] as const) {
    assert.throws(make, said);
  }
  await assert.rejects(new KestrelClient(NOWHERE, { maxMessageBytes: 9 }).caption(wide), RequestTooLargeError);
});

test("an error has the name of its class", () => {
  const errors = Object.entries(kestrel).filter(([name]) => name.endsWith("Error") && /^[A-Z]/.test(name));
  assert.ok(errors.length >= 18);
  for (const [name, kind] of errors) assert.equal((kind as typeof Error).prototype.name, name);
});

test("every method of the services has a method of the client, or a reason", () => {
  const own: Record<string, string> = {
    uploadImage: "putImage",
    getServerInfo: "serverInfo",
    getLoad: "serverLoad",
    streamFrames: "frames",
  };
  for (const service of [VisionService, ImageService, ModelService]) {
    for (const { localName } of service.methods) {
      const name = own[localName] ?? localName;
      assert.equal(typeof KestrelClient.prototype[name as "query"], "function", localName);
    }
  }
  assert.equal(typeof new KestrelClient(NOWHERE).raw(AdminService).drain, "function");
});
