"""ImageStore: pictures kept for requests that name them by id. Owns ids, owners, the bound and who goes first.

A data structure without I/O, for one event loop. A picture belongs to the owner who put it and is there for no other;
ids hold 128 random bits, so that one can't be guessed either. Bounded in bytes over all owners, least recently used out
first. The same picture of one owner is kept once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kestrel_engine import KestrelError, RequestError

_PREFIX = "img_"
_ID_BYTES = 16
_MAX_SHOWN = 64
"""Characters of an unknown id that an error repeats."""


class ImageNotFound(RequestError):
    """No picture of this owner has the id, or no longer."""


class ImagesNotKept(KestrelError):
    """The server was told to keep no pictures."""


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


class ImageStore:
    """``max_bytes`` 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._size = 0
        self._kept: OrderedDict[tuple[str, str], KeptImage] = OrderedDict()
        """By owner and id, least recently used first."""
        self._ids: dict[tuple[str, bytes], str] = {}
        """By owner and digest."""
        self._digests: dict[tuple[str, str], bytes] = {}

    @property
    def size_bytes(self) -> int:
        return self._size

    def __len__(self) -> int:
        return len(self._kept)

    def put(
        self, owner: str, digest: bytes, source: bytes | np.ndarray, size: tuple[int, int]
    ) -> KeptImage | None:
        """Keeps a checked picture of (width, height) ``size``; None if it alone exceeds the bound.

        ``digest`` is ``digest_of(source)``, which takes time and so is the caller's to do where that does no harm.
        """
        present = self.find(owner, digest)
        if present is not None:
            return present
        num_bytes = size_of(source)
        if num_bytes > self.max_bytes or self.max_bytes == 0:
            return None
        image = KeptImage(_PREFIX + secrets.token_hex(_ID_BYTES), source, *size)
        key = (owner, image.image_id)
        self._kept[key], self._digests[key] = image, digest
        self._ids[owner, digest] = image.image_id
        self._size += num_bytes
        while self._size > self.max_bytes:
            self._drop(next(iter(self._kept)))
        return image

    def find(self, owner: str, digest: bytes) -> KeptImage | None:
        """The owner's picture of this content, if it is there; counts as a use."""
        image_id = self._ids.get((owner, digest))
        return None if image_id is None else self.get(owner, image_id)

    def get(self, owner: str, image_id: str) -> KeptImage:
        """Raises ImageNotFound, with the remedy in its text; counts as a use."""
        key = (owner, image_id)
        if key not in self._kept:
            raise ImageNotFound("image.image_id", self._absent(image_id))
        self._kept.move_to_end(key)
        return self._kept[key]

    def delete(self, owner: str, image_id: str) -> bool:
        """Whether there was such a picture."""
        if (owner, image_id) not in self._kept:
            return False
        self._drop((owner, image_id))
        return True

    def clear(self) -> int:
        """Forgets all pictures of all owners; returns how many."""
        count = len(self._kept)
        for key in list(self._kept):
            self._drop(key)
        return count

    def check(self) -> None:
        """Asserts that all records agree; for tests."""
        assert self._size == sum(image.num_bytes for image in self._kept.values())
        assert self._size <= self.max_bytes
        assert self._kept.keys() == self._digests.keys()
        assert {(o, d): i for (o, i), d in self._digests.items()} == self._ids

    def _drop(self, key: tuple[str, str]) -> None:
        self._size -= self._kept.pop(key).num_bytes
        del self._ids[key[0], self._digests.pop(key)]

    def _absent(self, image_id: str) -> str:
        if self.max_bytes == 0:
            return "the server keeps no pictures: send the picture itself"
        shown = image_id if len(image_id) <= _MAX_SHOWN else f"{image_id[:_MAX_SHOWN]}…"
        return (
            f"there is no picture {shown!r}: send the picture again. The server keeps {self.max_bytes} bytes of "
            "pictures, drops those unused for longest first, and all when it stops"
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
