"""What the client does about a failed call: it repeats one whose connection was lost, and sends images again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from .._pb.kestrel.v1 import common_pb2
from ..errors import STATUS_DROPPED, ConnectionLostError, InvalidImageError, NotFoundError, RpcError
from ..images.image_forms import ImageHandle, ImageInput
from ..images.known import KnownImages
from ..images.request_images import request_images
from .prepared_call import PreparedCall

IMAGE_NOT_FOUND = "IMAGE_NOT_FOUND"
_MOST_ATTEMPTS = 3
"""How often the images of one call are sent again. Calls may move once more in the meantime."""
_OTHER_BYTES = 1024
"""Of a message: tags and lengths around images."""

_MOST_REPEATS = 3
_FIRST_PAUSE_S = 0.05


class Repeats:
    """Counts the repeats of one call whose connection was lost while its server answered, or whose status was dropped.

    gRPC itself repeats a call only until its server begins to answer, and the server answers with metadata at once.
    """

    def __init__(self) -> None:
        self._count = 0

    def pause_s(self, prepared: PreparedCall[Any], error: RpcError) -> float | None:
        """Seconds until the call is sent again; None if it is not to be repeated."""
        # Without the end of a stream, nothing comes of it, and so a call whose status was dropped may be sent again.
        if error.message != STATUS_DROPPED:
            if not isinstance(error, ConnectionLostError) or not prepared.method.repeatable:
                return None
        self._count += 1
        if self._count > _MOST_REPEATS:
            return None
        return float(_FIRST_PAUSE_S * 2 ** (self._count - 1))


class Restoring:
    """The images of one call that the server stores, and how they are sent again.

    The call itself takes an image in place of its id. Then it does not matter which of several servers gets the call: a
    front may give the next one to another. An image that is too large for that is put first.

    ``sources``: the images themselves by id, if the caller's handles hold them. ``put``: prepares the call that stores
    an image on the server of this call. ``most_bytes``: limit of a message.
    """

    def __init__(
        self,
        known: KnownImages,
        request: Message,
        sources: Mapping[str, ImageInput],
        put: Callable[[common_pb2.Image, float | None], PreparedCall[ImageHandle]],
        most_bytes: int,
    ) -> None:
        self._known, self._request, self._sources, self._put = known, request, sources, put
        self._most_bytes = most_bytes - _OTHER_BYTES
        self._ids = [(image, image.image_id) for image in request_images(request) if image.image_id]
        """The images of the request that it names by id, with the ids that the caller gave."""
        self._sent: list[tuple[common_pb2.Image, str]] = []
        """Those that it holds in place of their ids."""
        self._attempts = 0
        self.use_current_ids()

    def use_current_ids(self) -> None:
        """Replaces the ids of images that were sent again before."""
        for image, image_id in self._ids:
            image.image_id = self._known.current_id(image_id)

    def puts(
        self, error: Exception, timeout: float | None
    ) -> list[tuple[str, PreparedCall[ImageHandle]]]:
        """The calls that put images again within ``timeout``, with the ids that the caller gave. Reads files.

        Raises ``error`` if it does not say that an image is missing, or if the client has none of the images.
        """
        self._attempts += 1
        is_missing = isinstance(error, NotFoundError) and error.reason == IMAGE_NOT_FOUND
        if not is_missing or not self._ids or self._attempts > _MOST_ATTEMPTS:
            raise error
        found, puts = False, []
        for image_id in dict.fromkeys(image_id for _, image_id in self._ids):
            try:
                image = self._known.contents(image_id, self._sources.get(image_id))
            except InvalidImageError as unreadable:
                raise error from unreadable
            if image is not None:
                found = True
                if not self._hold(image_id, image):
                    puts.append((image_id, self._put(image, timeout)))
        if not found:
            raise error
        return puts

    def _hold(self, image_id: str, contents: common_pb2.Image) -> bool:
        """Puts the image into the request. Returns whether there is room."""
        places = [image for image, its_id in self._ids if its_id == image_id]
        added = len(places) * contents.ByteSize()
        if self._request.ByteSize() + added > self._most_bytes:
            return False
        for image in places:
            image.MergeFrom(contents)
            self._sent.append((image, image_id))
        self._ids = [(image, its_id) for image, its_id in self._ids if its_id != image_id]
        return True

    def stored(self, image_id: str, handle: ImageHandle) -> None:
        """An image was put again."""
        self._known.replace(image_id, handle.image_id)
        self.use_current_ids()

    def answered(self, image: common_pb2.Image, image_id: str) -> None:
        """The server that answered the call stores ``image``, one of the request, under ``image_id``."""
        for sent, old_id in self._sent:
            if sent is image:
                self._known.replace(old_id, image_id)
