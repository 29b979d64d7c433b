"""Packs lessons about images to the tensors of one pass.

A row is an image with several lessons behind it. A lesson sees the image and itself, never another lesson, so each has
the results that it would have alone, and the image is computed once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...models.moondream import Moondream
from ...models.region import coord_of_bin, size_of_bins
from ...types.requests import Coord, Size
from ..data.lessons import Lesson
from ..data.views import View

MOST_TEXT = 512
"""Positions of lessons in one row. A longer lesson has a row of its own."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """An image and the lessons about it that one row holds. ``view``: of the image; None shows it as it is."""

    path: Path
    lessons: tuple[Lesson, ...]
    view: View | None = None


def rows_of(path: Path, lessons: Iterable[Lesson], view: View | None = None) -> list[RowPlan]:
    """Distributes the lessons about an image over as few rows as their order allows."""
    rows: list[list[Lesson]] = []
    room = 0
    for lesson in lessons:
        if not rows or len(lesson) > room:
            rows.append([])
            room = MOST_TEXT
        rows[-1].append(lesson)
        room -= len(lesson)
    return [RowPlan(path, tuple(row), view) for row in rows]


@dataclass(frozen=True, slots=True)
class Targets:
    """What is to follow the hidden states at ``at`` [n], which index the flat text positions [rows * length].

    ``values``: ids [n] int64; 1 for the end and 0 for one more object [n] int64; or bins [n] or [n, 2] float32.
    ``weights``: [n] float32. ``pairs``: of decisions, [n] bool.
    """

    at: Tensor
    values: Tensor
    weights: Tensor
    pairs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a pass. ``text``: embeddings [rows, length, dim] of the lessons. ``positions``: [rows, length] int64.
    ``lessons``: [rows, length] int64, the number of the lesson in its row; -1 for padding."""

    text: Tensor
    positions: Tensor
    lessons: Tensor
    words: Targets
    ends: Targets
    coords: Targets
    sizes: Targets


def pack(rows: Sequence[RowPlan], model: Moondream) -> Batch:
    """Returns the batch of ``rows`` on the model's device."""
    length = max(sum(map(len, row.lessons)) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    positions = torch.full((len(rows), length), model.config.image_prefix)
    numbers = torch.full((len(rows), length), -1)
    coords: list[tuple[int, float]] = []
    sizes: list[tuple[int, tuple[float, float]]] = []
    found = _Found()
    bins = model.config.region.coord_out_dim, model.config.region.size_out_dim // 2
    for index, row in enumerate(rows):
        begin = 0
        for number, lesson in enumerate(row.lessons):
            end, flat = begin + len(lesson), index * length + begin
            numbers[index, begin:end] = number
            positions[index, begin:end] += torch.arange(len(lesson))
            for place, token in enumerate(lesson.tokens):
                if isinstance(token, Coord):
                    value = coord_of_bin(round(coord_bin(token.value, bins[0])), bins[0])
                    coords.append((flat + place, value.value))
                elif isinstance(token, Size):
                    width, height = (
                        round(size_bin(side, bins[1])) for side in (token.width, token.height)
                    )
                    size = size_of_bins(width, height, bins[1])
                    sizes.append((flat + place, (size.width, size.height)))
                else:
                    assert isinstance(token, int), token
                    ids[index, begin + place] = token
            found.add(lesson, flat, bins)
            begin = end
    device = model.device
    text = model.text.embed(ids.to(device)).flatten(0, 1)
    if coords:
        at, values = zip(*coords, strict=True)
        embedded = model.region.embed_coords(torch.tensor(values, device=device))
        text[torch.tensor(at, device=device)] = embedded
    if sizes:
        at, pairs = zip(*sizes, strict=True)
        embedded = model.region.embed_sizes(torch.tensor(pairs, device=device))
        text[torch.tensor(at, device=device)] = embedded
    return Batch(
        text.view(len(rows), length, -1),
        positions.to(device),
        numbers.to(device),
        *found.targets(device),
    )


def coord_bin(value: float, bins: int) -> float:
    """The fractional bin of a coordinate; the inverse of ``coord_of_bin``."""
    return min(max(value * bins, 0.0), bins - 1.0)


def size_bin(value: float, bins: int) -> float:
    """The fractional bin of a width or height; the inverse of ``size_of_bins``."""
    return (math.log2(min(max(value, 2.0**-10), 1.0)) + 10) / 10 * (bins - 1)


class _Found:
    """The targets of a batch, as they are found."""

    def __init__(self) -> None:
        self._words: list[tuple[int, int, float]] = []
        self._ends: list[tuple[int, int, float, bool]] = []
        self._coords: list[tuple[int, float, float]] = []
        self._sizes: list[tuple[int, tuple[float, float], float]] = []

    def add(self, lesson: Lesson, flat: int, bins: tuple[int, int]) -> None:
        """Adds a lesson whose first token is at ``flat``. All words of a lesson together weigh as one."""
        weight = lesson.weight
        self._words += [(flat + w.at, w.id, weight / len(lesson.words)) for w in lesson.words]
        self._ends += [(flat + e.at, int(e.is_end), weight, e.is_pair) for e in lesson.ends]
        self._coords += [(flat + c.at, coord_bin(c.value, bins[0]), weight) for c in lesson.coords]
        self._sizes += [
            (flat + s.at, (size_bin(s.width, bins[1]), size_bin(s.height, bins[1])), weight)
            for s in lesson.sizes
        ]

    def targets(self, device: torch.device) -> tuple[Targets, Targets, Targets, Targets]:
        """Words, ends, coordinates and sizes."""

        def column(rows: Sequence[tuple[object, ...]], index: int, dtype: torch.dtype) -> Tensor:
            return torch.tensor([row[index] for row in rows], dtype=dtype, device=device)

        whole, real = torch.int64, torch.float32
        made = [
            Targets(column(rows, 0, whole), column(rows, 1, dtype), column(rows, 2, real))
            for rows, dtype in (
                (self._words, whole),
                (self._ends, whole),
                (self._coords, real),
                (self._sizes, real),
            )
        ]
        words, ends, coords, sizes = made
        pairs = column(self._ends, 3, torch.bool)
        ends = Targets(ends.at, ends.values, ends.weights, pairs)
        sizes = Targets(sizes.at, sizes.values.view(-1, 2), sizes.weights)
        return words, ends, coords, sizes
