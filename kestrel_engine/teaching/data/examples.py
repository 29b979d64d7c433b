"""Examples: what a model should answer about an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ...types.requests import Edges

Point: TypeAlias = tuple[float, float]
"""x and y as fractions of the image."""


@dataclass(frozen=True, slots=True)
class QuestionExample:
    """A question and its answer. ``ids``: the tokens of the answer, if they are known."""

    question: str
    answer: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CaptionExample:
    """A description. ``length``: "short", "normal" or "long". ``ids``: its tokens."""

    length: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PointExample:
    """The points of all objects that a name means; none if there is no such object."""

    object: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class BoxExample:
    """The boxes of all objects that a name means; none if there is no such object."""

    object: str
    boxes: tuple[Edges, ...]


Example: TypeAlias = QuestionExample | CaptionExample | PointExample | BoxExample


@dataclass(frozen=True, slots=True)
class TaughtImage:
    """An image file and the examples about it."""

    path: Path
    examples: tuple[Example, ...]


def left_to_right(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points in the order in which they are taught: by x, then by y. One order is easier to learn than any."""
    return tuple(sorted(points))


def boxes_left_to_right(boxes: Sequence[Edges]) -> tuple[Edges, ...]:
    """As ``left_to_right``, by the centres of the boxes."""
    return tuple(sorted(boxes, key=lambda box: (box[0] + box[2], box[1] + box[3])))
