/** Large images in several messages. */
import type { MessageInitShape } from "@bufbuild/protobuf";

import type { UploadImageRequestSchema } from "../gen/kestrel/v1/image_service_pb.js";

/** Files above this size are sent in pieces. */
export const UPLOAD_BYTES = 4 * 1024 * 1024;
const PIECE_BYTES = 1024 * 1024;

/** The messages of an upload. `sha256`: of the file; undefined where the platform cannot compute it. */
export async function* pieces(
  file: Uint8Array,
  sha256: Uint8Array | undefined,
): AsyncGenerator<MessageInitShape<typeof UploadImageRequestSchema>> {
  const info = { sizeBytes: BigInt(file.length), ...(sha256 === undefined ? {} : { sha256 }) };
  yield { part: { case: "info", value: info } };
  for (let at = 0; at < file.length; at += PIECE_BYTES) {
    yield { part: { case: "chunk", value: file.subarray(at, at + PIECE_BYTES) } };
  }
}
