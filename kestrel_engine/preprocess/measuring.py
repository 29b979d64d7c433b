"""MeasuredImage: what an image takes of a model's context and tower, known from its header alone."""

from __future__ import annotations

from typing import NamedTuple

from ..config.image_limits import ImageLimits
from ..types.model_config import VisionConfig
from .crops import select_tiling
from .decoding.costs import PIXELS, check_size
from .looks import Selection, look_size, regions


class MeasuredImage(NamedTuple):
    """``size``: width and height in pixels of the whole upright image. ``crops``: that the tower reads, by look."""

    size: tuple[int, int]
    crops: tuple[int, ...]


def measured(
    size: tuple[int, int], selection: Selection, limits: ImageLimits, vision: VisionConfig
) -> MeasuredImage:
    """``size``: width and height in pixels. Raises InvalidRequest and ImageTooLargeError for a wrong ``selection``."""
    crops, vision = [], vision.within(selection.max_crops)
    for look in regions(*size, selection):
        shown = look_size(look, *size)
        check_size(*shown, limits, PIXELS)
        rows, columns = select_tiling(*shown, vision)
        crops.append(1 if rows == columns == 1 else 1 + rows * columns)
    return MeasuredImage(size, tuple(crops))
