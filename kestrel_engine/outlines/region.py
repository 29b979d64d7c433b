"""Region: the part of an image that the refiner looks at, and its pixels as one square crop.

The pixels come from what a prepared image holds: its own pixels where the device makes the crops, else the tiles, which
together are the whole image, resized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..types.model_config import VisionConfig
from ..types.requests import Edges, PreparedImage

GROWTH = 0.25
"""A region exceeds its box by this share of the box's width and height on each side (moondream.md section 9.5)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Edges of the region as fractions of the image, all in 0..1; it is not empty."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

    @classmethod
    def around(cls, box: Edges) -> Region | None:
        """Returns the region around ``box``; None for a box without area."""
        x_min, y_min, x_max, y_max = box
        width, height = x_max - x_min, y_max - y_min
        if width <= 0 or height <= 0:
            return None
        return cls(
            max(0.0, x_min - GROWTH * width),
            max(0.0, y_min - GROWTH * height),
            min(1.0, x_max + GROWTH * width),
            min(1.0, y_max + GROWTH * height),
        )

    @property
    def width(self) -> float:
        return self.x_max - self.x_min

    @property
    def height(self) -> float:
        return self.y_max - self.y_min


def crop(image: PreparedImage, region: Region, vision: VisionConfig) -> np.ndarray:
    """Returns [crop_size, crop_size, 3] uint8: ``region`` of ``image``, stretched bilinearly to a square."""
    source = _Source(image, vision)
    side = vision.crop_size
    steps = (np.arange(side) + 0.5) / side
    x0, x1, fx = _neighbours(
        (region.x_min + steps * region.width) * source.width - source.shift, source.width
    )
    y0, y1, fy = _neighbours(
        (region.y_min + steps * region.height) * source.height - source.shift, source.height
    )
    fx, fy = fx[None, :, None], fy[:, None, None]
    above = source.read(y0, x0) * (1 - fx) + source.read(y0, x1) * fx
    below = source.read(y1, x0) * (1 - fx) + source.read(y1, x1) * fx
    blended: np.ndarray = np.rint(above * (1 - fy) + below * fy).astype(np.uint8)
    return blended


def _neighbours(at: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the indices of the two pixels around each position, and the second one's weight in float32."""
    at = np.clip(at, 0, length - 1)
    first = np.floor(at).astype(np.intp)
    return first, np.minimum(first + 1, length - 1), (at - first).astype(np.float32)


class _Source:
    """The whole image as one array of pixels, ``width`` x ``height``, which need not exist as such.

    ``shift``: the index of a pixel is its centre's position less this.
    """

    def __init__(self, image: PreparedImage, vision: VisionConfig) -> None:
        self._pixels, self._crops = image.pixels, image.crops
        self._rows, self._columns = image.tiling
        self._window = vision.crop_window
        if self._pixels is not None:
            self.height, self.width = self._pixels.shape[:2]
            self.shift = 0.5
            return
        self.width = self._window * (self._columns - 1) + vision.crop_size
        self.height = self._window * (self._rows - 1) + vision.crop_size
        # libvips moves what it enlarges by half a pixel of the result, along both axes (exact_resize.py).
        enlarged = self.width > image.width or self.height > image.height
        self.shift = 0.0 if enlarged else 0.5

    def read(self, ys: np.ndarray, xs: np.ndarray) -> np.ndarray:
        """Returns the pixels [len(ys), len(xs), 3] uint8 of these rows and columns."""
        rows, columns = ys[:, None], xs[None, :]
        pixels: np.ndarray
        if self._pixels is not None:
            pixels = self._pixels[rows, columns]
            return pixels
        assert self._crops is not None
        if (self._rows, self._columns) == (1, 1):
            pixels = self._crops[0][rows, columns]
            return pixels
        i = np.minimum(rows // self._window, self._rows - 1)
        j = np.minimum(columns // self._window, self._columns - 1)
        tiles = 1 + i * self._columns + j
        pixels = self._crops[tiles, rows - i * self._window, columns - j * self._window]
        return pixels
