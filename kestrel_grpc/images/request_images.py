"""RequestImages: finds the image of a request, which the request holds or names by id, and stores it.

An image is stored after the engine has decoded it, so every image in the store is valid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kestrel_engine import ImageTooLargeError, InRegion, OnBackground

from ..edge.calls.current_call import find_call
from ..edge.failures.errors import ImagesFull, ImagesNotKept
from .store import ImageId, ImageStore, StoredImage, size_of


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

    def __init__(self, store: ImageStore) -> None:
        self.store = store

    def find(
        self, owner: str, source: bytes | np.ndarray | ImageId | OnBackground | InRegion
    ) -> RequestImage:
        """The image that a request holds or names. Raises ImageNotFound."""
        if isinstance(source, InRegion):
            return replace(self.find(owner, source.source), region=source.box)
        if isinstance(source, OnBackground):
            return replace(self.find(owner, source.source), background=source.colour)  # type: ignore[arg-type]
        if isinstance(source, ImageId):
            kept = self.store.get(owner, source.value)
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

    def put(
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
        return kept

    def check_size(self, num_bytes: int) -> None:
        """Raises ImagesNotKept or ImageTooLargeError if the store can never hold an image of ``num_bytes`` bytes."""
        limit = self.store.max_bytes
        if limit == 0:
            raise ImagesNotKept("the server stores no images; send the image with each request")
        if num_bytes > limit:
            raise ImageTooLargeError(
                "image", f"has {num_bytes} bytes; the image store holds {limit} in all"
            )
