// Several servers: three processes, which the tests list, kill and restart through KESTREL_COMMANDS, an HTTP address.
// KESTREL_SERVERS has their addresses, KESTREL_DIRECTORY is the file with the list. Each has a model of its own name.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { connect, createServer, type Http2Server } from "node:http2";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { promisify } from "node:util";

import {
  ConnectionLostError,
  ImageHandle,
  KestrelClient,
  NotFoundError,
  UnavailableError,
  type HandlingOptions,
  type ImageInput,
  type NodeOptions,
} from "kestrel-client";

function given(name: string): string {
  const value = process.env[name];
  assert.ok(value, `${name} must be set`);
  return value;
}

const ADDRESSES = given("KESTREL_SERVERS").split(",");
const COMMANDS = given("KESTREL_COMMANDS");
const DIRECTORY = given("KESTREL_DIRECTORY");
const GREEDY = { temperature: 0, maxTokens: 2 };
const PATIENCE_MS = 60_000;

async function told(what: string): Promise<Response> {
  const response = await fetch(`${COMMANDS}/${what}`);
  assert.ok(response.ok, `${what}: ${response.status}`);
  return response;
}

async function order(command: string, body = ""): Promise<void> {
  const response = await fetch(`${COMMANDS}/${command}`, { method: "POST", body });
  assert.ok(response.ok, `${command}: ${await response.text()}`);
}

const FILES = await Promise.all(
  Array.from({ length: 24 }, async (_, number) => new Uint8Array(await (await told(`images/${number}`)).arrayBuffer())),
);

/** A client of all servers, or of `target`, that is closed at the end. */
async function using(
  work: (client: KestrelClient) => Promise<void>,
  target: string | readonly string[] = ADDRESSES,
  options: NodeOptions = {},
): Promise<void> {
  const client = new KestrelClient(target, { timeoutMs: 30_000, ...options });
  try {
    await work(client);
  } finally {
    client.close();
  }
}

/** The servers of the images. */
function places(
  client: KestrelClient,
  images: readonly ImageInput[] = FILES,
  options: HandlingOptions = {},
): Promise<string[]> {
  return Promise.all(images.map(async (each) => (await client.query(each, "?", { ...GREEDY, ...options })).info.model));
}

async function until(done: () => Promise<boolean> | boolean): Promise<void> {
  for (const ends = performance.now() + PATIENCE_MS; !(await done()); await pause(50)) {
    assert.ok(performance.now() < ends, "it took too long");
  }
}

const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

test("calls about an image stay on one server, which is that of the Python client", async () => {
  await using(async (client) => {
    const before = await places(client);
    assert.deepEqual(before, await (await told("places")).json());
    for (const [number, place] of before.slice(0, 6).entries()) {
      const handle = await client.putImage(FILES[number] as Uint8Array);
      const byId = new ImageHandle(handle.imageId);
      assert.equal((await client.caption(handle, "short", GREEDY)).info.model, place);
      assert.equal((await client.streamQuery(byId, "?", GREEDY).result()).info.model, place);
      assert.equal(await client.deleteImage(byId), true);
    }
    assert.equal(new Set(await places(client, FILES, { session: "of-one-user" })).size, 1);
    assert.ok((await client.query(null, "?", GREEDY)).info.model);
    assert.equal((await client.listModels()).length, 1);
  });
});

test("a server that is killed costs no call, and gets its images back", async () => {
  await using(async (client) => {
    const before = await places(client);
    const handles = await Promise.all(FILES.map((each) => client.putImage(each)));
    const ids = handles.map((each) => new ImageHandle(each.imageId));
    await order("kill/a");
    try {
      const after = await places(client, ids);
      assert.deepEqual(
        after.map((name, number) => (before[number] === "a" ? name !== "a" : name === before[number])),
        after.map(() => true),
        "no other image moves",
      );
      const streamed = await Promise.all(
        ids.map(async (each) => (await client.streamQuery(each, "?", GREEDY).result()).info.model),
      );
      assert.deepEqual(streamed, after);
    } finally {
      await order("restart/a");
    }
    await until(async () => String(await places(client)) === String(before));
    // The server that was killed has lost its images, and the client's ids.
    assert.deepEqual(await places(client, handles), before);
  });
});

test("a server that is killed while it answers", async () => {
  await using(async (client) => {
    const before = await places(client);
    const asked = FILES.map((each) => client.query(each, "?", { temperature: 0, maxTokens: 60 }));
    const stream = client.streamQuery(FILES[before.indexOf("c")] as Uint8Array, "?", {
      temperature: 0,
      maxTokens: 900,
    });
    for await (const _ of stream) break; // Begun; leaving it cancels it.
    const begun = client.streamQuery(FILES[before.indexOf("c")] as Uint8Array, "?", { temperature: 0, maxTokens: 900 });
    const events = begun[Symbol.asyncIterator]();
    await events.next();
    await order("kill/c");
    try {
      const results = await Promise.all(asked);
      assert.ok(results.every((each) => each.usage.outputTokens === 60));
      results.forEach(({ info: { model } }, number) => before[number] === "c" || assert.equal(model, before[number]));
      await assert.rejects(begun.result(), (error: ConnectionLostError) => {
        assert.ok(error instanceof ConnectionLostError);
        assert.deepEqual([error.code, error.reason, error.retryAfterMs], ["UNAVAILABLE", "CONNECTION_LOST", 100]);
        return true;
      });
    } finally {
      await order("restart/c");
    }
  });
});

test("a server that drains is left, and its streams end whole", async () => {
  await using(async (client) => {
    const before = await places(client);
    const asked = FILES.map((each) => client.streamQuery(each, "?", { temperature: 0, maxTokens: 40 }).result());
    await Promise.race(asked);
    await order("stop/b");
    try {
      const ended = await Promise.all(asked);
      assert.ok(ended.every((each) => each.usage.outputTokens === 40));
      const after = await places(client);
      assert.ok(!after.includes("b"));
      after.forEach((name, number) => before[number] === "b" || assert.equal(name, before[number]));
      await order("await/b");
    } finally {
      await order("restart/b");
    }
  });
});

/** A front without affinity: each call goes to the next server. Gives its address. */
function roundRobin(): { front: Http2Server; address: Promise<string> } {
  const sessions = ADDRESSES.map((each) => connect(`http://${each}`));
  let count = 0;
  const front = createServer();
  front.on("stream", (stream, headers) => {
    const there = (sessions[count++ % sessions.length] as (typeof sessions)[number]).request(
      Object.fromEntries(Object.entries(headers).filter(([name]) => name !== ":authority")),
    );
    stream.pipe(there);
    there.on("response", (answer) => stream.respond(answer, { waitForTrailers: true }));
    let last = {};
    there.on("trailers", (trailers) => (last = trailers));
    stream.on("wantTrailers", () => stream.sendTrailers(last));
    there.pipe(stream);
  });
  front.on("close", () => sessions.forEach((each) => each.close()));
  const address = new Promise<string>((resolve) => {
    front.listen(0, "127.0.0.1", () => resolve(`127.0.0.1:${(front.address() as AddressInfo).port}`));
  });
  return { front, address };
}

test("a front that gives each call to another server: the image goes with the repeated call", async () => {
  const { front, address } = roundRobin();
  await using(
    async (client) => {
      const handle = await client.putImage(FILES[0] as Uint8Array);
      const other = await client.putImage(FILES[1] as Uint8Array);
      for (let round = 0; round < 4; round += 1) {
        assert.ok((await client.query(handle, "?", { ...GREEDY, images: [other] })).info.model);
        assert.ok((await client.streamQuery(new ImageHandle(handle.imageId), "?", GREEDY).result()).info.model);
      }
      await assert.rejects(client.query(new ImageHandle(`img_${"0".repeat(32)}`), "?"), NotFoundError);
    },
    await address,
  );
  front.close();
});

for (const target of [`directory:${DIRECTORY}`, `directory:${COMMANDS}/directory`]) {
  test(`servers join, leave and die under load: ${target.slice(0, 14)}`, async () => {
    await order("list", "a b");
    const warnings: string[] = [];
    const onWarning = (warning: Error) => warnings.push(warning.message);
    process.on("warning", onWarning);
    await using(async (client) => {
      const answered: string[] = [];
      const failures: unknown[] = [];
      let isOver = false;
      const handles = await Promise.all(FILES.slice(0, 8).map((each) => client.putImage(each)));
      const ask = async (number: number) => {
        const image = number % 3 ? (FILES[number] as Uint8Array) : new ImageHandle(handles[number]?.imageId as string);
        while (!isOver) {
          const options = { temperature: 0, maxTokens: 12 };
          const call = number % 2 ? client.streamQuery(image, "?", options).result() : client.query(image, "?", GREEDY);
          await call.then(
            ({ info }) => answered.push(info.model),
            (error: unknown) => failures.push(error),
          );
        }
      };
      const are = (...names: string[]) =>
        until(async () => String([...new Set(await places(client))].sort()) === String(names));
      const callers = FILES.slice(0, 8).map((_, number) => ask(number));
      try {
        await are("a", "b");
        const before = await places(client);
        const options = { temperature: 0, maxTokens: 300 };
        const long = client.streamQuery(FILES[before.indexOf("a")] as Uint8Array, "?", options).result();
        await order("list", "a b c");
        await are("a", "b", "c");
        // A server that joins takes over some images, and moves no others.
        const after = await places(client);
        after.forEach((name, number) => name === "c" || assert.equal(name, before[number]));
        await order("list", "b c");
        await order("stop/a");
        await are("b", "c");
        assert.equal((await long).usage.outputTokens, 300, "a stream that has begun goes on");
        // The other order: a server is killed before the directory says so.
        await order("kill/b");
        await are("c");
        await order("list", "c");
        const count = answered.length;
        await until(() => answered.length >= count + 20);
        // A list without a server changes nothing.
        await order("list", "");
        await until(() => warnings.some((each) => each.includes("names no server; the servers stay as they are")));
        await are("c");
      } finally {
        isOver = true;
        await Promise.all(callers);
        for (const name of ["a", "b"]) {
          await order(`await/${name}`);
          await order(`restart/${name}`);
        }
      }
      // Of a server that is killed, only a stream that has begun may end early.
      assert.deepEqual(
        failures.filter((each) => !(each instanceof ConnectionLostError)),
        [],
      );
      assert.deepEqual([...new Set(answered)].sort(), ["a", "b", "c"]);
    }, target);
    process.off("warning", onWarning);
  });
}

test("a program that follows a directory ends when its calls have ended, without close", async () => {
  await order("list", "a b c");
  const program = `
    import { KestrelClient } from "kestrel-client";
    const client = new KestrelClient("directory:${COMMANDS}/directory");
    console.log((await client.listModels()).length);
  `;
  const run = promisify(execFile)(process.execPath, ["--input-type=module", "-e", program], {
    cwd: new URL("../..", import.meta.url),
    timeout: 20_000,
  });
  assert.equal((await run).stdout, "1\n");
});

test("a directory that is not there", async () => {
  for (const source of ["/nowhere", "/", "http://127.0.0.1:1/kestrel", "http://[", `${COMMANDS}/nothing`]) {
    await using(async (client) => {
      await assert.rejects(client.query(null, "?"), (error: UnavailableError) => {
        return error instanceof UnavailableError && error.rawMessage.startsWith(`the directory of servers ${source}: `);
      });
    }, `directory:${source}`);
  }
});

test("the addresses of a name are servers", async () => {
  await using(
    async (client) => assert.deepEqual(new Set(await places(client)), new Set(["a"])),
    `dns:///${ADDRESSES[0] as string}`, // An address is a name with itself as its address.
  );
  await using(async (client) => {
    await assert.rejects(client.query(null, "?"), /UNAVAILABLE: the directory of servers .*cannot be resolved/);
  }, "dns:///nowhere.invalid:1");
});
