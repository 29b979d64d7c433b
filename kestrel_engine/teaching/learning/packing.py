"""Packs lessons about images to the tensors of one pass.

A row is an image with several lessons behind it. A lesson sees the image and itself, never another lesson, so each has
the results that it would have alone, and the image is computed once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    ``weights``: [n] float32.
    """

    at: Tensor
    values: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class LessonBatch:
    """The rows of a pass. ``text``: embeddings [rows, length, dim] of the lessons. ``positions``: [rows, length] int64.
    ``lessons``: [rows, length] int64, the number of the lesson in its row; -1 for padding. ``pairs``: of ``ends``, [n]
    bool (`EndTarget.is_pair`)."""

    text: Tensor
    positions: Tensor
    lessons: Tensor
    words: Targets
    ends: Targets
    pairs: Tensor
    coords: Targets
    sizes: Targets


def pack(rows: Sequence[RowPlan], model: Moondream) -> LessonBatch:
    """Returns the batch of ``rows`` on the model's device."""
    length = max(sum(map(len, row.lessons)) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    positions = torch.full((len(rows), length), model.config.image_prefix)
    numbers = torch.full((len(rows), length), -1)
    coord_bins, size_bins = model.config.region.coord_out_dim, model.config.region.size_out_dim // 2
    words: list[tuple[int, int, float]] = []
    ends: list[tuple[int, int, float]] = []
    pairs: list[bool] = []
    coords: list[tuple[int, float, float]] = []
    sizes: list[tuple[int, tuple[float, float], float]] = []
    for index, row in enumerate(rows):
        begin = 0
        for number, lesson in enumerate(row.lessons):
            end, flat, weight = begin + len(lesson), index * length + begin, lesson.weight
            numbers[index, begin:end] = number
            positions[index, begin:end] += torch.arange(len(lesson))
            for place, token in enumerate(lesson.tokens):
                before = flat + place - 1
                if isinstance(token, Coord):
                    coords.append((before, coord_bin(token.value, coord_bins), weight))
                elif isinstance(token, Size):
                    size = size_bin(token.width, size_bins), size_bin(token.height, size_bins)
                    sizes.append((before, size, weight))
                else:
                    assert isinstance(token, int), token
                    ids[index, begin + place] = token
            # All words of a lesson together weigh as one.
            words += [(flat + w.at, w.id, weight / len(lesson.words)) for w in lesson.words]
            ends += [(flat + e.at, int(e.is_end), weight) for e in lesson.ends]
            pairs += [e.is_pair for e in lesson.ends]
            begin = end
    device = model.device
    text = model.text.embed(ids.to(device)).flatten(0, 1)
    coord_targets = _targets(coords, torch.float32, device)
    size_targets = _targets(sizes, torch.float32, device)
    if coords:
        values = [coord_of_bin(round(each), coord_bins).value for _, each, _ in coords]
        embedded = model.region.embed_coords(torch.tensor(values, device=device))
        text[coord_targets.at + 1] = embedded
    if sizes:
        seen = [size_of_bins(round(w), round(h), size_bins) for _, (w, h), _ in sizes]
        sides = [(size.width, size.height) for size in seen]
        text[size_targets.at + 1] = model.region.embed_sizes(torch.tensor(sides, device=device))
    return LessonBatch(
        text.view(len(rows), length, -1),
        positions.to(device),
        numbers.to(device),
        _targets(words, torch.int64, device),
        _targets(ends, torch.int64, device),
        torch.tensor(pairs, dtype=torch.bool, device=device),
        coord_targets,
        size_targets,
    )


def _targets(
    found: Sequence[tuple[int, Any, float]], dtype: torch.dtype, device: torch.device
) -> Targets:
    """Places, values and weights as tensors."""
    at, values, weights = zip(*found, strict=True) if found else ((), (), ())
    return Targets(
        torch.tensor(at, dtype=torch.int64, device=device),
        torch.tensor(values, dtype=dtype, device=device),
        torch.tensor(weights, dtype=torch.float32, device=device),
    )


def coord_bin(value: float, bins: int) -> float:
    """The fractional bin of a coordinate; the inverse of ``coord_of_bin``."""
    return min(max(value * bins, 0.0), bins - 1.0)


def size_bin(value: float, bins: int) -> float:
    """The fractional bin of a width or height; the inverse of ``size_of_bins``."""
    return (math.log2(min(max(value, 2.0**-10), 1.0)) + 10) / 10 * (bins - 1)
