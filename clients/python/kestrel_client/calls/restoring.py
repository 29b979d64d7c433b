"""Restoring: puts the images of a call again if the call's server does not know them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from .._pb.kestrel.v1 import common_pb2
from ..errors import InvalidImageError, NotFoundError
from ..images.images import ImageHandle, ImageInput
from ..images.known import KnownImages, images_of
from .prepared import Prepared

IMAGE_NOT_FOUND = "IMAGE_NOT_FOUND"
_MOST_ATTEMPTS = 3
"""How often the images of one call are put again. Calls may move once more in the meantime."""


class Restoring:
    """The images of one call that the server stores, and how they are put again.

    ``sources``: the images themselves by id, if the caller's handles hold them. ``put``: prepares the call that stores
    an image on the server of this call.
    """

    def __init__(
        self,
        known: KnownImages,
        request: Message,
        sources: Mapping[str, ImageInput],
        put: Callable[[common_pb2.Image, float | None], Prepared[ImageHandle]],
    ) -> None:
        self._known, self._request, self._sources, self._put = known, request, sources, put
        self._given = [(image, image.image_id) for image in images_of(request) if image.image_id]
        """The images of the request with the ids that the caller gave."""
        self._attempts = 0
        self._started_at = time.monotonic()
        self.use_current_ids()

    def use_current_ids(self) -> None:
        """Replaces the ids of images that were put again before."""
        for image, given in self._given:
            image.image_id = self._known.current_id(given)

    def puts(
        self, error: Exception, timeout: float | None
    ) -> Iterator[tuple[str, Prepared[ImageHandle]]]:
        """The calls that put the images again, with the ids that the caller gave. Reads files.

        Raises ``error`` if it does not say that an image is missing, or if the client has none of the images.
        """
        self._attempts += 1
        is_missing = isinstance(error, NotFoundError) and error.reason == IMAGE_NOT_FOUND
        if not is_missing or not self._given or self._attempts > _MOST_ATTEMPTS:
            raise error
        found = False
        for given in dict.fromkeys(given for _, given in self._given):
            try:
                image = self._known.contents(given, self._sources.get(given))
            except InvalidImageError as unreadable:
                raise error from unreadable
            if image is not None:
                found = True
                yield given, self._put(image, self.left(timeout))
        if not found:
            raise error

    def stored(self, given: str, handle: ImageHandle) -> None:
        """An image was put again."""
        self._known.replace(given, handle.image_id)
        self.use_current_ids()

    def again(self, prepared: Prepared[Any]) -> Prepared[Any]:
        """The call with the new ids, and with the time that is left."""
        timeout = self.left(prepared.handling.get("timeout"))
        return replace(prepared, handling={**prepared.handling, "timeout": timeout})

    def left(self, timeout: float | None) -> float | None:
        """The rest of ``timeout``, which began with the first attempt; in seconds."""
        if timeout is None:
            return None
        return max(timeout - (time.monotonic() - self._started_at), 0.001)
