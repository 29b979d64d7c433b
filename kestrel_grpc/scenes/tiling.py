"""The engine's tiling rule with kestrel-tiny's numbers: the crops for an image of a given size."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATCH = 14
CROP = 252
GRID = CROP // PATCH  # 18 patches a side
MARGIN = 2  # overlap on each side, in patches
WINDOW = (GRID - 2 * MARGIN) * PATCH  # 196 new pixels a tile
OVERLAP = 2 * MARGIN * PATCH  # 56
MAX_CROPS = 6
PREFIX = 1 + GRID * GRID  # BOS and the image


def choose_tiling(width: int, height: int) -> tuple[int, int]:
    """Rows and columns of local crops for an image of ``width`` x ``height`` pixels."""
    h, v = max(height - OVERLAP, 1), max(width - OVERLAP, 1)
    if h <= WINDOW or v <= WINDOW:
        return 1, 1
    a, b = math.ceil(h / WINDOW), math.ceil(v / WINDOW)
    if a * b > MAX_CROPS:
        ratio = math.sqrt(MAX_CROPS / (a * b))
        return max(1, math.floor(a * ratio)), max(1, math.floor(b * ratio))
    th = max(math.floor(math.sqrt(MAX_CROPS * h / v)), a)
    tw = max(math.floor(math.sqrt(MAX_CROPS * v / h)), b)
    if th * tw > MAX_CROPS:
        if tw > th:
            tw = math.floor(MAX_CROPS / th)
        else:
            th = math.floor(MAX_CROPS / tw)
    return max(1, th), max(1, tw)


@dataclass(frozen=True)
class View:
    """The model's view of an image: its size, the tiling, and the stretched size that is cut into tiles."""

    width: int
    height: int
    rows: int
    columns: int

    @classmethod
    def of(cls, width: int, height: int) -> View:
        return cls(width, height, *choose_tiling(width, height))

    @property
    def tiled_height(self) -> int:
        return self.rows * WINDOW + OVERLAP

    @property
    def tiled_width(self) -> int:
        return self.columns * WINDOW + OVERLAP

    @property
    def tiled_scale(self) -> tuple[float, float]:
        """Tiled pixels per image pixel, x and y."""
        return self.tiled_width / self.width, self.tiled_height / self.height

    @property
    def global_scale(self) -> tuple[float, float]:
        """Global-crop pixels per image pixel, x and y."""
        return CROP / self.width, CROP / self.height

    @property
    def crops(self) -> int:
        """Distinct crops to encode: with one tile the local crop is the global one."""
        tiles = self.rows * self.columns
        return 1 if tiles == 1 else 1 + tiles
