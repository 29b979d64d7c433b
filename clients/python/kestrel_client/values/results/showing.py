"""Shows marks on an image, and in a notebook. Imports Pillow only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...drawing.marks import Marks
from ...errors import InvalidImageError, KestrelError
from ...images.images import ImageInput

if TYPE_CHECKING:
    import PIL.Image

_NOTEBOOK_PIXELS = 800
"""Longer side of an image in a notebook, in pixels."""


def draw_marks(
    marks: Marks, image: ImageInput | None, source: ImageInput | None
) -> PIL.Image.Image:
    """Draws the marks on ``image``, or on ``source``. Raises InvalidImageError and MissingDependencyError."""
    from ...drawing import paint  # Needs Pillow, unlike sending.

    image = source if image is None else image
    if image is None:
        raise InvalidImageError("there is no image to draw on: pass one")
    return paint.draw(marks, image)


def notebook_png(marks: Marks, source: ImageInput | None) -> bytes | None:
    """None if there is nothing to draw, no image to draw on, or no Pillow."""
    if marks == Marks() or source is None:
        return None
    try:
        from ...drawing import paint

        return paint.png(draw_marks(marks, None, source), _NOTEBOOK_PIXELS)
    except KestrelError:
        return None
