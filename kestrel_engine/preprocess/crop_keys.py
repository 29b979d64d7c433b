"""Content keys of crops, by which the engine recognises crops that repeat in other images.

A key is a hash of a crop's pixels. If the device makes the crops, it is a hash of the image's pixels that the crop is
computed from, and of the crop's place, so that keys are known before any crop is made.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from ..exact_resize import passes, pixels_read
from ..types.model_config import VisionConfig
from ..types.requests import PreparedImage
from .crops import KEY_LENGTH, PREPROCESS_VERSION, Run, select_tiling

_LAYOUTS_KEPT = 256
"""The number of image sizes whose cells are cached, a few kB each."""

_ROWS_COMPARED = 64

_Range = tuple[int, int]


def crop_keys(
    image: PreparedImage, vision: VisionConfig, run: Run | None = None
) -> tuple[str, ...]:
    """Returns a key for each distinct crop: KEY_LENGTH hexadecimal digits. Images with equal keys have equal crops.
    Blocks: 1 MB takes about half a millisecond. ``run``: as in ``crops.cut_crops``."""
    if image.pixels is not None:
        digests = cell_digests(image.pixels, vision, run)
        return keys_of_cells(image.width, image.height, vision, digests)
    assert image.crops is not None, image
    found = _digests([image.crops[index] for index in range(image.num_distinct)], run)
    return tuple(_key((PREPROCESS_VERSION, "crop"), (digest,)) for digest in found)


def cell_digests(
    pixels: np.ndarray,
    vision: VisionConfig,
    run: Run | None = None,
    known: tuple[np.ndarray, tuple[bytes, ...]] | None = None,
) -> tuple[bytes, ...]:
    """Returns the SHA-256 of each cell of an image, the parts of which its crops are computed. Together they determine
    its pixels. ``pixels``: [height, width, 3] uint8. Blocks. ``known``: another image of the same size, and its result.
    An equal cell is not hashed, which takes ten times as long as comparing. If all cells are equal, the result is that
    of ``known`` itself."""
    height, width, _ = pixels.shape
    cells = _cells(width, height, select_tiling(width, height, vision), vision)
    places = cells.places
    if known is None:
        return tuple(_digests([pixels[place] for place in places], run))
    other, before = known
    changed = _changed(pixels, other, cells)
    if not changed:
        return before
    digests = list(before)
    found = _digests([pixels[places[index]] for index in changed], run)
    for index, digest in zip(changed, found, strict=True):
        digests[index] = digest
    return tuple(digests)


def keys_of_cells(
    width: int, height: int, vision: VisionConfig, digests: Sequence[bytes]
) -> tuple[str, ...]:
    """Returns the ``crop_keys`` of an image whose crops the device makes. ``digests``: those of its cells."""
    cells = _cells(width, height, select_tiling(width, height, vision), vision)
    header = (PREPROCESS_VERSION, "pixels", vision.crop_size, width, height)
    return tuple(
        _key((*header, tiling), (digests[cell] for cell in read)) for tiling, read in cells.read_by
    )


def _changed(pixels: np.ndarray, other: np.ndarray, cells: _Cells) -> list[int]:
    """Returns the indices of the cells whose pixels differ."""
    _, width, channels = pixels.shape
    across = len(cells.lefts) - 1
    found = []
    for row, (top, bottom) in enumerate(pairwise(cells.tops)):
        columns = np.zeros(width * channels, bool)
        # Whole rows, because short pieces of rows take three times as long; few, so that they stay in the cache.
        for first in range(top, bottom, _ROWS_COMPARED):
            rows = slice(first, min(first + _ROWS_COMPARED, bottom))
            differs = (pixels[rows] != other[rows]).reshape(-1, width * channels)
            if differs.any():
                columns |= differs.any(axis=0)
        if columns.any():
            for column, (left, right) in enumerate(pairwise(cells.lefts)):
                if columns[left * channels : right * channels].any():
                    found.append(across * row + column)
    return found


def _digests(parts: list[np.ndarray], run: Run | None) -> list[bytes]:
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
    """The parts of an image between the edges of what its tiles read, ``tops`` and ``lefts``, row by row. ``places``:
    rows and columns of each. ``read_by``: for each distinct crop, its place and its cells."""

    tops: tuple[int, ...]
    lefts: tuple[int, ...]
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
    return _Cells(tuple(tops), tuple(lefts), places, tuple(read_by))


def _tiles_read(
    width: int, height: int, tiling: tuple[int, int], vision: VisionConfig
) -> list[tuple[_Range, _Range]]:
    """Returns the rows and columns that each tile is computed from, but for a single tile, the overview."""
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
