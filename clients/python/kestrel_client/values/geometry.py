"""Points and boxes in coordinates of the upright image, and their conversion to pixels.

(0, 0) is the upper left corner, (1, 1) the lower right one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .._pb.kestrel.v1 import common_pb2, vision_service_pb2
from ..errors import InvalidRequestError


class ImageSize(NamedTuple):
    """Width and height in pixels; equal to a plain pair, and to Pillow's ``Image.size``."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the image. Both coordinates are in [0, 1].

    ``score``: in results of ``point``, how sure the model is of the object, in [0, 1]; None elsewhere.
    """

    x: float
    y: float
    score: float | None = None

    def __repr__(self) -> str:
        return f"Point(x={self.x}, y={self.y}{_shown(self.score)})"

    def to_pixels(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns column and row of the pixel at the point, in an image of ``size`` (width, height)."""
        width, height = size
        return (
            min(max(math.floor(self.x * width), 0), width - 1),
            min(max(math.floor(self.y * height), 0), height - 1),
        )


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the image, parallel to its edges. All coordinates are in [0, 1].

    ``score``: in results of ``detect`` and ``segment``, how sure the model is of the object, in [0, 1]; None elsewhere.
    """

    x_min: float
    y_min: float
    x_max: float
    y_max: float
    score: float | None = None

    def __repr__(self) -> str:
        edges = f"x_min={self.x_min}, y_min={self.y_min}, x_max={self.x_max}, y_max={self.y_max}"
        return f"Box({edges}{_shown(self.score)})"

    def to_pixels(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Returns left, upper, right and lower edge in an image of ``size`` (width, height), rounded to whole pixels.

        Right and lower edge lie behind the last pixel, as in Pillow's ``crop`` and in array slices.
        """
        width, height = size
        return (
            round(self.x_min * width),
            round(self.y_min * height),
            round(self.x_max * width),
            round(self.y_max * height),
        )

    @property
    def width(self) -> float:
        """A fraction of the image's width."""
        return self.x_max - self.x_min

    @property
    def height(self) -> float:
        """A fraction of the image's height."""
        return self.y_max - self.y_min

    @property
    def center(self) -> Point:
        return Point((self.x_min + self.x_max) / 2, (self.y_min + self.y_max) / 2)


SpatialRef: TypeAlias = Point | Box | Sequence[float]
"""A point or a box, or its 2 or 4 numbers in order."""


def to_spatial_refs(refs: Iterable[SpatialRef]) -> list[common_pb2.SpatialRef]:
    """Raises InvalidRequestError for a value that is neither a point nor a box. The server checks the ranges."""
    return [_spatial_ref(i, ref) for i, ref in enumerate(refs)]


def _spatial_ref(index: int, ref: SpatialRef) -> common_pb2.SpatialRef:
    if isinstance(ref, Point):
        numbers: Sequence[float] = (ref.x, ref.y)
    elif isinstance(ref, Box):
        numbers = (ref.x_min, ref.y_min, ref.x_max, ref.y_max)
    else:
        numbers = ref
    try:
        if len(numbers) == 2:
            x, y = numbers
            return common_pb2.SpatialRef(point=common_pb2.Point(x=x, y=y))
        if len(numbers) == 4:
            x_min, y_min, x_max, y_max = numbers
            box = common_pb2.Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max)
            return common_pb2.SpatialRef(box=box)
    except TypeError as error:
        raise InvalidRequestError(f"spatial_refs[{index}]: {error}") from error
    raise InvalidRequestError(
        f"spatial_refs[{index}]: has {len(numbers)} numbers, needs 2 (point) or 4 (box)"
    )


def from_point(message: common_pb2.Point) -> Point:
    return Point(message.x, message.y, read_score(message))


def from_box(message: common_pb2.Box) -> Box:
    edges = (message.x_min, message.y_min, message.x_max, message.y_max)
    return Box(*edges, read_score(message))


def read_score(
    message: common_pb2.Point | common_pb2.Box | vision_service_pb2.SegmentResponse,
) -> float | None:
    return message.score if message.HasField("score") else None


def _shown(score: float | None) -> str:
    return "" if score is None else f", score={score:.3f}"
