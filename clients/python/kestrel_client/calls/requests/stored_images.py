"""The calls that store and delete images, and put again those that a server has dropped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from ..._pb.kestrel.v1 import common_pb2
from ..._pb.kestrel.v1 import image_service_pb2 as pb
from ..._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from ...connection import Connection, Metadata
from ...errors import InvalidImageError
from ...geometry import read_size
from ...images.image_forms import NO_LIMIT, ImageHandle, ImageInput, loaded, to_image
from ...images.known import KnownImages
from ..prepared_call import Method, PreparedCall, prepare_call
from .building import build
from .options import checked_session

UPLOAD_THRESHOLD_BYTES = 4 * 1024 * 1024
"""Larger files are uploaded in pieces."""
CHUNK_BYTES = 1024 * 1024
_LARGEST_FETCHED_BYTES = 256 * 1024 * 1024
"""More than any server accepts."""


class ImageRequests:
    """Learns from the responses under which ids the server stores which images."""

    def __init__(self, connection: Connection, known: KnownImages) -> None:
        self._connection, self._known = connection, known

    def put(
        self,
        image: ImageInput,
        timeout: float | None,
        metadata: Metadata | None,
        session: str | None = None,
    ) -> PreparedCall[ImageHandle]:
        """Reads files and fetches addresses. Raises InvalidImageError and RequestTooLargeError."""
        image = loaded(image, _LARGEST_FETCHED_BYTES)
        # A file has no limit here, as it can be sent in pieces. Pixels that don't fit a message become a PNG first.
        is_file = isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview))
        message = to_image(image, NO_LIMIT if is_file else self._connection.max_message_bytes)
        # A handle stands for its own source.
        source = image.source if isinstance(image, ImageHandle) else image
        return self._put(message, source, timeout, metadata, checked_session(session))

    def put_again(
        self, image: common_pb2.Image, timeout: float | None, metadata: Metadata | None, about: str
    ) -> PreparedCall[ImageHandle]:
        """Stores an image on the server that ``about`` selects."""
        return self._put(image, None, timeout, metadata, about)

    def _put(
        self,
        image: common_pb2.Image,
        source: ImageInput | None,
        timeout: float | None,
        metadata: Metadata | None,
        about: str,
    ) -> PreparedCall[ImageHandle]:
        """``source``: of the handle. ``about``: selects the server; empty for the image itself."""
        digest = self._known.key(image)

        def read(response: Any) -> ImageHandle:
            stored = response.image
            self._known.learn(stored.image_id, image, digest)
            return ImageHandle(stored.image_id, read_size(stored.size), source)

        data = image.encoded
        in_pieces = len(data) > min(UPLOAD_THRESHOLD_BYTES, self._connection.max_message_bytes // 2)
        info = pb.UploadInfo(
            size_bytes=len(data), sha256=hashlib.sha256(data).digest() if in_pieces else b""
        )
        return prepare_call(
            self._connection,
            Method(ImageServiceStub, "UploadImage" if in_pieces else "PutImage", repeatable=True),
            (lambda: _pieces(info, data)) if in_pieces else build(pb.PutImageRequest, image=image),
            read,
            timeout=timeout,
            metadata=metadata,
            about=about or digest,
        )

    def delete(
        self,
        image: ImageHandle | str,
        timeout: float | None,
        metadata: Metadata | None,
        session: str | None = None,
    ) -> PreparedCall[bool]:
        """``image``: a handle, or an id."""
        image_id = image.image_id if isinstance(image, ImageHandle) else image
        if not isinstance(image_id, str) or not image_id:
            raise InvalidImageError(f"{image!r} is not the id of an image")
        current = self._known.current_id(image_id)
        about = checked_session(session) or self._known.key(common_pb2.Image(image_id=image_id))
        self._known.forget(image_id)
        return prepare_call(
            self._connection,
            Method(ImageServiceStub, "DeleteImage", repeatable=True),
            pb.DeleteImageRequest(image_id=current),
            lambda response: bool(response.existed),
            timeout=timeout,
            metadata=metadata,
            about=about,
        )


def _pieces(info: pb.UploadInfo, data: bytes) -> Iterator[pb.UploadImageRequest]:
    """Yields the messages of an upload."""
    yield pb.UploadImageRequest(info=info)
    for start in range(0, len(data), CHUNK_BYTES):
        yield pb.UploadImageRequest(chunk=data[start : start + CHUNK_BYTES])
