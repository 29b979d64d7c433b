"""ImageService: puts, uploads and deletes images. It decodes every image, as a request does, before it stores it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import image_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceServicer
from kestrel_engine import ImageFeatures, InvalidRequest

from ..edge.calls.call import Context
from ..edge.calls.current import current
from ..images.request_images import RequestImages, checked_image_id, required_image
from ..images.store import StoredImage
from ..images.upload import Upload, UploadRoom
from ..served_model import ServedModels
from .answers.call_images import caller_options

_A_MOMENT_S = 0.05


class ImageService(ImageServiceServicer):
    """Adds images to the store of ``images``, and deletes them."""

    def __init__(
        self, served: ServedModels, images: RequestImages, uploads: UploadRoom, upload_idle_s: float
    ) -> None:
        """``upload_idle_s``: an upload that receives no data for this many seconds is cancelled."""
        self._served, self._images, self._room = served, images, uploads
        self._upload_idle_s = upload_idle_s
        self._max_image_bytes = served.default.config.image_limits.max_bytes

    async def PutImage(self, request: pb.PutImageRequest, context: Context) -> pb.PutImageResponse:
        image = await self._images.find(required_image(request))
        if isinstance(image.source, ImageFeatures):
            raise InvalidRequest(
                ("image", "features"), "cannot be stored; send them with each request"
            )
        kept = image.kept or await self._put(image.source)
        return pb.PutImageResponse(image=_stored(kept))

    async def UploadImage(  # type: ignore[override]
        self, requests: AsyncIterator[pb.UploadImageRequest], context: Context
    ) -> pb.UploadImageResponse:
        self._images.check_size(1)
        caller = current.get().principal
        upload = Upload(
            self._max_image_bytes, self._room, principal=caller.name, weight=caller.weight
        )
        try:
            async for request in upload.messages(requests, self._upload_idle_s):
                upload.add(request)
            kept = await self._put(await _finished(upload))
        except BaseException:  # Raised again. A capture may need the data that arrived.
            current.get().message = upload.received()
            raise
        finally:
            upload.close()
        return pb.UploadImageResponse(image=_stored(kept))

    async def DeleteImage(
        self, request: pb.DeleteImageRequest, context: Context
    ) -> pb.DeleteImageResponse:
        image_id = checked_image_id("image_id", request.image_id)
        existed = await self._images.delete(image_id)
        return pb.DeleteImageResponse(existed=existed)

    async def _put(self, source: bytes | np.ndarray) -> StoredImage:
        call = current.get()
        self._images.check_size(len(source) if isinstance(source, bytes) else source.nbytes)
        image = await self._served.engine().prepare_image(source, **caller_options(call))
        assert image.source_digest is not None, "bytes and pixels have a digest"
        size = (image.width, image.height)
        return await self._images.put(source, size, image.source_digest)


async def _finished(upload: Upload) -> bytes:
    """Raises InvalidRequest."""
    try:
        return upload.finish()
    except InvalidRequest:
        # If the client cancelled, the stream ends a moment before the cancellation arrives.
        await asyncio.sleep(_A_MOMENT_S)
        raise


def _stored(kept: StoredImage) -> pb.StoredImage:
    return pb.StoredImage(
        image_id=kept.image_id,
        size=common_pb2.ImageSize(width=kept.width, height=kept.height),
        size_bytes=kept.num_bytes,
    )
