"""Prepares images to be stored on the server, in one message or in pieces."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from .._pb.kestrel.v1 import common_pb2
from .._pb.kestrel.v1 import image_service_pb2 as pb
from ..errors import InvalidImageError
from ..geometry import ImageSize
from .images import ImageHandle, ImageInput, loaded, to_image

UPLOAD_THRESHOLD_BYTES = 4 * 1024 * 1024
"""Larger files are uploaded in pieces."""
CHUNK_BYTES = 1024 * 1024

_NO_LIMIT = 2**63
_LARGEST_FETCHED_BYTES = 256 * 1024 * 1024
"""More than any server accepts."""


@dataclass(frozen=True, slots=True)
class Put:
    """An image ready to be stored: in one message, or in pieces if ``data`` is set."""

    request: pb.PutImageRequest
    source: ImageInput | None
    """The image, in a form that can be read again; None if the caller did not give it."""
    data: bytes = field(default=b"", repr=False)
    sha256: bytes = b""

    def pieces(self) -> Iterator[pb.UploadImageRequest]:
        """Yields the messages of an upload."""
        info = pb.UploadInfo(size_bytes=len(self.data), sha256=self.sha256)
        yield pb.UploadImageRequest(info=info)
        for start in range(0, len(self.data), CHUNK_BYTES):
            yield pb.UploadImageRequest(chunk=self.data[start : start + CHUNK_BYTES])


def prepare_put(image: ImageInput, max_message_bytes: int) -> Put:
    """Reads files and fetches addresses. Raises InvalidImageError and RequestTooLargeError."""
    image = loaded(image, _LARGEST_FETCHED_BYTES)
    # A file has no limit here, as it can be sent in pieces. Pixels that don't fit a message become a PNG first.
    is_file = isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview))
    message = to_image(image, _NO_LIMIT if is_file else max_message_bytes)
    if len(message.encoded) > min(UPLOAD_THRESHOLD_BYTES, max_message_bytes // 2):
        data = message.encoded
        return Put(pb.PutImageRequest(), image, data, hashlib.sha256(data).digest())
    return Put(pb.PutImageRequest(image=message), image)


def prepare_stored(image: common_pb2.Image, max_message_bytes: int) -> Put:
    """As prepare_put, from the message of an image with its contents."""
    if image.HasField("raw"):
        return Put(pb.PutImageRequest(image=image), None)
    return prepare_put(image.encoded, max_message_bytes)


def read_handle(stored: pb.StoredImage, source: ImageInput | None) -> ImageHandle:
    """``source``: the image that was stored. A handle stands for its own source."""
    original = source.source if isinstance(source, ImageHandle) else source
    size = ImageSize(stored.size.width, stored.size.height)
    return ImageHandle(stored.image_id, size, original)


def image_id_of(image: ImageHandle | str) -> str:
    """The id of a handle; an id is returned unchanged."""
    image_id = image.image_id if isinstance(image, ImageHandle) else image
    if not isinstance(image_id, str) or not image_id:
        raise InvalidImageError(f"{image!r} is not the id of an image")
    return image_id
