// The parts of the choice among several servers.
import assert from "node:assert/strict";
import { mkdtemp, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { readDirectory } from "#internal/servers/reading.js";
import { Ring } from "#internal/servers/ring.js";
import { xxhash64 } from "#internal/servers/xxhash.js";

test("what a list of servers may look like", async () => {
  const file = join(await mkdtemp(join(tmpdir(), "kestrel-")), "servers");
  const place = (address: string, port: number) => ({
    endpoint: { address: { socket_address: { address, port_value: port } } },
  });
  const good: [string, string[]][] = [
    ["10.0.0.8:2\n\n# a comment\n 10.0.0.7 \r\n10.0.0.8:2\n", ["10.0.0.7:50051", "10.0.0.8:2"]],
    [
      JSON.stringify({
        servers: [{ address: "b:2" }, { address: "[::1]:1", serving: true }, { address: "c", serving: false }],
      }),
      ["[::1]:1", "b:2"],
    ],
    [
      JSON.stringify({ resources: [{ endpoints: [{ lb_endpoints: [place("::1", 1), place("b", 2)] }] }] }),
      ["[::1]:1", "b:2"],
    ],
  ];
  for (const [content, addresses] of good) {
    await writeFile(file, content);
    assert.deepEqual(await readDirectory(file), addresses);
  }
  const bad: [string | Uint8Array, RegExp][] = [
    ["", /names no server/],
    ['{"servers": []}', /names no server/],
    [Uint8Array.of(0xff), /is no list of servers/],
    ["[1]", /is no list of servers: \[1\] is no object/],
    ["{", /is no list of servers: .*JSON/],
    ["[".repeat(100_000), /is no list of servers/],
    ['{"servers": [{"address": 7}]}', /7 is not text/],
    ['{"servers": 7}', /servers is no list/],
    ['{"resources": [{"endpoints": [{}]}]}', /lb_endpoints is no list/],
    ["http://10.0.0.1", /is a web address/],
    ["10.0.0.1:99999", /a port to 65535/],
    [new Uint8Array(8 * 1024 * 1024 + 1).fill(32), /has more than 8388608 bytes/],
    [Array.from({ length: 10_001 }, (_, port) => `a:${port + 1}`).join("\n"), /names 10001 servers/],
  ];
  for (const [content, said] of bad) {
    await writeFile(file, content);
    await assert.rejects(readDirectory(file), said, String(content).slice(0, 40));
  }
  await assert.rejects(readDirectory("/dev/zero"), /it is no file/);
  const server = createServer((_, response) => {
    const more = () => response.write(Buffer.alloc(1024 * 1024, 32), () => response.destroyed || more());
    more();
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const endless = `http://127.0.0.1:${(server.address() as AddressInfo).port}/`;
  await assert.rejects(readDirectory(endless), /has more than 8388608 bytes/);
  server.close();
  server.closeAllConnections();
});

test("a ring: a server that joins or leaves moves no other keys", () => {
  const ring = (count: number) =>
    new Ring(new Map(Array.from({ length: count }, (_, number) => [`10.0.0.${number}:1`, number])));
  const keys = Array.from({ length: 2000 }, (_, number) => `key-${number}`);
  const first = (of: Ring<number>) => keys.map((key) => of.order(key).next().value as number);
  const [ten, eleven] = [first(ring(10)), first(ring(11))];
  assert.ok(ten.every((server, number) => server === eleven[number] || eleven[number] === 10));
  const moved = eleven.filter((server) => server === 10).length;
  assert.ok(moved > 100 && moved < 300, String(moved));
  assert.deepEqual([...ring(10).order("key")].sort(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
  assert.deepEqual([...new Ring(new Map()).order("key")], []);
  const hashes = ["", "a", "abc", "Nobody inspects the spammish repetition"].map((each) =>
    xxhash64(new TextEncoder().encode(each)).toString(16),
  );
  assert.deepEqual(hashes, ["ef46db3751d8e999", "d24ec4f1a98c6e5b", "44bc2cf5ad770999", "fbcea83c8a378bf1"]);
});
