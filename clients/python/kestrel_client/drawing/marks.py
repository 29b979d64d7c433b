"""The parts of a result that are drawn on an image, as plain values. This module needs no Pillow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    outlines: tuple[Outline, ...] = ()
    text: tuple[str, ...] = ()

    def __add__(self, other: Marks) -> Marks:
        """The marks of both."""
        return Marks(
            points=self.points + other.points,
            boxes=self.boxes + other.boxes,
            outlines=self.outlines + other.outlines,
            text=self.text + other.text,
        )


def labelled(found: Iterable[tuple[Box, str, float | None]]) -> tuple[tuple[Box, str], ...]:
    """Boxes with their label and score. The boxes of a label are numbered if there are several."""
    found = tuple(found)
    several = Counter(label for _, label, _ in found)
    seen: Counter[str] = Counter()
    named = []
    for box, label, score in found:
        seen[label] += 1
        number = f" {seen[label]}" if several[label] > 1 else ""
        named.append((box, f"{label}{number}" + ("" if score is None else f" ({score:.2f})")))
    return tuple(named)
