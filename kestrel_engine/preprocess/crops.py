"""A decoded picture to the model's crops: tiling, resizing, content key. Owns the geometry of moondream.md section 4.

Knows no file format and no tensor; normalising to floats is the runtime's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import pyvips

from ..model_config import VisionConfig
from ..requests import PreparedImage
from .images import DecodedImage

PREPROCESS_VERSION = 1
"""Part of every key: raise it whenever equal pixels may give other crops than before."""

STRIP_ROWS = 16
"""Rows resized at once. libvips' own writer takes as many (its FATSTRIP), and Lanczos 3 adds positions up from the
first row of each: other strips may round other pixels."""

BAND_ROWS = 2 * STRIP_ROWS
"""Rows of one piece of work."""

Piece: TypeAlias = Callable[[], object]
Run: TypeAlias = Callable[[Sequence[Piece]], None]
"""Calls every piece once, in any order, in any threads; returns when all are done; raises what one of them raised."""


def in_turn(pieces: Sequence[Piece]) -> None:
    """The Run of the calling thread alone."""
    for piece in pieces:
        piece()


def select_tiling(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """(rows, columns) of local crops for a picture of ``width`` x ``height`` pixels (moondream.md section 4, step 2).

    Usually at most ``vision.max_crops`` in all; one row or column may exceed it for extreme shapes, as the reference.
    """
    window, margins = _window(vision), _margins(vision)
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


def prepare(image: DecodedImage, vision: VisionConfig, *, run: Run = in_turn) -> PreparedImage:
    """Tiles and resizes; the crops equal the reference's byte for byte. Blocks: call it in a worker thread.

    ``run``: does the pieces of work: bands of rows and the key; any gives the same crops. The key depends on pixels,
    size, geometry and PREPROCESS_VERSION only, so the same pixels have one key in whatever format they came. Resizing
    is libvips' ``resize`` with its default kernels on the whole picture (bicubic to enlarge, Lanczos 3 to shrink).
    """
    side, window = vision.crop_size, _window(vision)
    rows, columns = select_tiling(image.width, image.height, vision)
    crops = np.empty((1 + rows * columns, side, side, 3), np.uint8)
    key: list[str] = []
    pieces: list[Piece] = [lambda: key.append(_content_key(image.pixels, vision))]
    if (rows, columns) == (1, 1):
        # The only tile is the whole picture again.
        pieces += _Resized(image.pixels, crops[None], 0).bands()
    else:
        pieces += _Resized(image.pixels, crops[None, :1], 0).bands()
        tiles = crops[1:].reshape(rows, columns, side, side, 3)
        pieces += _Resized(image.pixels, tiles, window).bands()
    run(pieces)
    return PreparedImage(
        key=key[0],
        crops=crops,
        tiling=(rows, columns),
        width=image.width,
        height=image.height,
    )


class _Resized:
    """A picture, resized to a grid of tiles; nothing is computed before ``bands``' pieces are called.

    ``pixels``: [h, w, 3] uint8. ``tiles``: [rows, columns, side, side, 3] uint8, written to; one begins ``window``
    pixels after the other, both ways. The aspect ratio is not kept.
    """

    def __init__(self, pixels: np.ndarray, tiles: np.ndarray, window: int) -> None:
        rows, columns, side, _, _ = tiles.shape
        self._tiles, self._window = tiles, window
        self._width, self._height = window * (columns - 1) + side, window * (rows - 1) + side
        h, w, bands = pixels.shape
        image = pyvips.Image.new_from_memory(pixels.data, w, h, bands, "uchar")
        self._image = image.resize(self._width / w, vscale=self._height / h)
        size = self._image.width, self._image.height
        assert size == (self._width, self._height), (pixels.shape, size, tiles.shape)

    def bands(self) -> list[Piece]:
        """Pieces that write all tiles between them; each belongs to the thread that calls it."""
        return [
            partial(self._write, top, min(top + BAND_ROWS, self._height))
            for top in range(0, self._height, BAND_ROWS)
        ]

    def _write(self, top: int, bottom: int) -> None:
        """Rows ``top`` to ``bottom``, computed once, to all tiles that they belong to."""
        _, columns, side, _, bands = self._tiles.shape
        # Unlike libvips' writers, a region computes in the calling thread, and starts none.
        region = pyvips.Region.new(self._image)
        for y in range(top, bottom, STRIP_ROWS):
            rows = min(STRIP_ROWS, bottom - y)
            strip = np.frombuffer(region.fetch(0, y, self._width, rows), np.uint8)
            line = self._width * bands
            # [columns, rows, side, 3]: the tiles' parts of the strip, which overlap.
            parts = np.lib.stride_tricks.as_strided(
                strip, (columns, rows, side, bands), (self._window * bands, line, bands, 1)
            )
            for index, tile_row in enumerate(self._tiles):
                first = max(0, y - self._window * index)
                last = min(side, y + rows - self._window * index)
                if first < last:
                    from_strip = first + self._window * index - y
                    tile_row[:, first:last] = parts[:, from_strip : from_strip + last - first]


def _margins(vision: VisionConfig) -> int:
    """Overlap on both sides of a crop together, pixels."""
    return 2 * vision.overlap_margin * vision.enc_patch_size


def _window(vision: VisionConfig) -> int:
    """Distance from one crop to the next, pixels."""
    return vision.crop_size - _margins(vision)


def _content_key(pixels: np.ndarray, vision: VisionConfig) -> str:
    """32 hexadecimal digits (128 bits of SHA-256, the fastest here by the processor's own instructions)."""
    geometry = (vision.crop_size, vision.enc_patch_size, vision.overlap_margin, vision.max_crops)
    digest = hashlib.sha256(repr((PREPROCESS_VERSION, geometry, pixels.shape)).encode())
    digest.update(pixels.data)
    return digest.hexdigest()[:32]
