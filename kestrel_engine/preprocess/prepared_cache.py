"""PreparedCache: holds images that were decoded and tiled, by the bytes of their sources."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any, TypeAlias

import numpy as np

from ..byte_cache import ByteCache
from ..types.requests import PreparedImage
from .decoding.open_image import Colour, OnBackground
from .looks import WHOLE, InCrops, InRegion, Mirrored, Selection, Tiled

RECORD_BYTES = 4096
"""What the cache takes for an image beside its crops or pixels: some 2,000 measured. Without it, a caller could fill
the memory with images of one pixel."""

Looks: TypeAlias = tuple[PreparedImage, ...]
"""What is prepared from one source: the image, a region of it, or an image and its tiles. They share their memory."""


class PreparedCache(ByteCache[bytes, Looks]):
    """The looks by their ``source_key``. ``max_bytes``: limit on their crops and pixels, with RECORD_BYTES for each."""

    def keep_looks(self, key: bytes, looks: Looks) -> None:
        self.keep(key, looks, sum(look.num_bytes + RECORD_BYTES for look in looks))


def in_namespace(image: PreparedImage, namespace: str) -> PreparedImage:
    """Returns the image with keys of its namespace, so that others do not share its results. "" keeps the keys."""
    if not namespace:
        return image
    digest = namespace_digest(namespace)

    def own(key: str) -> str:
        return hashlib.blake2b(key.encode(), key=digest, digest_size=16).hexdigest()

    crop_keys = None if image.crop_keys is None else tuple(map(own, image.crop_keys))
    return dataclasses.replace(image, key=own(image.key), crop_keys=crop_keys)


def source_digest(source: Any) -> bytes | None:
    """Returns a SHA-256 of the source, without its background, region, tiles and budget, mirrored or not; None if only
    decoding can identify the source. Raw pixels whose crops the device makes have another one (raw_images.py). A file
    is identified by its path, device, inode, size and time."""
    while isinstance(source, (OnBackground, InRegion, InCrops, Mirrored, Tiled)):
        source = source.source
    digest = hashlib.sha256()
    if isinstance(source, (bytes, bytearray, memoryview)):
        digest.update(b"bytes")
        view = memoryview(source)
        digest.update(view if view.c_contiguous else view.tobytes())
    elif isinstance(source, np.ndarray) and source.dtype == np.uint8:
        digest.update(repr(("array", source.shape)).encode())
        digest.update(np.ascontiguousarray(source).data)
    elif isinstance(source, (str, os.PathLike)):
        try:
            status = os.stat(source)
        except (OSError, ValueError):
            return None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        digest.update(repr(("file", os.fspath(source), identity)).encode())
    else:
        return None
    return digest.digest()


def source_key(
    digest: bytes,
    namespace: str = "",
    background: Colour | None = None,
    selection: Selection = WHOLE,
) -> bytes:
    """Returns the key of prepared looks at the image with the ``source_digest`` ``digest``."""
    key = hashlib.sha256(namespace_digest(namespace) or bytes(32))
    key.update(b"" if background is None else b"on" + bytes(background))
    key.update(b"" if selection == WHOLE else repr(selection).encode())
    key.update(digest)
    return key.digest()


def namespace_digest(namespace: str) -> bytes:
    """Returns the namespace, of any length, as a key of BLAKE2b."""
    return hashlib.blake2b(namespace.encode(), digest_size=32).digest() if namespace else b""
