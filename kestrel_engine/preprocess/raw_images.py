"""RawImages: prepares raw pixels whose crops the device makes. Owns what was seen last of each size.

The pixels are read once: the keys of the image and of its crops follow from the hashes of its cells (crop_keys.py).
Cells of a stream's frame that equal those of the frame before are not hashed again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import clock
from ..config.image_limits import ImageLimits
from ..errors import EngineClosed
from ..types.model_config import VisionConfig
from ..types.requests import PreparedImage
from .crop_keys import cell_digests, keys_of_cells
from .crops import (
    KEY_LENGTH,
    PREPROCESS_VERSION,
    Piece,
    device_makes_crops,
    select_tiling,
)
from .decoding.open_image import read_source
from .jobs import PreparedLooks
from .prepared_cache import PreparedCache, in_namespace, source_key

_MOST_SIZES = 64
"""Pairs of a namespace and a size of which the last image is known."""

_SEVERAL_THREADS_BYTES = 2**20
"""An image of more bytes is hashed by several threads: the first one takes half a millisecond."""

_MOST_THREADS = 4


Digests: TypeAlias = tuple[bytes, ...]
Known: TypeAlias = tuple[np.ndarray, Digests]
"""Pixels, and the digests of their cells."""

Result = TypeVar("Result")


class _Seen(NamedTuple):
    """The image of a size that came last. The cache holds its pixels, or does not hold them any more."""

    key: bytes
    digests: Digests


class RawImages:
    """Belongs to one event loop. ``device_pixels``: as in ``crops.cut_crops``. ``threads``: to hash large images."""

    def __init__(
        self,
        limits: ImageLimits,
        vision: VisionConfig,
        cache: PreparedCache,
        *,
        device_pixels: int,
        with_crop_keys: bool,
        threads: int,
    ) -> None:
        self._limits, self._vision, self._cache = limits, vision, cache
        self._device_pixels, self._with_crop_keys = device_pixels, with_crop_keys
        self._last: OrderedDict[tuple[str, tuple[int, ...]], _Seen] = OrderedDict()
        self._closed = False
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, threads), "hash pixels")

    def takes(self, source: Any) -> bool:
        """Whether ``source`` is an array of RGB pixels whose crops the device makes."""
        if not isinstance(source, np.ndarray) or source.dtype != np.uint8 or not source.size:
            return False
        if source.ndim != 3 or source.shape[2] != 3:
            return False
        height, width, _ = source.shape
        return device_makes_crops(width, height, self._vision, self._device_pixels)

    async def digest(self, source: np.ndarray) -> bytes:
        """Returns the source digest of an image that ``takes`` accepts. Raises ImageTooLargeError, and EngineClosed."""
        _, digests = await self._in_thread(self._read, source, None)
        return _digest(source.shape, digests)

    async def prepare(self, source: np.ndarray, namespace: str) -> PreparedLooks:
        """Prepares an image that ``takes`` accepts. The result keeps pixels that cannot change, and a copy of
        others. Raises ImageTooLargeError, and EngineClosed after ``close``."""
        began = clock.now()
        seen = self._last.get((namespace, source.shape))
        kept = None if seen is None else self._cache.find(seen.key)
        known: Known | None = None
        if seen is not None and kept is not None and kept[0].pixels is not None:
            known = kept[0].pixels, seen.digests
        image, digests = await self._in_thread(self._prepare, source, known)
        if image is None:
            assert kept is not None, "it equals this one"
            return PreparedLooks(kept, clock.now() - began)
        assert image.source_digest is not None, image
        key = source_key(image.source_digest, namespace)
        looks = self._cache.find(key)
        if looks is None:
            looks = (in_namespace(image, namespace),)
            self._cache.keep_looks(key, looks)
        self._last[namespace, source.shape] = _Seen(key, digests)
        self._last.move_to_end((namespace, source.shape))
        if len(self._last) > _MOST_SIZES:
            self._last.popitem(last=False)
        return PreparedLooks(looks, clock.now() - began)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        try:
            result = await asyncio.to_thread(work, *args)
        except RuntimeError:
            if not self._closed:
                raise
        else:
            if not self._closed:
                return result
        # Work that needs further threads fails with RuntimeError, because there are none.
        raise EngineClosed("preprocessing is shut down")

    def _read(self, source: np.ndarray, known: Known | None) -> tuple[np.ndarray, Digests]:
        """Returns the pixels, contiguous, and the digests of their cells."""
        pixels = read_source(source, self._limits)
        assert isinstance(pixels, np.ndarray), "an array stays one"
        run = self._run if pixels.nbytes > _SEVERAL_THREADS_BYTES else None
        return pixels, cell_digests(pixels, self._vision, run, known)

    def _prepare(
        self, source: np.ndarray, known: Known | None
    ) -> tuple[PreparedImage | None, Digests]:
        """Returns the image, and the digests of its cells; None if it equals the known one."""
        pixels, digests = self._read(source, known)
        if known is not None and digests is known[1]:
            return None, digests
        if np.may_share_memory(pixels, source) and not _is_constant(source):
            pixels = pixels.copy()
        height, width, _ = pixels.shape
        digest = _digest(pixels.shape, digests)
        image = PreparedImage(
            key=_content_key(digest, self._vision),
            crops=None,
            tiling=select_tiling(width, height, self._vision),
            width=width,
            height=height,
            pixels=pixels,
            source_digest=digest,
            crop_keys=(
                keys_of_cells(width, height, self._vision, digests)
                if self._with_crop_keys
                else None
            ),
        )
        return image, digests

    def _run(self, pieces: Sequence[Piece]) -> None:
        for _ in self._threads.map(lambda piece: piece(), pieces):
            pass


def _digest(shape: tuple[int, ...], digests: Sequence[bytes]) -> bytes:
    """Returns the source digest of pixels, made from those of their cells."""
    return hashlib.sha256(repr(("cells", shape)).encode() + b"".join(digests)).digest()


def _content_key(digest: bytes, vision: VisionConfig) -> str:
    geometry = (vision.crop_size, vision.enc_patch_size, vision.overlap_margin, vision.max_crops)
    header = repr((PREPROCESS_VERSION, geometry)).encode()
    return hashlib.sha256(header + digest).hexdigest()[:KEY_LENGTH]


def _is_constant(array: np.ndarray) -> bool:
    """Whether the pixels cannot change, because they lie in bytes, as those of a message do."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, bytes)
