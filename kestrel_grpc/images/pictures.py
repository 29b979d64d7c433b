"""Pictures: the picture of a request, whether it came with it or is named by id. Owns when one enters the store.

A picture enters once the engine has decoded it, so that everything in the store is valid.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from kestrel_engine import ImageTooLargeError, OnBackground

from ..edge.current_call import find_call
from ..edge.errors import ImagesFull, ImagesNotKept
from .store import ImageId, ImageStore, KeptImage, digest_of, size_of

_INLINE_BYTES = 1024 * 1024
"""Up to this size a picture is hashed on the event loop: it takes half a millisecond."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """``kept``: the store's entry, if the picture came from there. ``digest``: its hash, if that is known."""

    source: bytes | np.ndarray
    kept: KeptImage | None = None
    digest: bytes | None = None
    background: tuple[int, int, int] | None = None
    """What this request lays it on; the store keeps it as it came."""

    @property
    def given(self) -> bytes | np.ndarray | OnBackground:
        """What the engine gets."""
        return (
            self.source if self.background is None else OnBackground(self.source, self.background)
        )


class Pictures:
    """Uses the store for one owner after another; ``owner`` is "" as long as callers aren't known."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store

    def find(self, owner: str, source: bytes | np.ndarray | ImageId | OnBackground) -> Picture:
        """The picture to give to the engine. Raises ImageNotFound."""
        if isinstance(source, OnBackground):
            return replace(self.find(owner, source.source), background=source.colour)  # type: ignore[arg-type]
        if isinstance(source, ImageId):
            kept = self.store.get(owner, source.value)
            call = find_call()
            if call is not None:
                call.stored = kept.source
            return Picture(kept.source, kept)
        return Picture(source)

    def hashed(self, picture: Picture) -> Picture:
        """With its hash, if that takes no time worth a thread and will be needed: at best while the device computes."""
        num_bytes = size_of(picture.source)
        if picture.kept is not None or num_bytes > min(_INLINE_BYTES, self.store.max_bytes):
            return picture
        return replace(picture, digest=digest_of(picture.source))

    async def keep(
        self, owner: str, picture: Picture, size: tuple[int, int], *, weight: float = 1.0
    ) -> str:
        """Keeps an image that the engine has decoded, of (width, height) ``size``; its id, or "" if it doesn't fit.
        ``weight``: the owner's."""
        if picture.kept is not None:
            # Whether or not it was deleted meanwhile: what its owner deleted must not come back.
            return picture.kept.image_id
        if size_of(picture.source) > self.store.max_bytes:
            return ""
        digest = picture.digest or await self._digest(picture.source)
        try:
            kept = self.store.put(owner, digest, picture.source, size, weight=weight)
        except ImagesFull:
            return ""
        return "" if kept is None else kept.image_id

    async def put(
        self,
        owner: str,
        source: bytes | np.ndarray,
        size: tuple[int, int],
        *,
        weight: float = 1.0,
    ) -> KeptImage:
        """As ``keep``, where keeping is what was asked for. Raises ImagesNotKept, ImageTooLargeError, ImagesFull."""
        self.check_size(size_of(source))
        digest = await self._digest(source)
        kept = self.store.put(owner, digest, source, size, weight=weight)
        assert kept is not None, "its size was checked"
        return kept

    def check_size(self, num_bytes: int) -> None:
        """Raises ImagesNotKept or ImageTooLargeError if a picture of ``num_bytes`` bytes can't be kept."""
        limit = self.store.max_bytes
        if limit == 0:
            raise ImagesNotKept("the server keeps no pictures: send them with the requests")
        if num_bytes > limit:
            raise ImageTooLargeError(
                "image", f"has {num_bytes} bytes, all pictures kept may have {limit}"
            )

    @staticmethod
    async def _digest(source: bytes | np.ndarray) -> bytes:
        if size_of(source) <= _INLINE_BYTES:
            return digest_of(source)
        return await asyncio.to_thread(digest_of, source)
