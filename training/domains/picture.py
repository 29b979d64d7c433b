"""What a domain makes: a picture, what may be asked about it with typed answers, and marks for the helper head.

A domain is a function (rng, width, height, held) -> Picture. ``held`` asks for the fonts, icon sets and values that
training never uses. All coordinates are pixels of the picture. training/mixture.py lists the domains.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Box = tuple[float, float, float, float]
Point = tuple[float, float]

NOT_SHOWN = "The picture does not show that."
SAME_COLUMN = 0.012  # of the width; less than any two centres of kestrel-tiny's scenes differ by


@dataclass(frozen=True)
class Ask:
    """One request and the right result.

    skill: query, reasoning, detect, point, segment or caption; kind: the row of the figures; text: question, object or
    length; answer: of query, reasoning and caption; steps: of reasoning, words with points; boxes: of detect and point,
    in the order of the answer; points: of point; path: of segment, tokens in the 960-unit box of boxes[0]; refs:
    spatial references; spelled: the answer is learnt character by character; outlines: polygons [n, 2] by which points
    and segments are judged, else the boxes and the path.
    """

    skill: str
    kind: str
    text: str
    answer: str = ""
    boxes: tuple[Box, ...] = ()
    points: tuple[Point, ...] = ()
    steps: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    path: tuple[str, ...] = ()
    refs: tuple[tuple[float, ...], ...] = ()
    spelled: bool = False
    outlines: tuple[NDArray[np.float64], ...] = ()


@dataclass(frozen=True)
class Mark:
    """An object for the helper head: its box, its class, perhaps its colour (a name), and what it stands for.

    told: as many characters as a cell has places; a space is not learnt.
    """

    box: Box
    label: str
    colour: str = ""
    told: str = ""


@dataclass
class Picture:
    """pixels [H, W, 3]; characters: (x, y, character) by their centres, in reading order.

    complete: marks and characters are all that there are, so the rest of the picture is empty.
    """

    pixels: Pixels
    asks: list[Ask] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    characters: list[tuple[float, float, str]] = field(default_factory=list)
    complete: bool = True
    domain: str = "shapes"


Domain = Callable[[random.Random, int, int, bool], Picture]


def centre(box: Box) -> Point:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def view_scale(width: int, height: int) -> float:
    """Pixels of the model's view for a pixel of the picture: a crop has 640 a side, and large pictures are tiled.

    Tiles show more, but all of a picture has as many positions as one crop.
    """
    long = max(width, height)
    return 640 / long if min(width, height) <= 640 else min(0.8, 900 / long)


def find(skill: str, kind: str, text: str, boxes: Iterable[Box]) -> Ask:
    """A request to detect these boxes, or to point at their centres."""
    boxes = tuple(boxes)
    points = tuple(map(centre, boxes)) if skill == "point" else ()
    return Ask(skill, kind, text, boxes=boxes, points=points)


def in_order(
    things: Sequence[Any], width: float, at: Callable[[Any], Point], same: float = SAME_COLUMN
) -> list[Any]:
    """From left to right, and from top to bottom where the places are nearly one above the other.

    So also equal shapes in aligned columns have one order. same: the width of a column, a share of ``width``.
    """
    columns: list[list[Any]] = []
    for thing in sorted(things, key=lambda thing: at(thing)[0]):
        if not columns or at(thing)[0] - at(columns[-1][0])[0] >= same * width:
            columns.append([])
        columns[-1].append(thing)
    return [t for column in columns for t in sorted(column, key=lambda thing: at(thing)[1])]


def in_clear_order(
    things: Sequence[Any], width: float, at: Callable[[Any], Point]
) -> list[Any] | None:
    """As in_order; None if two places are neither nearly one above the other nor well apart."""
    narrow, wide = (in_order(things, width, at, SAME_COLUMN * times) for times in (0.6, 1.5))
    return narrow if narrow == wide else None


def as_numpy(rng: random.Random) -> np.random.Generator:
    """A numpy generator that depends on the state of ``rng``."""
    return np.random.Generator(np.random.SFC64(rng.getrandbits(63)))
