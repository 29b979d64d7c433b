"""What of a result is painted on an image, as plain values: no message, no Pillow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..values.geometry import Box, Point

MaskFormat: TypeAlias = Literal["none", "svg", "png", "rle"]


@dataclass(frozen=True, slots=True)
class Mask:
    """A drawn mask of the picture's size, in the encoding that was asked for."""

    format: MaskFormat
    width: int
    height: int
    svg: str = ""
    """For "svg": a document whose viewBox is the picture in pixels, the object white on nothing."""
    png: bytes = field(default=b"", repr=False)
    """For "png": a file of one channel, 255 inside and 0 outside."""
    rle: tuple[int, ...] = field(default=(), repr=False)
    """For "rle": run lengths as COCO counts them: column by column, outside first."""


@dataclass(frozen=True, slots=True)
class Outline:
    """SVG path data relative to ``box``, and the server's own mask if it sent one."""

    svg_path: str
    box: Box | None
    mask: Mask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """``boxes`` with a label each, ``text`` as lines below the image."""

    points: tuple[Point, ...] = ()
    boxes: tuple[tuple[Box, str], ...] = ()
    outline: Outline | None = None
    text: tuple[str, ...] = ()

    def __add__(self, other: Marks) -> Marks:
        """Both; the other's outline only if this has none."""
        return Marks(
            points=self.points + other.points,
            boxes=self.boxes + other.boxes,
            outline=self.outline or other.outline,
            text=self.text + other.text,
        )


def labelled(boxes: tuple[Box, ...], label: str) -> tuple[tuple[Box, str], ...]:
    """Boxes with their label, numbered if there are several."""
    several = len(boxes) > 1
    return tuple((box, f"{label} {i + 1}" if several else label) for i, box in enumerate(boxes))
