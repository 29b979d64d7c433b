"""Makes the model's crops: tiling, resizing, content key. Owns the geometry of moondream.md section 4."""

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
from ..types.requests import ImageRegion, PreparedImage
from .decoding.decoded_image import Allocate, DecodedImage, new_bytes

PREPROCESS_VERSION = 1
"""A part of every key. Increase it when the same image may give other crops than before."""

KEY_LENGTH = 32
"""Characters of a content key, hexadecimal digits."""

BAND_ROWS = 2 * STRIP_ROWS
"""Rows of a piece of work, if several threads share it. Each piece costs 50 us more than the same rows in one call."""

ROWS_AT_ONCE = 64
"""Number of rows that are hashed or copied at once, while other rows are being decoded."""

Piece: TypeAlias = Callable[[], object]
Run: TypeAlias = Callable[[Sequence[Piece]], None]
"""Calls every piece once, in any threads. Starts them in order, because a piece may wait for earlier ones. Returns when
all are done. Raises the error of a piece."""


def select_tiling(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Returns (rows, columns) of local crops (moondream.md section 4, step 2). ``width``, ``height``: in pixels.
    Usually there are at most ``vision.max_crops`` crops. For extreme shapes, a single row or column may exceed this, as
    in the reference. ``vision.budget``, if it is set, is the limit in place of this one, and cuts them.
    """
    window = vision.crop_window
    margins = vision.crop_size - window
    inner_height, inner_width = height - margins, width - margins
    if inner_height <= window or inner_width <= window:
        return 1, 1
    least_rows, least_columns = -(-inner_height // window), -(-inner_width // window)
    most = vision.budget or vision.max_crops
    if least_rows * least_columns > most:
        ratio = math.sqrt(most / (least_rows * least_columns))
        longest = vision.budget or least_rows * least_columns
        rows, columns = math.floor(least_rows * ratio), math.floor(least_columns * ratio)
        return max(1, min(rows, longest)), max(1, min(columns, longest))
    rows = max(math.floor(math.sqrt(most * inner_height / inner_width)), least_rows)
    columns = max(math.floor(math.sqrt(most * inner_width / inner_height)), least_columns)
    if rows * columns > most:
        if columns > rows:
            columns = most // rows
        else:
            rows = most // columns
    return max(1, rows), max(1, columns)


def device_makes_crops(width: int, height: int, vision: VisionConfig, device_pixels: int) -> bool:
    """Whether the device makes the crops: of images of up to ``device_pixels``, for sizes with exact results."""
    rows, columns = select_tiling(width, height, vision)
    to_width = vision.crop_window * (columns - 1) + vision.crop_size
    to_height = vision.crop_window * (rows - 1) + vision.crop_size
    return width * height <= device_pixels and is_exact(width, height, to_width, to_height)


def stored_shape(
    width: int, height: int, vision: VisionConfig, device_pixels: int
) -> tuple[int, ...]:
    """Returns the shape of what ``cut_crops`` makes: the pixels if the device makes the crops, else the crops."""
    if device_makes_crops(width, height, vision, device_pixels):
        return height, width, 3
    rows, columns = select_tiling(width, height, vision)
    return 1 + rows * columns, vision.crop_size, vision.crop_size, 3


def region_of(image: DecodedImage, key: str, region: ImageRegion) -> DecodedImage:
    """Returns a part of a finished image as an image. Its key follows from the image's ``key`` and its place."""
    bottom, right = region.top + region.height, region.left + region.width
    pixels = np.ascontiguousarray(image.pixels[region.top : bottom, region.left : right])
    identity = (key.encode(), repr(region).encode())
    return DecodedImage(pixels, identity=identity)


def mirrored(image: DecodedImage, key: str) -> DecodedImage:
    """Returns a finished image with left and right exchanged. Its key follows from the image's ``key``."""
    pixels = np.ascontiguousarray(image.pixels[:, ::-1])
    return DecodedImage(pixels, identity=(key.encode(), b"mirrored"))


def cut_crops(
    image: DecodedImage,
    vision: VisionConfig,
    *,
    run: Run | None = None,
    allocate: Allocate = new_bytes,
    device_pixels: int = 0,
    in_place: bool = False,
) -> PreparedImage:
    """Decodes, tiles and resizes an image. The crops equal those of the reference, byte for byte. Blocks.

    The key is made from the encoded bytes, or from the pixels of an image that was not encoded, and from the geometry
    and PREPROCESS_VERSION. Resizing is libvips' ``resize`` of the whole image with its default kernels (bicubic to
    enlarge, Lanczos 3 to shrink). Raises the errors of ``image.decode``.

    ``run``: calls the pieces of work: decoding, the key, and bands of rows; None calls them in this thread, which takes
    the least processor time. ``allocate``: allocates the memory of crops or pixels. ``device_pixels``: as in
    ``device_makes_crops``; if the device makes the crops, the result holds the pixels instead. ``in_place``: whether
    the image's own pixels are in memory of ``allocate``, so that the result holds these.
    """
    side, window = vision.crop_size, vision.crop_window
    rows, columns = select_tiling(image.width, image.height, vision)
    key: list[str] = []
    pieces: list[Piece] = [image.decode, lambda: key.append(content_key(image, vision))]
    if device_makes_crops(image.width, image.height, vision, device_pixels):
        pixels = image.pixels
        if not in_place:
            pixels = allocate(image.pixels.shape)
            pieces.append(lambda: _copy(image, pixels))
        (run or _one_by_one)(pieces)
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
        # The only tile is the whole image, like the global crop.
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
    """Copies the image's pixels to ``pixels`` while they are decoded."""
    for top in range(0, image.height, ROWS_AT_ONCE):
        part = image.pixels[top : top + ROWS_AT_ONCE]
        image.wait_for(top + len(part))
        pixels[top : top + len(part)] = part


class _Resized:
    """An image that is resized to a grid of tiles. Pixels are computed only when they are written. ``tiles``: the
    output, [rows, columns, side, side, 3] uint8. Neighbouring tiles begin ``window`` pixels apart in both directions.
    The aspect ratio is not kept."""

    def __init__(self, source: DecodedImage, tiles: np.ndarray, window: int) -> None:
        rows, columns, side, _, _ = tiles.shape
        self._source, self._tiles, self._window = source, tiles, window
        self._width, self._height = window * (columns - 1) + side, window * (rows - 1) + side
        self._image: pyvips.Image | None = None
        self._lock = threading.Lock()

    def write_all(self) -> None:
        self._write(0, self._height)

    def bands(self) -> list[tuple[int, Piece]]:
        """Returns pieces that together write all tiles, each with the number of rows of the image that it waits for."""
        found: list[tuple[int, Piece]] = []
        for top in range(0, self._height, BAND_ROWS):
            bottom = min(top + BAND_ROWS, self._height)
            found.append((self._rows_needed(bottom), partial(self._write, top, bottom)))
        return found

    def _rows_needed(self, bottom: int) -> int:
        """Returns a number of the image's rows that libvips may read to compute the result above ``bottom``. Lanczos 3
        reads 3.5 rows of the result ahead, after a shrink by a whole number. Bicubic reads at most 4 more.
        """
        height = self._source.height
        step: float = height / self._height
        return min(height, math.ceil(bottom * step + 8 * max(1.0, step)) + 8)

    def _pipeline(self) -> pyvips.Image:
        """Returns libvips' resizing, which computes on demand. The first piece builds it, in half a millisecond."""
        with self._lock:
            if self._image is None:
                h, w, bands = self._source.pixels.shape
                image = pyvips.Image.new_from_memory(self._source.pixels.data, w, h, bands, "uchar")
                image = image.resize(self._width / w, vscale=self._height / h)
                assert (image.width, image.height) == (self._width, self._height), (w, h, image)
                self._image = image
            return self._image

    def _write(self, top: int, bottom: int) -> None:
        """Computes rows ``top`` to ``bottom`` once, and writes them to all tiles to which they belong."""
        # A region computes in the calling thread. libvips' writers would start threads.
        region = pyvips.Region.new(self._pipeline())
        self._source.wait_for(self._rows_needed(bottom))
        for y in range(top, bottom, STRIP_ROWS):
            rows = min(STRIP_ROWS, bottom - y)
            self._spread(np.frombuffer(region.fetch(0, y, self._width, rows), np.uint8), y, rows)

    def _spread(self, strip: np.ndarray, top: int, rows: int) -> None:
        """Copies the bytes of ``rows`` rows from ``top`` on to all tiles to which they belong."""
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


def content_key(image: DecodedImage, vision: VisionConfig) -> str:
    """Returns 32 hexadecimal digits: 128 bits of SHA-256, the fastest hash on processors with instructions for it.
    Images of one key have the same crops: a budget that changes the tiling changes the key."""
    geometry: tuple[object, ...]
    geometry = (vision.crop_size, vision.enc_patch_size, vision.overlap_margin, vision.max_crops)
    tiling = select_tiling(image.width, image.height, vision)
    if tiling != select_tiling(image.width, image.height, vision.within(0)):
        geometry = (*geometry, tiling)
    pixels = image.pixels
    lengths = None if image.identity is None else tuple(map(len, image.identity))
    header = (PREPROCESS_VERSION, geometry, pixels.shape, lengths)
    digest = hashlib.sha256(repr(header).encode())
    if image.identity is not None:
        for part in image.identity:
            digest.update(part)
        return digest.hexdigest()[:KEY_LENGTH]
    for top in range(0, image.height, ROWS_AT_ONCE):
        rows = pixels[top : top + ROWS_AT_ONCE]
        image.wait_for(top + len(rows))
        digest.update(rows.data)
    return digest.hexdigest()[:KEY_LENGTH]
