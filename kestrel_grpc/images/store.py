"""ImageStore: the images that requests can name by id. Decides which image is dropped when the store is full.

The store does no I/O and belongs to one event loop. An image belongs to the owner that put it; no other owner can use
it. An id holds 128 random bits, so it cannot be guessed. An owner's image is stored once, however often it is put.

The store limits the bytes of all images together, with their records. Each owner has a share of the limit according to
its weight. If the store is full and an owner above its share puts an image, the store drops that owner's least recently
used images. If the owner is within its share, the store drops images of the owner that exceeds its share most.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kestrel_engine import FairShares, Member

from ..edge.failures.errors import ImageNotFound, ImagesFull

_PREFIX = "img_"
_ID_BYTES = 16
_MAX_SHOWN = 64
"""Number of characters of an unknown id that an error shows."""
RECORD_BYTES = 1024
"""What the store takes for an image beside its bytes: some 520 measured, with id and digest. Without it, a caller could
store millions of images of a few bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredImage:
    """A stored image. ``source``: encoded bytes, or pixels as [height, width, channels] uint8; treat as read-only.
    ``width``, ``height``: the size of the upright image in pixels."""

    image_id: str
    source: bytes | np.ndarray
    width: int
    height: int

    @property
    def num_bytes(self) -> int:
        return size_of(self.source)

    @property
    def held_bytes(self) -> int:
        """What counts for the store's limit."""
        return self.num_bytes + RECORD_BYTES


class _Owner(Member):
    """The images of one owner, which holds their bytes. ``images``: by id, least recently used first. ``ids``: by
    digest, of those that were put here."""

    def __init__(self, name: str, weight: float) -> None:
        super().__init__(name, weight)
        self.images: OrderedDict[str, StoredImage] = OrderedDict()
        self.ids: dict[bytes, str] = {}
        self.digests: dict[str, bytes] = {}

    def add(self, image: StoredImage, digest: bytes | None) -> None:
        self.images[image.image_id] = image
        if digest is not None:
            self.ids[digest], self.digests[image.image_id] = image.image_id, digest

    def drop(self, image_id: str) -> StoredImage:
        digest = self.digests.pop(image_id, None)
        if digest is not None:
            del self.ids[digest]
        return self.images.pop(image_id)


class ImageStore:
    """Images by owner and id. With ``max_bytes`` 0 the store holds no image."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._shares: FairShares[_Owner] = FairShares(max_bytes)
        self._owners = self._shares.members
        """The owners that have images, by name."""

    @property
    def size_bytes(self) -> int:
        return self._shares.held

    def __len__(self) -> int:
        return sum(len(owner.images) for owner in self._owners.values())

    def put(
        self,
        owner: str,
        digest: bytes,
        source: bytes | np.ndarray,
        size: tuple[int, int],
        *,
        weight: float = 1.0,
    ) -> StoredImage | None:
        """Stores a valid image. Returns None if the image alone exceeds the limit. Raises ImagesFull.

        ``digest``: the SHA-256 of the source, which the engine computes before it decodes the image. ``source``:
        encoded bytes or pixels. ``size``: (width, height) in pixels. ``weight``: the owner's.
        """
        present = self.find(owner, digest)
        if present is not None:
            return present
        image = StoredImage(_PREFIX + secrets.token_hex(_ID_BYTES), source, *size)
        if image.held_bytes > self.max_bytes or self.max_bytes == 0:
            return None
        self._add(owner, image, digest, weight)
        return image

    def adopt(self, owner: str, image: StoredImage, *, weight: float = 1.0) -> None:
        """Stores an image that another server stored under its id. Raises ImagesFull.

        Only its id finds it, because this server has not compared it with a digest.
        """
        if image.held_bytes > self.max_bytes or self.has(owner, image.image_id):
            return
        self._add(owner, image, None, weight)

    def has(self, owner: str, image_id: str) -> bool:
        """Does not count as a use of the image."""
        own = self._owners.get(owner)
        return own is not None and image_id in own.images

    def _add(self, owner: str, image: StoredImage, digest: bytes | None, weight: float) -> None:
        own = self._owners.get(owner) or _Owner(owner, weight)
        self._shares.weigh(own, weight)
        self._make_room(own, image.held_bytes)
        self._shares.enter(own)
        self._shares.hold(own, image.held_bytes)
        own.add(image, digest)

    def find(self, owner: str, digest: bytes) -> StoredImage | None:
        """The owner's image with this digest, or None. Counts as a use of the image."""
        own = self._owners.get(owner)
        if own is None or digest not in own.ids:
            return None
        image_id = own.ids[digest]
        own.images.move_to_end(image_id)
        return own.images[image_id]

    def get(self, owner: str, image_id: str) -> StoredImage:
        """The owner's image with this id. Counts as a use of the image. Raises ImageNotFound."""
        own = self._owners.get(owner)
        if own is None or image_id not in own.images:
            raise ImageNotFound(("image", "image_id"), self.absent(image_id))
        own.images.move_to_end(image_id)
        return own.images[image_id]

    def delete(self, owner: str, image_id: str) -> bool:
        """Deletes an image. Returns whether the owner had an image with this id."""
        own = self._owners.get(owner)
        if own is None or image_id not in own.images:
            return False
        self._drop(own, image_id)
        return True

    def clear(self) -> int:
        """Deletes all images of all owners. Returns their number."""
        count = len(self)
        for own in list(self._owners.values()):
            for image_id in list(own.images):
                self._drop(own, image_id)
        return count

    def check(self) -> None:
        """Asserts that all records are consistent. For tests."""
        self._shares.check()
        assert self.size_bytes <= self.max_bytes
        for own in self._owners.values():
            assert len(own.images) == own.uses
            assert own.held == sum(image.held_bytes for image in own.images.values())
            assert own.images.keys() >= own.digests.keys()
            assert {digest: image_id for image_id, digest in own.digests.items()} == own.ids

    def _make_room(self, own: _Owner, num_bytes: int) -> None:
        """Drops images until ``num_bytes`` more of ``own`` fit. If that is impossible, drops none and raises
        ImagesFull."""
        if self.size_bytes + num_bytes <= self.max_bytes:
            return
        share = self._shares.share(own)
        others = (each for each in self._owners.values() if each is not own)
        protected = sum(min(each.held, self._shares.share(each, own)) for each in others)
        if num_bytes > share and num_bytes + protected > self.max_bytes:
            quota = self._shares.quota(own, "bytes of stored images")
            raise ImagesFull(
                f"the image takes {num_bytes} bytes; the share of {quota.holder} is {share} bytes while other callers "
                "use their shares",
                quota=quota,
            )
        losers: list[_Owner] = []
        while self.size_bytes + num_bytes > self.max_bytes:
            above = self._shares.above(own)
            drops_own = own.images and (not above or self._shares.exceeds(own, num_bytes))
            losers.append(own if drops_own else above[0])
            self._free(losers[-1], next(iter(losers[-1].images)))
        for loser in losers:  # Until then, the shares stay as they are.
            self._shares.leave(loser)

    def _drop(self, own: _Owner, image_id: str) -> None:
        self._free(own, image_id)
        self._shares.leave(own)

    def _free(self, own: _Owner, image_id: str) -> None:
        self._shares.hold(own, -own.drop(image_id).held_bytes)

    def absent(self, image_id: str) -> str:
        """Why there is no image with this id, and what to do."""
        if self.max_bytes == 0:
            return "the server stores no images; send the image itself"
        return (
            f"image {shown(image_id)!r} is not stored; send the image again. The server stores up to {self.max_bytes} "
            "bytes of images, drops a caller's least recently used first, and drops all when it stops"
        )


def shown(image_id: str) -> str:
    """An id as errors show it."""
    return image_id if len(image_id) <= _MAX_SHOWN else f"{image_id[:_MAX_SHOWN]}…"


def size_of(source: bytes | np.ndarray) -> int:
    """Bytes of the encoded file, or of the pixels."""
    return len(source) if isinstance(source, bytes) else source.nbytes
