"""A decoded image to the model's crops: tiling, resizing, content key. Owns the geometry of moondream.md section 4.

Knows no file format and no tensor; normalising to floats is the runtime's.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import pyvips

from ..exact_resize import STRIP_ROWS, is_exact
from ..types.model_config import VisionConfig
from ..types.requests import PreparedImage
from .decoded_image import DecodedImage

PREPROCESS_VERSION = 1
"""Part of every key: raise it whenever equal pixels may give other crops than before."""

KEY_LENGTH = 32
"""Characters of a content key, hexadecimal digits."""

BAND_ROWS = 2 * STRIP_ROWS
"""Rows of a piece of work, if several threads share it: each piece costs 50 us more than the same rows in one go."""

ROWS_AT_ONCE = 64
"""Rows hashed or copied at once, while others are being decoded."""

Piece: TypeAlias = Callable[[], object]
Run: TypeAlias = Callable[[Sequence[Piece]], None]
"""Calls every piece once, begins them in order, in any threads: a piece may wait for those before it. Returns when all
are done; raises what one of them raised."""


Allocate: TypeAlias = Callable[[tuple[int, ...]], np.ndarray]
"""From a shape to uint8 memory of any contents."""


def new_bytes(shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary memory, as `Allocate`."""
    return np.empty(shape, np.uint8)


def select_tiling(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """(rows, columns) of local crops for an image of ``width`` x ``height`` pixels (moondream.md section 4, step 2).

    Usually at most ``vision.max_crops`` in all; one row or column may exceed it for extreme shapes, as the reference.
    """
    window = vision.crop_window
    margins = vision.crop_size - window
    inner_height, inner_width = height - margins, width - margins
    if inner_height <= window or inner_width <= window:
        return 1, 1
    least_rows, least_columns = -(-inner_height // window), -(-inner_width // window)
    most = vision.max_crops
    if least_rows * least_columns > most:
        ratio = math.sqrt(most / (least_rows * least_columns))
        return max(1, math.floor(least_rows * ratio)), max(1, math.floor(least_columns * ratio))
    rows = max(math.floor(math.sqrt(most * inner_height / inner_width)), least_rows)
    columns = max(math.floor(math.sqrt(most * inner_width / inner_height)), least_columns)
    if rows * columns > most:
        if columns > rows:
            columns = most // rows
        else:
            rows = most // columns
    return max(1, rows), max(1, columns)


def device_makes_crops(width: int, height: int, vision: VisionConfig, device_pixels: int) -> bool:
    """Whether an image of ``width`` x ``height`` pixels is prepared without crops, for a device that makes those of
    images of up to ``device_pixels`` (0: of none): it can't make them exactly of all sizes."""
    rows, columns = select_tiling(width, height, vision)
    to_width = vision.crop_window * (columns - 1) + vision.crop_size
    to_height = vision.crop_window * (rows - 1) + vision.crop_size
    return width * height <= device_pixels and is_exact(width, height, to_width, to_height)


def prepare(
    image: DecodedImage,
    vision: VisionConfig,
    *,
    run: Run | None = None,
    allocate: Allocate = new_bytes,
    device_pixels: int = 0,
) -> PreparedImage:
    """Decodes what isn't yet, tiles and resizes; the crops equal the reference's byte for byte. Blocks: call it in a
    worker thread.

    ``device_pixels``: as for `device_makes_crops`, where the image keeps its pixels instead. ``allocate``: gives the
    memory of crops or pixels. ``run``: does the pieces of work: the decoding, the key and bands of rows;
    any gives the same crops, and so does None, the calling thread alone: as little CPU time as possible, where a run
    is for as little delay. The key depends on pixels, size, geometry and PREPROCESS_VERSION only, so the same pixels
    have one key in whatever format they came. Resizing is libvips' ``resize`` with its default kernels on the whole
    image (bicubic to enlarge, Lanczos 3 to shrink). Raises what ``image.decode`` raises.
    """
    side, window = vision.crop_size, vision.crop_window
    rows, columns = select_tiling(image.width, image.height, vision)
    key: list[str] = []
    pieces: list[Piece] = [image.decode, lambda: key.append(_content_key(image, vision))]
    if device_makes_crops(image.width, image.height, vision, device_pixels):
        pixels = allocate(image.pixels.shape)
        (run or _one_by_one)([*pieces, lambda: _copy(image, pixels)])
        return PreparedImage(
            key=key[0],
            crops=None,
            tiling=(rows, columns),
            width=image.width,
            height=image.height,
            pixels=pixels,
        )
    crops = allocate((1 + rows * columns, side, side, 3))
    if (rows, columns) == (1, 1):
        # The only tile is the whole image again.
        resized = [_Resized(image, crops[None], 0)]
    else:
        tiles = crops[1:].reshape(rows, columns, side, side, 3)
        resized = [_Resized(image, crops[None, :1], 0), _Resized(image, tiles, window)]
    if run is None:
        _one_by_one([*pieces, *(whole.write_all for whole in resized)])
    else:
        bands = [band for whole in resized for band in whole.bands()]
        run(pieces + [piece for _, piece in sorted(bands, key=itemgetter(0))])
    return PreparedImage(
        key=key[0],
        crops=crops,
        tiling=(rows, columns),
        width=image.width,
        height=image.height,
    )


def _one_by_one(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece()


def _copy(image: DecodedImage, pixels: np.ndarray) -> None:
    """The image's pixels, as they are decoded, to ``pixels``."""
    for top in range(0, image.height, ROWS_AT_ONCE):
        part = image.pixels[top : top + ROWS_AT_ONCE]
        image.wait_for(top + len(part))
        pixels[top : top + len(part)] = part


class _Resized:
    """An image, resized to a grid of tiles; nothing is computed before it is written.

    ``tiles``: [rows, columns, side, side, 3] uint8, written to; one begins ``window`` pixels after the other, both
    ways. The aspect ratio is not kept.
    """

    def __init__(self, source: DecodedImage, tiles: np.ndarray, window: int) -> None:
        rows, columns, side, _, _ = tiles.shape
        self._source, self._tiles, self._window = source, tiles, window
        self._width, self._height = window * (columns - 1) + side, window * (rows - 1) + side
        self._image: pyvips.Image | None = None
        self._lock = threading.Lock()

    def write_all(self) -> None:
        """Writes all tiles."""
        self._write(0, self._height)

    def bands(self) -> list[tuple[int, Piece]]:
        """Pieces that write all tiles between them, each with the number of the image's rows that it waits for."""
        found: list[tuple[int, Piece]] = []
        for top in range(0, self._height, BAND_ROWS):
            bottom = min(top + BAND_ROWS, self._height)
            found.append((self._rows_needed(bottom), partial(self._write, top, bottom)))
        return found

    def _rows_needed(self, bottom: int) -> int:
        """No fewer of the image's than libvips reads to compute the rows above ``bottom``: Lanczos 3 looks 3.5 rows
        of the result ahead, with a shrink by a whole number before it, and bicubic another 4 at most."""
        height = self._source.height
        step: float = height / self._height
        return min(height, math.ceil(bottom * step + 8 * max(1.0, step)) + 8)

    def _pipeline(self) -> pyvips.Image:
        """libvips' resizing, which computes on demand. Building it takes half a millisecond: the first piece does."""
        with self._lock:
            if self._image is None:
                h, w, bands = self._source.pixels.shape
                image = pyvips.Image.new_from_memory(self._source.pixels.data, w, h, bands, "uchar")
                image = image.resize(self._width / w, vscale=self._height / h)
                assert (image.width, image.height) == (self._width, self._height), (w, h, image)
                self._image = image
            return self._image

    def _write(self, top: int, bottom: int) -> None:
        """Rows ``top`` to ``bottom``, computed once, to all tiles that they belong to."""
        # Unlike libvips' writers, a region computes in the calling thread, and starts none.
        region = pyvips.Region.new(self._pipeline())
        self._source.wait_for(self._rows_needed(bottom))
        for y in range(top, bottom, STRIP_ROWS):
            rows = min(STRIP_ROWS, bottom - y)
            self._spread(np.frombuffer(region.fetch(0, y, self._width, rows), np.uint8), y, rows)

    def _spread(self, strip: np.ndarray, top: int, rows: int) -> None:
        """Copies the bytes of ``rows`` rows, the first being ``top``, to all tiles that they belong to."""
        _, columns, side, _, bands = self._tiles.shape
        # [columns, rows, side, 3]: the tiles' parts of the strip, which overlap.
        parts = np.lib.stride_tricks.as_strided(
            strip,
            (columns, rows, side, bands),
            (self._window * bands, self._width * bands, bands, 1),
        )
        for index, tile_row in enumerate(self._tiles):
            above = self._window * index
            first, last = max(0, top - above), min(side, top + rows - above)
            if first < last:
                tile_row[:, first:last] = parts[:, first + above - top : last + above - top]


def _content_key(image: DecodedImage, vision: VisionConfig) -> str:
    """32 hexadecimal digits (128 bits of SHA-256, the fastest here by the processor's own instructions)."""
    geometry = (vision.crop_size, vision.enc_patch_size, vision.overlap_margin, vision.max_crops)
    pixels = image.pixels
    digest = hashlib.sha256(repr((PREPROCESS_VERSION, geometry, pixels.shape)).encode())
    for top in range(0, image.height, ROWS_AT_ONCE):
        part = pixels[top : top + ROWS_AT_ONCE]
        image.wait_for(top + len(part))
        digest.update(part.data)
    return digest.hexdigest()[:KEY_LENGTH]
