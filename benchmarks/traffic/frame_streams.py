"""Frames of a camera or a screen, of which most crops repeat."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.types.model_config import VisionConfig

SIZES = ((640, 360), (640, 480), (1280, 720), (1920, 1080))


class FrameStream(NamedTuple):
    """What determines a stream. ``size``: width and height. ``unchanged``: the share of all crops that equal those of
    the frame before; None: every frame is new. ``changed_tiles``: the tiles that change in a frame that changes."""

    vision: VisionConfig
    size: tuple[int, int]
    count: int
    seed: int
    unchanged: float | None = None
    changed_tiles: int = 1

    @property
    def num_crops(self) -> int:
        return 1 + math.prod(select_tiling(*self.size, self.vision))

    def frames(self) -> list[np.ndarray]:
        """Returns the frames [height, width, 3] uint8. If few crops change, so do few frames: some equal the frame
        before. In each of the others some tiles have changed, and with them the overview."""
        numbers = np.random.default_rng([self.seed < 0, abs(self.seed)])
        width, height = self.size
        shape = height, width, 3
        now = numbers.integers(0, 255, shape, dtype=np.uint8)
        found, changes = [now], 0
        if self.unchanged is None:
            found += [numbers.integers(0, 255, shape, np.uint8) for _ in range(self.count - 1)]
            return found
        rows, columns = select_tiling(width, height, self.vision)
        boxes = self.vision.crop_boxes((rows, columns))[1:] or [(0.0, 0.0, 1.0, 1.0)]
        # One more crop than tiles changes: the overview.
        share = (1 - self.unchanged) * self.num_crops / (1 + self.changed_tiles)
        next_tile = 0
        while len(found) < self.count:
            if math.floor(len(found) * share) > changes:
                changes += 1
                now = now.copy()
                for _ in range(self.changed_tiles):
                    x_min, y_min, _, _ = boxes[next_tile % len(boxes)]
                    next_tile += 1
                    # A patch in the middle of the tile, which no other tile overlaps.
                    top = int(y_min * height) + height // rows // 2
                    left = int(x_min * width) + width // columns // 2
                    now[top : top + 12, left : left + 12] = numbers.integers(0, 255, 3)
            found.append(now)
        return found


def camera_size(vision: VisionConfig) -> tuple[int, int]:
    """Returns the first width and height, of those that cameras have, for which a frame has the most tiles."""
    return max(SIZES, key=lambda size: math.prod(select_tiling(*size, vision)))
