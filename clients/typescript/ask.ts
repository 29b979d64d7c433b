// Prints the boxes of an object, then the answer to a question while it is generated: npx tsx ask.ts ADDRESS IMAGE
import { readFileSync } from "node:fs";
import { credentials } from "@grpc/grpc-js";
import { DetectRequest, StreamQueryRequest, VisionServiceClient } from "./gen/typescript/kestrel/v1/vision_service";

const client = new VisionServiceClient(process.argv[2], credentials.createInsecure());
const image = { source: { $case: "encoded" as const, value: readFileSync(process.argv[3]) } };

client.detect(DetectRequest.fromPartial({ image, object: "green crescent" }), (error, reply) => {
  if (error) throw error;
  for (const box of reply.objects) console.log("box", box.xMin, box.yMin, box.xMax, box.yMax);
  const request = { image, question: "How many green crescents are there?", sampling: { temperature: 0 } };
  const answer = client.streamQuery(StreamQueryRequest.fromPartial({ request }));
  answer.on("data", ({ event }) => event.$case === "textDelta" && process.stdout.write(event.value.text));
  answer.on("end", () => client.close());
});
