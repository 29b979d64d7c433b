"""KnownImages: what the client knows of images that servers store. Routes calls, and puts images again.

An image's id holds on one server only. If the server restarts, or calls about the image move to another server, the new
one does not know the id. The client then puts the image again, and uses the new id in place of the old one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from .._pb.kestrel.v1 import common_pb2
from .image_forms import NO_LIMIT, ImageInput, to_image

DEFAULT_KEPT_IMAGE_BYTES = 64 * 1024 * 1024

ImageSource: TypeAlias = "Callable[[str], ImageInput | None]"
"""Returns the image that was stored under an id, or None. The client calls it in the thread of a call."""

_MAX_IDS = 16384
"""Ids that the client remembers, with their digests: about 5 MB."""
_DIGEST_CHARACTERS = 32

V = TypeVar("V")


def digest_of(image: common_pb2.Image) -> str:
    """The first 32 hexadecimal digits of the SHA-256 of a file, or of pixels with their size and format."""
    if image.HasField("features"):
        digest = hashlib.sha256(b"features:" + image.features.data)
    elif image.HasField("raw"):
        raw = image.raw
        digest = hashlib.sha256(f"{raw.width}x{raw.height}:{raw.format}:".encode())
        digest.update(raw.data)
    else:
        digest = hashlib.sha256(image.encoded)
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _num_bytes(image: common_pb2.Image) -> int:
    return len(image.raw.data) or len(image.encoded)


class KnownImages:
    """Ids, digests and contents of images. Safe to share between threads.

    ``max_bytes``: limit of the contents that are kept; the image that was used least recently is dropped first.
    ``source``: asked for an image whose contents are not kept.
    """

    def __init__(self, max_bytes: int, source: ImageSource | None = None) -> None:
        self._max_bytes, self._source = max_bytes, source
        self._lock = threading.Lock()
        self._digests: _Recent[str] = _Recent(_MAX_IDS)
        """The digest of the image that was stored under an id."""
        self._moved: _Recent[str] = _Recent(_MAX_IDS)
        """The id that replaces one that its server did not know."""
        self._deleted: _Recent[bool] = _Recent(_MAX_IDS)
        """Ids of images that the caller deleted. They are not put again."""
        self._contents: _Recent[common_pb2.Image] = _Recent(max_bytes, _num_bytes)
        """By digest."""

    def current_id(self, image_id: str) -> str:
        """The id to send in place of ``image_id``."""
        with self._lock:
            return self._moved.get(image_id) or image_id

    def key(self, image: common_pb2.Image) -> str:
        """The key of calls about this image: the digest of its contents. An id whose image is not known is a key."""
        if not image.image_id:
            return digest_of(image)
        with self._lock:
            return self._digests.get(image.image_id) or image.image_id

    def learn(self, image_id: str, image: common_pb2.Image, digest: str = "") -> None:
        """Remembers that a server stores ``image`` under ``image_id``."""
        if not image_id or image.image_id:
            return
        digest = digest or digest_of(image)
        with self._lock:
            self._digests.put(image_id, digest)
            if self._contents.get(digest) is None and _num_bytes(image) <= self._max_bytes:
                # Without the fields that belong to one request.
                kept = common_pb2.Image(encoded=image.encoded)
                if image.HasField("raw"):
                    kept.raw.CopyFrom(image.raw)
                self._contents.put(digest, kept)

    def replace(self, image_id: str, new_id: str) -> None:
        """Remembers that an image was put again and has another id now."""
        with self._lock:
            self._moved.put(image_id, new_id)
            if (digest := self._digests.get(new_id)) is not None:
                self._digests.put(image_id, digest)

    def forget(self, image_id: str) -> None:
        """The caller deletes the image."""
        with self._lock:
            self._deleted.put(image_id, True)
            self._moved.pop(image_id)
            if (digest := self._digests.pop(image_id)) is not None:
                self._contents.pop(digest)

    def contents(self, image_id: str, source: ImageInput | None) -> common_pb2.Image | None:
        """The image that was stored under ``image_id``, or None if the client cannot get it.

        ``source``: the image that the caller's handle holds. It may be a file that has changed since: an image whose
        digest is not that of the stored one is not returned. Raises InvalidImageError for an image that can't be read.
        """
        with self._lock:
            digest = self._digests.get(image_id)
            if self._deleted.get(image_id):
                return None
            if digest is not None and (kept := self._contents.get(digest)) is not None:
                return kept
        if source is None and self._source is not None:
            source = self._source(image_id)
        if source is None:
            return None
        image = to_image(source, NO_LIMIT)
        if image.image_id or (digest is not None and digest_of(image) != digest):
            return None
        return image


class _Recent(Generic[V]):
    """A mapping of what was used last. ``most``: limit of the sum of the values' sizes."""

    def __init__(self, most: int, size_of: Callable[[V], int] = lambda value: 1) -> None:
        self._most, self._size_of, self._total = most, size_of, 0
        self._values: OrderedDict[str, V] = OrderedDict()

    def get(self, key: str) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: str, value: V) -> None:
        self.pop(key)
        self._values[key] = value
        self._total += self._size_of(value)
        while self._total > self._most:
            self.pop(next(iter(self._values)))

    def pop(self, key: str) -> V | None:
        value = self._values.pop(key, None)
        if value is not None:
            self._total -= self._size_of(value)
        return value
