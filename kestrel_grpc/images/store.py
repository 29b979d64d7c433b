"""ImageStore: images kept for requests that name them by id. Owns ids, owners, the bound and which image goes first.

A data structure without I/O, for one event loop. An image belongs to the owner who put it and is there for no other;
ids hold 128 random bits, so that one can't be guessed either. The same image of one owner is kept once. Bounded in
bytes over all owners. Each owner that keeps images has a share of the bound by its weight. An owner above its share
drops its own images, least recently used first; one within it makes the owner furthest above its share drop some.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kestrel_engine import Quota

from ..edge.errors import ImageNotFound, ImagesFull

_PREFIX = "img_"
_ID_BYTES = 16
_MAX_SHOWN = 64
"""Characters of an unknown id that an error repeats."""


@dataclass(frozen=True, slots=True)
class ImageId:
    """Names an image that was sent before."""

    value: str


@dataclass(frozen=True, slots=True, eq=False)
class KeptImage:
    """``source``: encoded bytes, or uint8 pixels [height, width, channels]; not to be changed. ``width``, ``height``:
    the upright picture's, in pixels."""

    image_id: str
    source: bytes | np.ndarray
    width: int
    height: int

    @property
    def num_bytes(self) -> int:
        return size_of(self.source)


class _Owner:
    """``images`` by id, least recently used first; ``ids`` by digest."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_bytes = 0
        self.images: OrderedDict[str, KeptImage] = OrderedDict()
        self.ids: dict[bytes, str] = {}
        self.digests: dict[str, bytes] = {}

    def add(self, image: KeptImage, digest: bytes) -> None:
        self.images[image.image_id] = image
        self.ids[digest], self.digests[image.image_id] = image.image_id, digest
        self.num_bytes += image.num_bytes

    def drop(self, image_id: str) -> int:
        """The bytes that become free."""
        num_bytes = self.images.pop(image_id).num_bytes
        del self.ids[self.digests.pop(image_id)]
        self.num_bytes -= num_bytes
        return num_bytes


class ImageStore:
    """``max_bytes`` 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._size = 0
        self._owners: dict[str, _Owner] = {}
        """Those that keep images."""

    @property
    def size_bytes(self) -> int:
        return self._size

    @property
    def num_owners(self) -> int:
        """Owners that keep images."""
        return len(self._owners)

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
    ) -> KeptImage | None:
        """Keeps a checked image of (width, height) ``size``; None if it alone exceeds the bound. Raises ImagesFull.

        ``digest`` is ``digest_of(source)``, which takes time and so is the caller's to do where that does no harm.
        ``weight``: the owner's.
        """
        present = self.find(owner, digest)
        if present is not None:
            return present
        num_bytes = size_of(source)
        if num_bytes > self.max_bytes or self.max_bytes == 0:
            return None
        own = self._owners.get(owner) or _Owner()
        own.weight = weight
        self._make_room(owner, own, num_bytes)
        image = KeptImage(_PREFIX + secrets.token_hex(_ID_BYTES), source, *size)
        self._owners[owner] = own
        own.add(image, digest)
        self._size += num_bytes
        return image

    def find(self, owner: str, digest: bytes) -> KeptImage | None:
        """The owner's image of this content, if it is there; counts as a use."""
        own = self._owners.get(owner)
        image_id = None if own is None else own.ids.get(digest)
        return None if image_id is None else self.get(owner, image_id)

    def get(self, owner: str, image_id: str) -> KeptImage:
        """Raises ImageNotFound, with the remedy in its text; counts as a use."""
        own = self._owners.get(owner)
        if own is None or image_id not in own.images:
            raise ImageNotFound("image.image_id", self._absent(image_id))
        own.images.move_to_end(image_id)
        return own.images[image_id]

    def delete(self, owner: str, image_id: str) -> bool:
        """Whether there was such an image."""
        own = self._owners.get(owner)
        if own is None or image_id not in own.images:
            return False
        self._drop(owner, image_id)
        return True

    def clear(self) -> int:
        """Forgets all images of all owners; returns how many."""
        count = len(self)
        self._owners.clear()
        self._size = 0
        return count

    def check(self) -> None:
        """Asserts that all records agree; for tests."""
        assert self._size == sum(own.num_bytes for own in self._owners.values())
        assert self._size <= self.max_bytes
        for own in self._owners.values():
            assert own.images
            assert own.num_bytes == sum(image.num_bytes for image in own.images.values())
            assert own.images.keys() == own.digests.keys()
            assert {digest: image_id for image_id, digest in own.digests.items()} == own.ids

    def _make_room(self, owner: str, own: _Owner, num_bytes: int) -> None:
        """Drops images until ``num_bytes`` more of ``owner`` fit. Raises ImagesFull, and drops nothing then."""
        if self._size + num_bytes <= self.max_bytes:
            return
        weights = sum(o.weight for name, o in self._owners.items() if name != owner) + own.weight
        unit = self.max_bytes / weights
        others = {name: o for name, o in self._owners.items() if o is not own}
        protected = sum(min(float(o.num_bytes), unit * o.weight) for o in others.values())
        if num_bytes > unit * own.weight and num_bytes + protected > self.max_bytes:
            share = int(unit * own.weight)
            raise ImagesFull(
                f"the image has {num_bytes} bytes; the share of {owner or 'callers without credentials'} is {share} "
                f"bytes while others keep theirs",
                quota=Quota(owner, "bytes of stored images", own.num_bytes, share),
            )
        while self._size + num_bytes > self.max_bytes:
            above = {n: o for n, o in others.items() if o.images and o.num_bytes > unit * o.weight}
            is_above = own.num_bytes + num_bytes > unit * own.weight
            if own.images and (is_above or not above):
                self._drop(owner, next(iter(own.images)))
            else:
                name = max(above, key=lambda n: (above[n].num_bytes / above[n].weight, n))
                self._drop(name, next(iter(above[name].images)))

    def _drop(self, owner: str, image_id: str) -> None:
        own = self._owners[owner]
        self._size -= own.drop(image_id)
        if not own.images:
            del self._owners[owner]

    def _absent(self, image_id: str) -> str:
        if self.max_bytes == 0:
            return "the server keeps no pictures: send the picture itself"
        shown = image_id if len(image_id) <= _MAX_SHOWN else f"{image_id[:_MAX_SHOWN]}…"
        return (
            f"there is no picture {shown!r}: send the picture again. The server keeps {self.max_bytes} bytes of "
            "pictures, drops a caller's unused for longest first, and all when it stops"
        )


def size_of(source: bytes | np.ndarray) -> int:
    """Bytes of the encoded file, or of the pixels."""
    return len(source) if isinstance(source, bytes) else source.nbytes


def digest_of(source: bytes | np.ndarray) -> bytes:
    """What tells pictures apart by content: a SHA-256 of bytes, or of pixels and their shape."""
    digest = hashlib.sha256()
    if isinstance(source, bytes):
        digest.update(b"encoded")
        digest.update(source)
    else:
        digest.update(repr(source.shape).encode())
        digest.update(np.ascontiguousarray(source).data)
    return digest.digest()
