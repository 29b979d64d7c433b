"""The parts of a result that are drawn on an image, as plain values. This module needs no Pillow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..geometry import Box, Point

MaskFormat: TypeAlias = Literal["none", "svg", "png", "rle", "polygons"]


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of the image's size, in the requested encoding."""

    format: MaskFormat
    width: int
    height: int
    svg: str = ""
    """For "svg": a document whose viewBox is the image in pixels, with a white object on a transparent background."""
    png: bytes = field(default=b"", repr=False)
    """For "png": a file with one channel, 255 inside the object and 0 outside."""
    rle: tuple[int, ...] = field(default=(), repr=False)
    """For "rle": run lengths in COCO's order: column by column, the first run outside the object."""
    polygons: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    """For "polygons": x and y of each corner in turn, in pixels, for each polygon, as COCO has them."""


@dataclass(frozen=True, slots=True)
class Outline:
    """SVG path data relative to ``box``, and the server's mask if it sent one."""

    svg_path: str
    box: Box | None
    mask: Mask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks to draw: ``boxes`` have a label each; ``text`` is written below the image."""

    points: tuple[Point, ...] = ()
    boxes: tuple[tuple[Box, str], ...] = ()
    outline: Outline | None = None
    text: tuple[str, ...] = ()

    def __add__(self, other: Marks) -> Marks:
        """The marks of both. The outline of ``other`` is used only if this has none."""
        return Marks(
            points=self.points + other.points,
            boxes=self.boxes + other.boxes,
            outline=self.outline or other.outline,
            text=self.text + other.text,
        )


def labelled(boxes: tuple[Box, ...], label: str) -> tuple[tuple[Box, str], ...]:
    """Boxes with their label and score. They are numbered if there are several."""
    several = len(boxes) > 1
    names = (f"{label} {i + 1}" if several else label for i in range(len(boxes)))
    return tuple((box, _scored(name, box)) for box, name in zip(boxes, names, strict=True))


def _scored(name: str, box: Box) -> str:
    return name if box.score is None else f"{name} ({box.score:.2f})"
