// connect_program.mjs with the transports of @connectrpc/connect-node: ADDRESS KEY IMAGE DESCRIPTORS. Prints JSON.
import { readFileSync } from "node:fs";
import { compressionGzip, createConnectTransport } from "@connectrpc/connect-node";
import { run } from "./connect_program.mjs";

const [baseUrl, key, image, descriptors] = process.argv.slice(2);
const found = [];
for (const useBinaryFormat of [true, false])
  for (const sendCompression of [null, compressionGzip]) {
    const useHttpGet = sendCompression !== null;
    const options = { baseUrl, httpVersion: "1.1", useBinaryFormat, sendCompression, useHttpGet };
    found.push(await run(createConnectTransport(options), key, readFileSync(descriptors), readFileSync(image), true));
  }
console.log(JSON.stringify(found));
