"""RequestImages: finds the image of a request, which the request holds or names by id, and stores it.

An image is stored after the engine has decoded it, so every image in the store is valid. With shared images, the images
that clients put are written to the shared store too, and an id that is unknown here is looked up there.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from kestrel_engine import ImageTooLargeError, InRegion, OnBackground

from ..edge.calls.current_call import current_call, find_call
from ..edge.failures.errors import ImageNotFound, ImagesFull, ImagesNotKept
from .shared.shared_images import SharedImages
from .store import ImageId, ImageStore, StoredImage, shown, size_of


@dataclass(frozen=True, slots=True, eq=False)
class RequestImage:
    """The image of a request. ``kept``: the store's entry, if the request named an id."""

    source: bytes | np.ndarray
    kept: StoredImage | None = None
    background: tuple[int, int, int] | None = None
    """The background colour of this request. The store holds the image without it."""
    region: tuple[float, float, float, float] | None = None
    """The part of the image that this request sees. The store holds the whole image."""

    @property
    def given(self) -> bytes | np.ndarray | OnBackground | InRegion:
        """The image in the form that the engine takes."""
        image = (
            self.source if self.background is None else OnBackground(self.source, self.background)
        )
        return image if self.region is None else InRegion(image, self.region)


class RequestImages:
    """Finds and stores images by owner. An owner is a principal's name, or "" if callers need no credentials."""

    def __init__(self, store: ImageStore, shared: SharedImages | None = None) -> None:
        self.store, self._shared = store, shared

    async def find(
        self, owner: str, source: bytes | np.ndarray | ImageId | OnBackground | InRegion
    ) -> RequestImage:
        """The image that a request holds or names. Raises ImageNotFound."""
        if isinstance(source, InRegion):
            return replace(await self.find(owner, source.source), region=source.box)
        if isinstance(source, OnBackground):
            found = await self.find(owner, source.source)  # type: ignore[arg-type]
            return replace(found, background=source.colour)
        if isinstance(source, ImageId):
            kept = await self._stored(owner, source.value)
            call = find_call()
            if call is not None:
                call.stored[source.value] = kept.source
            return RequestImage(kept.source, kept)
        return RequestImage(source)

    def keep(
        self,
        owner: str,
        image: RequestImage,
        size: tuple[int, int],
        digest: bytes,
        *,
        weight: float = 1.0,
    ) -> str:
        """Stores an image that the engine has decoded. Returns its id, or "" if the store has no room for it.

        ``size`` is (width, height) in pixels; ``digest`` is the engine's; ``weight`` is the owner's.
        """
        if image.kept is not None:
            # The image may have been deleted since. It must not return to the store.
            return image.kept.image_id
        if size_of(image.source) > self.store.max_bytes:
            return ""
        try:
            kept = self.store.put(owner, digest, image.source, size, weight=weight)
        except ImagesFull:
            return ""
        return "" if kept is None else kept.image_id

    async def put(
        self,
        owner: str,
        source: bytes | np.ndarray,
        size: tuple[int, int],
        digest: bytes,
        *,
        weight: float = 1.0,
    ) -> StoredImage:
        """Like ``keep``, but raises ImagesNotKept, ImageTooLargeError or ImagesFull if the image cannot be stored."""
        self.check_size(size_of(source))
        kept = self.store.put(owner, digest, source, size, weight=weight)
        assert kept is not None, "check_size would have raised"
        if self._shared is not None:
            await self._shared.put(owner, kept, current_call().timeout_s)
        return kept

    async def delete(self, owner: str, image_id: str) -> bool:
        """Deletes an image, in the shared store too. Returns whether the owner had an image with this id."""
        existed = self.store.delete(owner, image_id)
        if self._shared is None:
            return existed
        return await self._shared.delete(owner, image_id, current_call().timeout_s) or existed

    async def _stored(self, owner: str, image_id: str) -> StoredImage:
        """Raises ImageNotFound."""
        if self._shared is None:
            return self.store.get(owner, image_id)
        if self.store.has(owner, image_id):
            self._shared.check(owner, image_id, lambda: self.store.delete(owner, image_id))
            return self.store.get(owner, image_id)
        found = await self._shared.fetch(owner, image_id)
        if found.image is None:
            if found.answered:
                raise ImageNotFound(("image", "image_id"), self.store.absent(image_id))
            raise ImageNotFound(
                ("image", "image_id"),
                f"image {shown(image_id)!r} is not stored on this server, and the shared image store does not answer; "
                "send the image again",
            )
        call = find_call()
        weight = 1.0 if call is None else call.principal.weight
        with suppress(ImagesFull):  # This call has the image all the same.
            self.store.adopt(owner, found.image, weight=weight)
        return found.image

    def check_size(self, num_bytes: int) -> None:
        """Raises ImagesNotKept or ImageTooLargeError if the store can never hold an image of ``num_bytes`` bytes."""
        limit = self.store.max_bytes
        if limit == 0:
            raise ImagesNotKept("the server stores no images; send the image with each request")
        if num_bytes > limit:
            raise ImageTooLargeError(
                "image",
                f"has {num_bytes} bytes; the image store holds {limit} in all",
                value=num_bytes,
                limit=limit,
            )
