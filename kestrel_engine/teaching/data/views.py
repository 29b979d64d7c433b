"""Views: an image that is enlarged or reduced, moved and perhaps mirrored, with lessons that are still true of it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np

from ...types.requests import Coord, Size
from .lessons import Lesson

UNCHANGED = 1 / 3
"""The share of images that an epoch shows as they are, as a server does."""
STRETCH = 0.05
"""By so much a width and a height may differ from their common scale."""
BEYOND = 0.01
"""By so much of a view an object may reach beyond its edges."""


@dataclass(frozen=True, slots=True)
class View:
    """A window on an image, which replaces it, in its size. ``left``, ``top``, ``width``, ``height``: as fractions of
    the image, beyond which the window may reach; its edges continue there. ``is_mirrored``: left and right are
    exchanged."""

    left: float
    top: float
    width: float
    height: float
    is_mirrored: bool = False

    def of_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """The view of ``pixels`` [height, width, 3] uint8, in the same shape."""
        import pyvips

        height, width, _ = pixels.shape
        across, down = (
            math.ceil(max(0.0, side - 1) * extent) + 1
            for side, extent in ((self.width, width), (self.height, height))
        )
        image = pyvips.Image.new_from_array(np.ascontiguousarray(pixels)).embed(
            across, down, width + 2 * across, height + 2 * down, extend="copy"
        )
        # The offsets make the centres of pixels correspond.
        moved = image.affine(
            [1 / self.width, 0, 0, 1 / self.height],
            interpolate=pyvips.Interpolate.new("bilinear"),
            oarea=[0, 0, width, height],
            odx=-(self.left * width + across) / self.width - 0.5,
            ody=-(self.top * height + down) / self.height - 0.5,
            idx=0.5,
            idy=0.5,
        )
        if self.is_mirrored:
            moved = moved.fliphor()
        return np.asarray(moved.numpy())

    def of_lesson(self, lesson: Lesson) -> Lesson | None:
        """The lesson about the view; None if one of its objects is not wholly in the view."""
        places = [token.value for token in lesson.tokens if isinstance(token, Coord)]
        sizes = [(token.width, token.height) for token in lesson.tokens if isinstance(token, Size)]
        if not places:
            return lesson
        found = []
        for index, (x, y) in enumerate(zip(places[::2], places[1::2], strict=True)):
            width, height = sizes[index] if sizes else (0.0, 0.0)
            seen = self._of_object(x, y, width / self.width, height / self.height)
            if seen is None:
                return None
            found.append(seen)
        # The order from left to right changes in a mirror.
        found.sort()
        new = Lesson(lesson.tokens[: lesson.ends[0].at + 1], lesson.weight)
        for decision, (x, y, width, height) in zip(lesson.ends, found, strict=False):
            new.add_end(is_end=False, is_pair=decision.is_pair)
            new.tokens += (Coord(x), Coord(y), *([Size(width, height)] if sizes else []))
        new.add_end(is_end=True, is_pair=lesson.ends[-1].is_pair)
        return new

    def _of_object(
        self, x: float, y: float, width: float, height: float
    ) -> tuple[float, float, float, float] | None:
        x, y = (x - self.left) / self.width, (y - self.top) / self.height
        if self.is_mirrored:
            x = 1 - x
        edges = x - width / 2, y - height / 2, x + width / 2, y + height / 2
        if min(edges[:2]) < -BEYOND or max(edges[2:]) > 1 + BEYOND:
            return None
        return min(max(x, 0.0), 1.0), min(max(y, 0.0), 1.0), min(width, 1.0), min(height, 1.0)


@dataclass(slots=True)
class Views:
    """Draws views. ``vary``: by up to this share, a window is smaller or larger than its image. ``mirror``: half of
    these views are mirrored."""

    vary: float
    mirror: bool
    rng: random.Random = field(repr=False)

    def draw(self) -> View | None:
        """A view, or None for the image as it is."""
        if not self.vary or self.rng.random() < UNCHANGED:
            return None
        scale = self.rng.uniform(1 - self.vary, 1 + self.vary)
        width, height = (scale * self.rng.uniform(1 - STRETCH, 1 + STRETCH) for _ in range(2))
        left, top = (
            self.rng.uniform(min(0.0, 1 - side), max(0.0, 1 - side)) for side in (width, height)
        )
        return View(left, top, width, height, self.mirror and self.rng.random() < 0.5)
