"""The calls that store and delete images, and put again those that a server has dropped."""

from __future__ import annotations

from typing import Any

from ..._pb.kestrel.v1 import common_pb2
from ..._pb.kestrel.v1 import image_service_pb2 as image_pb
from ..._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from ...connection import Connection, Metadata
from ...images.images import ImageHandle, ImageInput
from ...images.known import KnownImages
from ...images.stored import Put, image_id_of, prepare_put, prepare_stored, read_handle
from ..prepared import Method, Prepared, prepare
from .options import checked_session


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
    ) -> Prepared[ImageHandle]:
        put = prepare_put(image, self._connection.max_message_bytes)
        return self._prepared_put(put, timeout, metadata, checked_session(session))

    def delete(
        self,
        image: ImageHandle | str,
        timeout: float | None,
        metadata: Metadata | None,
        session: str | None = None,
    ) -> Prepared[bool]:
        given = image_id_of(image)
        current = self._known.current_id(given)
        about = checked_session(session) or self._known.key(common_pb2.Image(image_id=given))
        self._known.forget(given)
        return prepare(
            self._connection,
            Method(ImageServiceStub, "DeleteImage", repeatable=True),
            image_pb.DeleteImageRequest(image_id=current),
            lambda response: bool(response.existed),
            timeout=timeout,
            metadata=metadata,
            about=about,
        )

    def put_again(
        self,
        image: common_pb2.Image,
        timeout: float | None,
        metadata: Metadata | None,
        about: str,
    ) -> Prepared[ImageHandle]:
        """Stores an image on the server that ``about`` selects."""
        put = prepare_stored(image, self._connection.max_message_bytes)
        return self._prepared_put(put, timeout, metadata, about)

    def _prepared_put(
        self, put: Put, timeout: float | None, metadata: Metadata | None, about: str
    ) -> Prepared[ImageHandle]:
        """``about``: selects the server; empty for the image itself."""
        image = common_pb2.Image(encoded=put.data) if put.data else put.request.image
        digest = self._known.key(image)

        def read(response: Any) -> ImageHandle:
            self._known.learn(response.image.image_id, image, digest)
            return read_handle(response.image, put.source)

        return prepare(
            self._connection,
            Method(ImageServiceStub, "UploadImage" if put.data else "PutImage", repeatable=True),
            put.pieces if put.data else put.request,
            read,
            timeout=timeout,
            metadata=metadata,
            about=about or digest,
        )
