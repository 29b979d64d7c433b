"""ImageService: pictures put, uploaded and deleted. What is kept has been decoded before, as a request's picture is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import image_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceServicer
from kestrel_engine import InvalidRequest

from ..edge.call import Context
from ..edge.current_call import current_call
from ..images.pictures import Pictures
from ..images.store import KeptImage
from ..images.upload import Upload, UploadRoom
from ..served_model import ServedModel
from . import convert

_A_MOMENT_S = 0.05


class ImageService(ImageServiceServicer):
    """Puts and uploads images into the store of ``pictures``."""

    def __init__(
        self, served: ServedModel, pictures: Pictures, uploads: UploadRoom, upload_idle_s: float
    ) -> None:
        """``upload_idle_s``: an upload that receives no data for this many seconds is cancelled."""
        self._served, self._pictures, self._room = served, pictures, uploads
        self._upload_idle_s = upload_idle_s
        self._max_image_bytes = served.config.image_limits.max_bytes

    async def PutImage(self, request: pb.PutImageRequest, context: Context) -> pb.PutImageResponse:
        picture = self._pictures.find(current_call().owner, convert.required_image(request))
        kept = picture.kept or await self._put(picture.source)
        return pb.PutImageResponse(image=_stored(kept))

    async def UploadImage(  # type: ignore[override]
        self, requests: AsyncIterator[pb.UploadImageRequest], context: Context
    ) -> pb.UploadImageResponse:
        self._pictures.check_size(1)
        caller = current_call().principal
        upload = Upload(
            self._max_image_bytes, self._room, principal=caller.name, weight=caller.weight
        )
        try:
            async for request in upload.messages(requests, self._upload_idle_s):
                upload.take(request)
            kept = await self._put(await _finished(upload))
        except BaseException:  # Passed on; what came may be worth a capture.
            current_call().message = upload.taken()
            raise
        finally:
            upload.close()
        return pb.UploadImageResponse(image=_stored(kept))

    async def DeleteImage(
        self, request: pb.DeleteImageRequest, context: Context
    ) -> pb.DeleteImageResponse:
        if not request.image_id:
            raise InvalidRequest("image_id", "is required")
        existed = self._pictures.store.delete(current_call().owner, request.image_id)
        return pb.DeleteImageResponse(existed=existed)

    async def _put(self, source: bytes | np.ndarray) -> KeptImage:
        call = current_call()
        self._pictures.check_size(len(source) if isinstance(source, bytes) else source.nbytes)
        image = await self._served.engine().prepare_image(
            source,
            timeout_s=call.timeout_s,
            cache_salt=call.principal.namespace(""),
            request_id=call.request_id,
            principal=call.principal.name,
            weight=call.principal.weight,
        )
        return await self._pictures.put(
            call.owner, source, (image.width, image.height), weight=call.principal.weight
        )


async def _finished(upload: Upload) -> bytes:
    """Raises InvalidRequest."""
    try:
        return upload.finish()
    except InvalidRequest:
        # The end of a call that was given up comes a moment before its cancellation.
        await asyncio.sleep(_A_MOMENT_S)
        raise


def _stored(kept: KeptImage) -> pb.StoredImage:
    return pb.StoredImage(
        image_id=kept.image_id,
        size=common_pb2.ImageSize(width=kept.width, height=kept.height),
        size_bytes=kept.num_bytes,
    )
