"""Content keys of crops, by which the engine recognises crops that repeat in other images.

If the crops are there, a key is a hash of a crop's pixels. If the device makes them, a key is a hash of the pixels of
the image that the crop is computed from, and of the crop's place: a crop is a function of these. So the crops that
repeat are known before any crop is made.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from ..exact_resize import passes, pixels_read
from ..types.model_config import VisionConfig
from ..types.requests import PreparedImage
from .crops import KEY_LENGTH, PREPROCESS_VERSION, Run

_LAYOUTS_KEPT = 256
"""The number of image sizes whose cells are cached, a few kB each."""

_Range = tuple[int, int]


def crop_keys(
    image: PreparedImage, vision: VisionConfig, run: Run | None = None
) -> tuple[str, ...]:
    """Returns a key for each distinct crop: KEY_LENGTH hexadecimal digits. Images with equal keys have equal crops.
    Blocks: 1 MB takes about half a millisecond. ``run``: as in ``crops.prepare``."""
    if image.pixels is not None:
        cells = _cells(image.width, image.height, image.tiling, vision)
        digests = _digests([image.pixels[rows, columns] for rows, columns in cells.places], run)
        header = (PREPROCESS_VERSION, "pixels", vision.crop_size, image.width, image.height)
        return tuple(
            _key((*header, tiling), (digests[cell] for cell in read))
            for tiling, read in cells.read_by
        )
    assert image.crops is not None, image
    found = _digests([image.crops[index] for index in range(image.num_distinct)], run)
    return tuple(_key((PREPROCESS_VERSION, "crop"), (digest,)) for digest in found)


def _digests(parts: list[np.ndarray], run: Run | None) -> list[bytes]:
    """Returns the SHA-256 of each part."""
    found = [b""] * len(parts)

    def digest(index: int) -> None:
        # A copy and one hash: a hash of each row takes longer.
        found[index] = hashlib.sha256(np.ascontiguousarray(parts[index]).data).digest()

    pieces: list[Callable[[], object]] = [partial(digest, index) for index in range(len(parts))]
    if run is None:
        for piece in pieces:
            piece()
    else:
        run(pieces)
    return found


def _key(header: tuple[object, ...], digests: Iterable[bytes]) -> str:
    return hashlib.sha256(repr(header).encode() + b"".join(digests)).hexdigest()[:KEY_LENGTH]


@dataclass(frozen=True, slots=True)
class _Cells:
    """The parts of an image between the edges of what its tiles read. ``places``: rows and columns of each.
    ``read_by``: for each distinct crop, its place, and the cells that it reads."""

    places: tuple[tuple[slice, slice], ...]
    read_by: tuple[tuple[object, tuple[int, ...]], ...]


@lru_cache(_LAYOUTS_KEPT)
def _cells(width: int, height: int, tiling: tuple[int, int], vision: VisionConfig) -> _Cells:
    tiles = _tiles_read(width, height, tiling, vision)
    tops = sorted({0, height, *(edge for rows, _ in tiles for edge in rows)})
    lefts = sorted({0, width, *(edge for _, columns in tiles for edge in columns)})
    across = len(lefts) - 1
    places = tuple(
        (slice(*rows), slice(*columns)) for rows in pairwise(tops) for columns in pairwise(lefts)
    )
    # The overview is the same for each tiling.
    read_by: list[tuple[object, tuple[int, ...]]] = [("overview", tuple(range(len(places))))]
    for index, (rows, columns) in enumerate(tiles):
        first, last = (bisect_left(tops, edge) for edge in rows)
        left, right = (bisect_left(lefts, edge) for edge in columns)
        read = (
            across * row + column for row in range(first, last) for column in range(left, right)
        )
        read_by.append(((tiling, index), tuple(read)))
    return _Cells(places, tuple(read_by))


def _tiles_read(
    width: int, height: int, tiling: tuple[int, int], vision: VisionConfig
) -> list[tuple[_Range, _Range]]:
    """Returns the rows and columns of the image that each tile is computed from. A single tile equals the overview and
    is left out."""
    if tiling == (1, 1):
        return []
    down, across = tiling
    side, window = vision.crop_size, vision.crop_window
    steps = passes(width, height, window * (across - 1) + side, window * (down - 1) + side)
    return [
        pixels_read(steps, (top, top + side), (left, left + side))
        for top in range(0, window * down, window)
        for left in range(0, window * across, window)
    ]
