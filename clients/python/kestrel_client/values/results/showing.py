"""Shows marks on an image, and in a notebook. Imports Pillow only then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...drawing.marks import Marks
from ...errors import InvalidImageError, KestrelError
from ...images.image_forms import ImageInput

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


class Drawable:
    """What can be drawn on the image of its call, ``source``."""

    __slots__ = ()
    source: ImageInput | None

    @property
    def marks(self) -> Marks:
        """The marks that ``draw()`` draws."""
        return Marks()

    def draw(self, image: ImageInput | None = None) -> PIL.Image.Image:
        """Returns the image with the result drawn on it, as a new Pillow image. Texts are written below the image.

        ``image``: the image to draw on; default: the image that was sent. Raises MissingDependencyError without Pillow,
        and InvalidImageError if there is no image or Pillow can't read it.
        """
        return draw_marks(self.marks, image, self.source)

    def save(self, path: str | os.PathLike[str], image: ImageInput | None = None) -> None:
        """Writes ``draw(image)`` to a file. The file extension determines the format."""
        self.draw(image).save(path)

    def _repr_png_(self) -> bytes | None:
        """A notebook shows this. It shows text if there is nothing to draw, no image, or no Pillow."""
        if self.marks == Marks() or self.source is None:
            return None
        try:
            from ...drawing import paint

            return paint.png(self.draw(), _NOTEBOOK_PIXELS)
        except KestrelError:
            return None
