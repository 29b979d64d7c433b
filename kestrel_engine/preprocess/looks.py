"""Regions, tiles and budgets: what a request looks at in an image. Owns their limits, and how regions and tiles lie."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import InvalidRequest
from ..types.requests import Edges, ImageRegion, is_number

REGION = ("image", "region")
"""The request's field that errors of a region name."""

MAX_CROPS = ("image", "max_crops")
"""The request's field that errors of an image's budget name."""

MIN_SIDE = 8
"""Least width and height of a look, in pixels of the image."""

MAX_TILES = 16

MAX_OVERLAP = 0.5

_SNAP_PX = 0.01
"""An edge that is so close to a pixel's edge means that edge: a fraction in float32 is inexact."""


@dataclass(frozen=True, slots=True, eq=False)
class InRegion:
    """A part of an image, in place of the image. Results and spatial references have coordinates of the whole image.
    ``source``: the image, in any form, or Mirrored. ``box``: x_min, y_min, x_max, y_max as fractions of the image.
    """

    source: Any
    box: Edges


@dataclass(frozen=True, slots=True, eq=False)
class Mirrored:
    """An image with left and right exchanged, in place of the image. ``source``: the image, in any form."""

    source: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How an image is cut into overlapping tiles of one size. Raises InvalidRequest for values beyond the limits.
    ``rows`` times ``columns`` is 2 to MAX_TILES. ``overlap``: the part of a tile's width and height that it shares with
    its neighbour, in [0, MAX_OVERLAP]. ``whole_image``: whether the request also looks at the whole image, which finds
    the objects that are larger than a tile."""

    rows: int
    columns: int
    overlap: float = 0.2
    whole_image: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequest(("tiles", name), f"{value!r} is not a whole number from 1 up")
        count = self.rows * self.columns
        if not 2 <= count <= MAX_TILES:
            raise InvalidRequest(
                "tiles", f"{self.rows} x {self.columns} are {count} tiles; must be 2 to {MAX_TILES}"
            )
        if not is_number(self.overlap) or not 0 <= self.overlap <= MAX_OVERLAP:
            raise InvalidRequest(
                ("tiles", "overlap"), f"{self.overlap!r} is not a number in [0, {MAX_OVERLAP}]"
            )
        if not isinstance(self.whole_image, bool):
            raise InvalidRequest(
                ("tiles", "whole_image"), f"{self.whole_image!r} is not true or false"
            )

    @property
    def num_looks(self) -> int:
        return self.rows * self.columns + self.whole_image


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """An image that a request looks at tile by tile. ``source``: the image, in any form, an InRegion or InCrops."""

    source: Any
    tiles: Tiles


@dataclass(frozen=True, slots=True, eq=False)
class InCrops:
    """An image that the model sees in at most ``max_crops`` tiles beside the overview, in place of the image.
    ``source``: the image, in any form, or an InRegion. The limit may not exceed the model's own. 1: overview alone.
    """

    source: Any
    max_crops: int


class Selection(NamedTuple):
    """The parts of an image to prepare: ``tiles`` of ``box``; None stands for one part, or for the whole image.
    ``max_crops``: as in InCrops, for each part. ``mirrored``: of the image with left and right exchanged."""

    box: Edges | None
    tiles: Tiles | None
    max_crops: int = 0
    mirrored: bool = False

    @property
    def is_one_whole(self) -> bool:
        """Whether the only part is the whole image as it is."""
        return self.box is None and self.tiles is None and not self.mirrored


WHOLE = Selection(None, None)


def selection_of(source: Any, most_crops: int, budget: int = 0) -> tuple[Any, Selection]:
    """Returns the image as it was given, and which parts of it to prepare. ``most_crops``: the model's own limit.
    ``budget``: the ``max_crops`` of an image that has none; 0: the model's own. Raises InvalidRequest."""
    tiles: Tiles | None = None
    box: Edges | None = None
    max_crops: int | None = None
    if isinstance(source, Tiled):
        source, tiles = source.source, source.tiles
    while isinstance(source, (InRegion, InCrops)):
        if isinstance(source, InRegion) and box is None:
            box = checked_box(source.box)
        elif isinstance(source, InCrops) and max_crops is None:
            max_crops = checked_max_crops(source.max_crops, most_crops)
        else:
            break
        source = source.source
    mirrored = isinstance(source, Mirrored)
    if isinstance(source, Mirrored):
        source = source.source
    if isinstance(source, (Tiled, InRegion, InCrops, Mirrored)):
        field = MAX_CROPS if isinstance(source, InCrops) else REGION
        raise InvalidRequest(field, "is set twice, or beside tiles of its own; set it once")
    return source, Selection(box, tiles, max_crops or budget, mirrored)


def selection_values(selection: Selection) -> Any:
    """The selection as JSON values, for ``read_selection``."""
    box, tiles, *others = selection
    return [box, None if tiles is None else asdict(tiles), *others]


def read_selection(values: Any) -> Selection:
    box, tiles, *others = values
    return Selection(
        None if box is None else checked_box(box),
        None if tiles is None else Tiles(**tiles),
        *others,
    )


def look_size(look: ImageRegion | None, width: int, height: int) -> tuple[int, int]:
    """Width and height in pixels of a look at an image of ``width`` x ``height``."""
    return (width, height) if look is None else (look.width, look.height)


def checked_box(box: Any) -> Edges:
    """Raises InvalidRequest unless ``box`` has four fractions of an image and is not empty."""
    box = tuple(box) if isinstance(box, (list, tuple)) else ()
    if len(box) != 4:
        raise InvalidRequest(REGION, "must have x_min, y_min, x_max and y_max, numbers in [0, 1]")
    for name, value in zip(("x_min", "y_min", "x_max", "y_max"), box, strict=True):
        if not is_number(value) or not 0 <= value <= 1:
            raise InvalidRequest(REGION, f"{name} {value!r} is not a number in [0, 1]")
    if box[0] >= box[2] or box[1] >= box[3]:
        raise InvalidRequest(REGION, f"needs x_min < x_max and y_min < y_max, got {list(box)}")
    return float(box[0]), float(box[1]), float(box[2]), float(box[3])


def checked_max_crops(value: Any, most: int) -> int:
    """Raises InvalidRequest unless ``value`` is a whole number from 1 to ``most``, the model's own limit."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidRequest(
            MAX_CROPS,
            f"is {value!r}; must be from 1 to {most}, the model's own limit",
            value=value if is_number(value) else None,
            limit=most,
        )
    return value


def regions(width: int, height: int, selection: Selection) -> list[ImageRegion | None]:
    """Returns the looks at an image of ``width`` x ``height`` pixels: the whole ``selection.box`` first, if it is among
    them, then its tiles row by row. None is the whole image. Raises InvalidRequest for looks that are too small."""
    box, tiles = selection.box, selection.tiles
    x0, x1 = _snapped(box[0], box[2], width) if box is not None else (0, width)
    y0, y1 = _snapped(box[1], box[3], height) if box is not None else (0, height)
    if box is not None and (x1 - x0 < MIN_SIDE or y1 - y0 < MIN_SIDE):
        raise InvalidRequest(
            REGION,
            f"covers {x1 - x0}x{y1 - y0} of the image's {width}x{height} pixels; the least is {MIN_SIDE}x{MIN_SIDE}",
        )
    is_whole = (x1 - x0, y1 - y0) == (width, height)
    first = None if is_whole else ImageRegion(x0, y0, x1 - x0, y1 - y0, width, height)
    if tiles is None:
        return [first]
    found: list[ImageRegion | None] = [first] if tiles.whole_image else []
    columns = _cuts(x0, x1, tiles.columns, tiles.overlap)
    for top, bottom in _cuts(y0, y1, tiles.rows, tiles.overlap):
        for left, right in columns:
            if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
                raise InvalidRequest(
                    "tiles",
                    f"have {right - left}x{bottom - top} pixels of an image of {width}x{height}; the least is "
                    f"{MIN_SIDE}x{MIN_SIDE}: ask for fewer",
                )
            found.append(ImageRegion(left, top, right - left, bottom - top, width, height))
    return found


def _snapped(low: float, high: float, length: int) -> tuple[int, int]:
    """The pixels from the one that ``low`` touches to the one that ``high`` touches."""
    first = max(0, math.floor(low * length + _SNAP_PX))
    last = min(length, math.ceil(high * length - _SNAP_PX))
    return first, max(first, last)


def _cuts(low: int, high: int, count: int, overlap: float) -> list[tuple[int, int]]:
    """``count`` pieces of one length that cover ``low`` to ``high``; neighbours share ``overlap`` of the length."""
    step = 1 - overlap
    length = (high - low) / (1 + (count - 1) * step)
    firsts = [low + length * step * index for index in range(count)]
    return [
        (math.floor(first + _SNAP_PX), min(high, math.ceil(first + length - _SNAP_PX)))
        for first in firsts
    ]
