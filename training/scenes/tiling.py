"""The engine's tiling rule: the crops for an image of a given size, by default with kestrel-tiny's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """How a model cuts images: sides of a patch and of a crop in pixels, overlap on each side in patches."""

    patch: int = 14
    crop: int = 252
    margin: int = 2
    max_crops: int = 6

    @property
    def grid(self) -> int:
        """Patches a side."""
        return self.crop // self.patch

    @property
    def window(self) -> int:
        """New pixels a tile."""
        return self.crop - self.overlap

    @property
    def overlap(self) -> int:
        return 2 * self.margin * self.patch

    @property
    def prefix(self) -> int:
        """Positions of BOS and the image."""
        return 1 + self.grid**2


TINY = Geometry()


def choose_tiling(width: int, height: int, geometry: Geometry = TINY) -> tuple[int, int]:
    """Rows and columns of local crops for an image of ``width`` x ``height`` pixels."""
    window, most = geometry.window, geometry.max_crops
    h, v = max(height - geometry.overlap, 1), max(width - geometry.overlap, 1)
    if h <= window or v <= window:
        return 1, 1
    a, b = math.ceil(h / window), math.ceil(v / window)
    if a * b > most:
        ratio = math.sqrt(most / (a * b))
        return max(1, math.floor(a * ratio)), max(1, math.floor(b * ratio))
    th = max(math.floor(math.sqrt(most * h / v)), a)
    tw = max(math.floor(math.sqrt(most * v / h)), b)
    if th * tw > most:
        if tw > th:
            tw = math.floor(most / th)
        else:
            th = math.floor(most / tw)
    return max(1, th), max(1, tw)


@dataclass(frozen=True)
class View:
    """The model's view of an image: its size, the tiling, and the stretched size that is cut into tiles."""

    width: int
    height: int
    rows: int
    columns: int
    geometry: Geometry = TINY

    @classmethod
    def of(cls, width: int, height: int, geometry: Geometry = TINY) -> View:
        return cls(width, height, *choose_tiling(width, height, geometry), geometry)

    @property
    def tiled_height(self) -> int:
        return self.rows * self.geometry.window + self.geometry.overlap

    @property
    def tiled_width(self) -> int:
        return self.columns * self.geometry.window + self.geometry.overlap

    @property
    def tiled_scale(self) -> tuple[float, float]:
        """Tiled pixels per image pixel, x and y."""
        return self.tiled_width / self.width, self.tiled_height / self.height

    @property
    def global_scale(self) -> tuple[float, float]:
        """Global-crop pixels per image pixel, x and y."""
        return self.geometry.crop / self.width, self.geometry.crop / self.height

    @property
    def crops(self) -> int:
        """Distinct crops to encode: with one tile the local crop is the global one."""
        tiles = self.rows * self.columns
        return 1 if tiles == 1 else 1 + tiles
