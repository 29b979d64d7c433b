"""Points and boxes in coordinates of the upright image, and their conversion to pixels.

(0, 0) is the upper left corner, (1, 1) the lower right one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ._pb.kestrel.v1 import common_pb2, vision_service_pb2
from .errors import InvalidRequestError


class ImageSize(NamedTuple):
    """Width and height in pixels; equal to a plain pair, and to Pillow's ``Image.size``."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the image. Both coordinates are in [0, 1]."""

    x: float
    y: float

    def to_pixels(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns column and row of the pixel at the point, in an image of ``size`` (width, height)."""
        width, height = size
        return (
            min(max(math.floor(self.x * width), 0), width - 1),
            min(max(math.floor(self.y * height), 0), height - 1),
        )


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the image, parallel to its edges. All coordinates are in [0, 1]."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

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


@dataclass(frozen=True, slots=True)
class DetectedPoint(Point):
    """The centre of an object."""

    label: str
    """The object's name, as in the call."""
    score: float
    """How sure the model is of the object, in [0, 1]."""

    def __repr__(self) -> str:
        return (
            f"DetectedPoint(x={self.x}, y={self.y}, label={self.label!r}, score={self.score:.3f})"
        )


@dataclass(frozen=True, slots=True)
class DetectedBox(Box):
    """The bounding box of an object."""

    label: str
    """The object's name, as in the call."""
    score: float
    """How sure the model is of the object, in [0, 1]."""

    def __repr__(self) -> str:
        corners = f"x_min={self.x_min}, y_min={self.y_min}, x_max={self.x_max}, y_max={self.y_max}"
        return f"DetectedBox({corners}, label={self.label!r}, score={self.score:.3f})"


SpatialRef: TypeAlias = Point | Box | Sequence[float]
"""A point or a box, or its 2 or 4 numbers in order."""


PointInput: TypeAlias = Point | Sequence[float]
"""A point, or x and y."""
BoxInput: TypeAlias = Box | Sequence[float]
"""A box, or x_min, y_min, x_max and y_max."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How ``point`` and ``detect`` cut an image into overlapping tiles: 2 to 16 of them.

    ``overlap``: the part of a tile that it shares with its neighbour, in [0, 0.5]; default: the server's, 0.2.
    ``tiles_only``: leaves out the look at the whole image.
    """

    rows: int
    columns: int
    overlap: float | None = None
    tiles_only: bool = False


TilesInput: TypeAlias = Tiles | str | tuple[int, int]
"""Tiles, or rows and columns only: "2x3" or (2, 3)."""

_ROWS_BY_COLUMNS = re.compile(r"(\d{1,4})x(\d{1,4})", re.ASCII)


def to_tiles(tiles: TilesInput | None) -> vision_service_pb2.Tiles | None:
    """Raises InvalidRequestError. The server checks the ranges."""
    if tiles is None:
        return None
    if isinstance(tiles, str) and (match := _ROWS_BY_COLUMNS.fullmatch(tiles)):
        tiles = Tiles(int(match[1]), int(match[2]))
    elif isinstance(tiles, tuple) and len(tiles) == 2:
        tiles = Tiles(*tiles)
    if not isinstance(tiles, Tiles):
        raise InvalidRequestError(
            f"tiles: {tiles!r} is not like '2x3' (rows x columns), (2, 3) or Tiles(2, 3)"
        )
    try:
        return vision_service_pb2.Tiles(
            rows=tiles.rows,
            columns=tiles.columns,
            overlap=tiles.overlap,
            tiles_only=tiles.tiles_only,
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"tiles: {error}") from error


def to_region(region: Box | Sequence[float]) -> common_pb2.Box:
    """Raises InvalidRequestError for a value that is no box. The server checks the range."""
    try:
        x_min, y_min, x_max, y_max = edges(region) if isinstance(region, Box) else region
        return common_pb2.Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"region: {region!r} is not a Box, nor x_min, y_min, x_max and y_max"
        ) from error


def to_points(name: str, points: PointInput | Sequence[PointInput]) -> list[common_pb2.Point]:
    """One point or several. Raises InvalidRequestError for other values. The server checks the ranges."""
    return [ref.point for ref in _only(name, points, "point")]


def to_boxes(name: str, boxes: BoxInput | Sequence[BoxInput]) -> list[common_pb2.Box]:
    """As ``to_points``."""
    return [ref.box for ref in _only(name, boxes, "box")]


def _only(name: str, given: Any, kind: str) -> list[common_pb2.SpatialRef]:
    one: object = given  # pyright would take `given` for a Point or a Box from here on.
    try:
        is_one = isinstance(one, (Point, Box)) or isinstance(given[0], (int, float))
    except (TypeError, LookupError):
        is_one = False
    try:
        refs = [_spatial_ref(i, ref, name) for i, ref in enumerate([given] if is_one else given)]
    except TypeError as error:
        raise InvalidRequestError(
            f"{name}: {given!r} is not a {kind}, nor a list of them"
        ) from error
    for index, ref in enumerate(refs):
        if not ref.HasField(kind):  # type: ignore[arg-type]
            raise InvalidRequestError(f"{name}[{index}]: is not a {kind}")
    return refs


def to_spatial_refs(refs: Iterable[SpatialRef]) -> list[common_pb2.SpatialRef]:
    """Raises InvalidRequestError for a value that is neither a point nor a box. The server checks the ranges."""
    return [_spatial_ref(i, ref) for i, ref in enumerate(refs)]


def _spatial_ref(index: int, ref: SpatialRef, name: str = "spatial_refs") -> common_pb2.SpatialRef:
    if isinstance(ref, Point):
        ref = (ref.x, ref.y)
    try:
        if isinstance(ref, Box) or len(ref) == 4:
            return common_pb2.SpatialRef(box=to_region(ref))
        if len(ref) == 2:
            return common_pb2.SpatialRef(point=common_pb2.Point(x=ref[0], y=ref[1]))
    except (TypeError, InvalidRequestError) as error:
        raise InvalidRequestError(f"{name}[{index}]: {error.__cause__ or error}") from error
    raise InvalidRequestError(
        f"{name}[{index}]: has {len(ref)} numbers, needs 2 (point) or 4 (box)"
    )


def edges(box: Box | common_pb2.Box) -> tuple[float, float, float, float]:
    return box.x_min, box.y_min, box.x_max, box.y_max


def from_point(message: common_pb2.Point) -> Point:
    return Point(message.x, message.y)


def from_box(message: common_pb2.Box) -> Box:
    return Box(*edges(message))


def from_detection(message: vision_service_pb2.Detection) -> DetectedPoint | DetectedBox:
    """The point of a detection, or its box."""
    if message.HasField("point"):
        return to_detected_point(message)
    return to_detected_box(message)


def to_detected_point(message: vision_service_pb2.Detection) -> DetectedPoint:
    return DetectedPoint(message.point.x, message.point.y, message.label, message.score)


def to_detected_box(message: vision_service_pb2.Detection) -> DetectedBox:
    return DetectedBox(*edges(message.box), message.label, message.score)


def read_size(message: common_pb2.ImageSize) -> ImageSize:
    return ImageSize(message.width, message.height)
