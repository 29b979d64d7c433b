"""Merging: one list of objects from several looks at an image, and non-maximum suppression. Owns no state.

All coordinates are fractions of the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..skills.objects.request import Merging
from ..steps.delivery import RequestOutcome
from ..types.events import FinishReason
from ..types.requests import Edges

SAME_OVERLAP = 0.3
"""Boxes of two looks with a higher overlap (intersection over union) are one object. The overlap of two boxes of a
small object is low if one of them comes from a look at the whole image."""

SAME_PART = 0.6
"""A box is a piece of a larger object if the object's box contains more than this part of it, and the box's look cannot
see the whole object."""

PIECE_SCORE = 0.5
"""The score of a larger object is at least this part of its piece's. So a wrong large box hides no surer objects."""

SAME_DISTANCE = 0.02
"""Points of two looks that are closer are one object: a part of the width and height of the larger look."""

CUT_MARGIN = 0.015
"""A box that ends so close to an inner edge of its tile is cut there: a part of the tile's width or height."""

FoundObject: TypeAlias = dict[str, float]
"""A point or a box of an output, with its score if the runtime gives probabilities."""


_WEIGHT: tuple[FinishReason, ...] = ("stop", "length", "cancelled")
"""The reason of a look that the request takes, the least one first."""


def merged(looks: Sequence[tuple[RequestOutcome, Edges]], merging: Merging) -> RequestOutcome:
    """The outcome of a request. ``looks``: the outcome of each look, and its place in the image. Any thread."""
    parts = [part for part, _ in looks]
    every = [(part.output[merging.key], edges) for part, edges in looks]
    # One look gives its objects in the order in which the model found them.
    found = merge(every) if len(every) > 1 else every[0][0]
    found, most = suppressed(found, merging.max_overlap), merging.max_objects
    reasons: list[FinishReason] = [part.reason for part in parts]
    if len(found) > most:
        reasons.append("length")
    return RequestOutcome(
        {**parts[0].output, merging.key: found[:most]},
        max(reasons, key=_WEIGHT.index),
        tuple(token for part in parts for token in part.token_ids),
        # The object is absent only if no look sees it.
        absence=min((p.absence for p in parts if p.absence is not None), default=None),
    )


def merge(looks: Sequence[tuple[Sequence[FoundObject], Edges]]) -> list[FoundObject]:
    """Returns the objects of all looks, each once, in the order of their scores. ``looks``: the objects that each look
    found, and its place in the image.

    Objects of different looks are compared. Each object of the result stands for at most one object of each look, so
    that two objects that one look tells apart both stay. Pieces of larger objects are left out. Of the boxes of an
    object, one that no tile cuts is preferred, and then the one with the highest score. The time is quadratic in the
    number of objects that share a column.
    """
    every = [(one, index) for index, (found, _) in enumerate(looks) for one in found]
    if not every:
        return []
    places = np.array([edges for _, edges in looks])
    scores = np.array([score_of(found) for found, _ in every])
    of_look = np.array([index for _, index in every])
    are_boxes = "x_min" in every[0][0]
    same = _SameBoxes(places, every) if are_boxes else _SamePoints(places, every)
    kept: list[int] = []
    kept_at = np.full(len(every), -1)
    """The places of the kept objects in ``kept``; -1 for others."""
    seen_by = np.zeros((len(every), len(looks)), dtype=bool)
    """Which looks have an object that a kept object stands for."""
    for one in np.lexsort((-scores, same.is_cut)).tolist():
        near = same.columns.near(one)
        whole = near[~same.is_cut[near] & (scores[near] >= PIECE_SCORE * scores[one])]
        if same.is_piece(one, whole).any():
            continue
        index = of_look[one]
        others = near[(kept_at[near] >= 0) & ~seen_by[near, index]]
        others = others[kept_at[others].argsort()]
        likeness = same.likeness(one, others)
        if likeness.size and likeness.max() > 0:
            seen_by[others[likeness.argmax()], index] = True
        else:
            kept_at[one] = len(kept)
            kept.append(one)
            seen_by[one, index] = True
    kept.sort(key=lambda one: -scores[one])
    return [every[one][0] for one in kept]


def best_boxes(edges: Sequence[Edges], scores: Sequence[float], max_overlap: float) -> list[bool]:
    """Returns which boxes stay in a non-maximum suppression.

    As long as two boxes overlap by more than ``max_overlap`` (intersection over union), the one with the lower score
    goes; with equal scores, the later one. The time is quadratic in the number of boxes that share a column.
    """
    boxes = np.array(edges, dtype=np.float64).reshape(-1, 4)
    columns = _Columns(boxes[:, 0], boxes[:, 2])
    stays, undecided = np.ones(len(boxes), dtype=bool), np.ones(len(boxes), dtype=bool)
    for best in np.argsort(-np.array(scores, dtype=np.float64), kind="stable").tolist():
        if not undecided[best]:
            continue
        undecided[best] = False
        near = columns.near(best)
        near = near[undecided[near]]
        goes = near[overlaps(boxes[best], boxes[near]) > max_overlap]
        undecided[goes] = stays[goes] = False
    return stays.tolist()  # type: ignore[no-any-return]


def suppressed(found: Sequence[FoundObject], max_overlap: float | None) -> list[FoundObject]:
    """Returns the boxes that ``best_boxes`` keeps; all of them for None."""
    if max_overlap is None:
        return list(found)
    stays = best_boxes([edges_of(box) for box in found], list(map(score_of, found)), max_overlap)
    return [box for box, does_stay in zip(found, stays, strict=True) if does_stay]


def score_of(found: Mapping[str, Any]) -> float:
    """0 if the runtime gives no probabilities."""
    return float(found.get("score", 0.0))


def edges_of(box: Mapping[str, float]) -> Edges:
    return box["x_min"], box["y_min"], box["x_max"], box["y_max"]


def overlap(one: Edges, other: Edges) -> float:
    """Returns the intersection over the union of two boxes."""
    return float(overlaps(np.array(one), np.array([other]))[0])


def overlaps(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the intersection over the union of the box ``one`` [4] with each of ``others`` [n, 4]; 0 for boxes
    without area."""
    common, area, areas = _areas(one, others)
    return _ratio(common, area + areas - common)


def _areas(one: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The areas of the intersections, of ``one``, and of ``others``."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    common = np.prod(np.maximum(sides, 0.0), axis=1)
    return common, np.prod(one[2:] - one[:2]), np.prod(others[:, 2:] - others[:, :2], axis=1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    return ratio


class _Columns:
    """Which objects share a column of the image. ``left``, ``right``: their ends, [n]."""

    def __init__(self, left: np.ndarray, right: np.ndarray) -> None:
        self._order = np.argsort(left, kind="stable")
        sorted_left = left[self._order]
        widest = (right - left).max(initial=0.0)
        self._first = np.searchsorted(sorted_left, left - widest).tolist()
        self._last = np.searchsorted(sorted_left, right).tolist()

    def near(self, one: int) -> np.ndarray:
        """The objects that share a column with ``one``, and perhaps others."""
        found: np.ndarray = self._order[self._first[one] : self._last[one]]
        return found


class _SameBoxes:
    """Which boxes of different looks are one object."""

    def __init__(self, places: np.ndarray, every: Sequence[tuple[FoundObject, int]]) -> None:
        boxes = np.array([edges_of(found) for found, _ in every])
        own = places[[index for _, index in every]]
        # A look's edge is an inner one if another look lies beyond it.
        low, high = places[:, :2].min(axis=0), places[:, 2:].max(axis=0)
        margin = CUT_MARGIN * (own[:, 2:] - own[:, :2])
        first = (own[:, :2] > low) & (boxes[:, :2] - own[:, :2] < margin)
        last = (own[:, 2:] < high) & (own[:, 2:] - boxes[:, 2:] < margin)
        self.is_cut = (first | last).any(axis=1)
        self.columns = _Columns(boxes[:, 0], boxes[:, 2])
        self._boxes, self._looks = boxes, own

    def is_piece(self, one: int, others: np.ndarray) -> np.ndarray:
        """Whether box ``one`` is a piece of each of ``others``, which its look cannot see as a whole."""
        boxes, look = self._boxes[others], self._looks[one]
        is_outside = (boxes[:, :2] < look[:2]).any(axis=1) | (boxes[:, 2:] > look[2:]).any(axis=1)
        common, area, _ = _areas(self._boxes[one], boxes)
        piece: np.ndarray = is_outside & (common > SAME_PART * area)
        return piece

    def likeness(self, one: int, others: np.ndarray) -> np.ndarray:
        """Above 0 where box ``one`` is the object of one of ``others``; higher is more alike."""
        union = overlaps(self._boxes[one], self._boxes[others])
        return np.where(union > SAME_OVERLAP, union, 0.0)


class _SamePoints:
    """Which points of different looks are one object."""

    def __init__(self, places: np.ndarray, every: Sequence[tuple[FoundObject, int]]) -> None:
        self._sizes = (places[:, 2:] - places[:, :2])[[index for _, index in every]]
        self._points = np.array([(found["x"], found["y"]) for found, _ in every])
        half = SAME_DISTANCE / 2 * self._sizes.max(initial=0.0)
        self.columns = _Columns(self._points[:, 0] - half, self._points[:, 0] + half)
        self.is_cut = np.zeros(len(every), dtype=bool)

    def is_piece(self, one: int, others: np.ndarray) -> np.ndarray:
        """A point does not say how large its object is."""
        return np.zeros(len(others), dtype=bool)

    def likeness(self, one: int, others: np.ndarray) -> np.ndarray:
        apart = self._points[others] - self._points[one]
        apart = apart / np.maximum(self._sizes[others], self._sizes[one])
        near: np.ndarray = np.maximum(0.0, SAME_DISTANCE - np.hypot(apart[:, 0], apart[:, 1]))
        return near
