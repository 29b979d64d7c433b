// What the unmodified package @connectrpc/connect does with a transport, in Node and in a browser. The protos are read
// from the descriptors that the server's reflection has.
import { createFileRegistry, fromBinary } from "@bufbuild/protobuf";
import { FileDescriptorSetSchema } from "@bufbuild/protobuf/wkt";
import { Code, createClient } from "@connectrpc/connect";

export async function run(transport, key, descriptors, image, canUpload) {
  const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, descriptors));
  const [vision, images, models] = ["Vision", "Image", "Model"].map((name) =>
    createClient(registry.getService(`kestrel.v1.${name}Service`), transport),
  );
  const headers = { authorization: `Bearer ${key}` };
  const asked = (sampling = {}) => ({
    images: [{ source: { case: "encoded", value: image } }],
    query: { question: "How many red circles are there?", sampling: { temperature: 0, ...sampling } },
  });
  const failure = async (call) => {
    try {
      await call();
      return [];
    } catch (error) {
      return [Code[error.code], error.rawMessage];
    }
  };
  async function* parts() {
    yield { part: { case: "info", value: {} } };
    for (let at = 0; at < image.length; at += 10_000)
      yield { part: { case: "chunk", value: image.subarray(at, at + 10_000) } };
  }
  const put = canUpload
    ? await images.uploadImage(parts(), { headers })
    : await images.putImage({ image: asked().images[0] }, { headers });
  const caption = { image: { source: { case: "imageId", value: put.image.imageId } }, caption: {} };
  const whole = await vision.caption(caption, { headers });
  let [text, pieces] = ["", 0];
  for await (const { event } of vision.streamCaption(caption, { headers }))
    if (event.case === "textDelta") [text, pieces] = [text + event.value.text, pieces + 1];
  return {
    answer: (await vision.query(asked(), { headers })).answers[0].text,
    streamed: pieces > 1 && text === whole.captions[0].text,
    models: (await models.listModels({}, { headers })).models.map((each) => each.name),
    wrong_field: await failure(() => vision.query(asked({ topP: 2 }), { headers })),
    wrong_key: (await failure(() => vision.query(asked())))[0],
    wrong_stream: (await failure(async () => (await vision.streamCaption(caption))[Symbol.asyncIterator]().next()))[0],
    too_late: (await failure(() => vision.query(asked(), { headers, timeoutMs: 1 })))[0],
  };
}
