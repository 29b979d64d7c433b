"""A decoded picture to the model's crops: tiling, resizing, content key. Owns the geometry of moondream.md section 4.

Knows no file format and no tensor; normalising to floats is the runtime's.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pyvips

from ..model_config import VisionConfig
from ..requests import PreparedImage
from .images import DecodedImage

PREPROCESS_VERSION = 1
"""Part of every key: raise it whenever equal pixels may give other crops than before."""


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


def prepare(image: DecodedImage, vision: VisionConfig, *, threads: int = 1) -> PreparedImage:
    """Tiles and resizes; the crops equal the reference's byte for byte. Blocks: call it in a worker thread.

    ``threads``: of libvips, at most, for this picture; any number gives the same crops. The key depends on pixels,
    size, geometry and PREPROCESS_VERSION only, so the same pixels have one key in whatever format they came. Resizing
    is libvips' ``resize`` with its default kernels on the whole picture (bicubic to enlarge, Lanczos 3 to shrink).
    """
    side, window = vision.crop_size, _window(vision)
    rows, columns = select_tiling(image.width, image.height, vision)
    crops = np.empty((1 + rows * columns, side, side, 3), np.uint8)
    crops[0] = _resize(image.pixels, side, side, threads)
    if (rows, columns) == (1, 1):
        crops[1] = crops[0]
    else:
        margins = _margins(vision)
        whole = _resize(image.pixels, columns * window + margins, rows * window + margins, threads)
        for index in range(rows * columns):
            top, left = window * (index // columns), window * (index % columns)
            crops[1 + index] = whole[top : top + side, left : left + side]
    return PreparedImage(
        key=_content_key(image.pixels, vision),
        crops=crops,
        tiling=(rows, columns),
        width=image.width,
        height=image.height,
    )


def _margins(vision: VisionConfig) -> int:
    """Overlap on both sides of a crop together, pixels."""
    return 2 * vision.overlap_margin * vision.enc_patch_size


def _window(vision: VisionConfig) -> int:
    """Distance from one crop to the next, pixels."""
    return vision.crop_size - _margins(vision)


def _resize(pixels: np.ndarray, width: int, height: int, threads: int) -> np.ndarray:
    """[h, w, 3] uint8 to [height, width, 3] uint8; the aspect ratio is not kept."""
    h, w, bands = pixels.shape
    image = pyvips.Image.new_from_memory(pixels.data, w, h, bands, "uchar")
    image = image.resize(width / w, vscale=height / h)
    assert (image.width, image.height) == (width, height), (pixels.shape, width, height)
    if threads > 1:
        # libvips' own hint, of this image alone. Tiles are cut the same, so their pixels are, too.
        image = image.copy()
        image.set_type(pyvips.GValue.gint_type, "concurrency", threads)
    return np.frombuffer(image.write_to_memory(), np.uint8).reshape(height, width, bands)


def _content_key(pixels: np.ndarray, vision: VisionConfig) -> str:
    """32 hexadecimal digits (128 bits of SHA-256, the fastest here by the processor's own instructions)."""
    geometry = (vision.crop_size, vision.enc_patch_size, vision.overlap_margin, vision.max_crops)
    digest = hashlib.sha256(repr((PREPROCESS_VERSION, geometry, pixels.shape)).encode())
    digest.update(pixels.data)
    return digest.hexdigest()[:32]
