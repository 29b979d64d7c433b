"""Scores of answers that have one right result: texts, numbers, boxes, points and outlines.

training/judging.py scores by this module, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kestrel_client.drawing.rasterise import fill
from kestrel_client.drawing.svg_path import Polygon, polygons

from .benchmark import Outcome, Score, share
from .place_metrics import edges_of, found_boxes, in_polygon, matched
from .records import Edges

TEXTS = ("accuracy", "characters", "within 5 %")
"""The metrics of texts: equal but for case; the share of right characters; ChartQA's relaxed accuracy."""
_SIDE = 384
"""Pixels of the raster on which two outlines are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The right result of a request. All coordinates are fractions of the image."""

    skill: str
    """query, point, detect or segment."""
    metric: str = TEXTS[0]
    """One of TEXTS, for query."""
    answer: str = ""
    boxes: Sequence[Edges] = ()
    """Of all objects; empty if the image has none."""
    outlines: Sequence[Polygon] = ()
    """Of point and segment: by these the result is judged; without them, by the boxes."""


def score(truth: Truth, outcome: Outcome | None) -> Score:
    """Scores a result; None stands for a request that failed. F1 counts 2 hits over the found and the wanted."""
    if truth.skill == "query":
        said = "" if outcome is None else str(outcome["answer"])
        return _text_score(truth, said) if outcome is not None else share(truth.metric, 0.0, "")
    if outcome is None:
        metric = "nothing found" if not truth.boxes else _PLACES[truth.skill]
        return share(metric, 0.0, "")
    found = outcome.get("points") or outcome.get("objects") or outcome.get("segments") or ()
    if not truth.boxes:
        return share("nothing found", float(not found), f"{len(found)} found")
    if truth.skill == "segment":
        iou = _segment_iou(truth, outcome)
        return share(_PLACES["segment"], iou, f"IoU {iou:.2f}")
    if truth.skill == "detect":
        hits = len(matched(truth.boxes, [box for box, _ in found_boxes(outcome)]))
    else:
        hits = _hits(truth, [(point["x"], point["y"]) for point in found])
    whole = len(found) + len(truth.boxes)
    counts = {_PLACES[truth.skill]: (2.0 * hits, float(whole))}
    return Score(2 * hits / whole, counts, f"{len(found)} found, {hits} right")


_PLACES = {"detect": "F1 at IoU 0.5", "point": "F1 of points", "segment": "IoU of outlines"}


def _text_score(truth: Truth, said: str) -> Score:
    said, answer = said.strip(), truth.answer.strip()
    if truth.metric == "characters":
        long = len(said) >= 2 * len(answer)  # Then no character counts as right.
        right = 0 if long else max(0, len(answer) - distance(said, answer))
        whole = max(1, len(answer))
        return Score(right / whole, {"characters": (float(right), float(whole))}, said)
    if truth.metric == "within 5 %":
        return share(truth.metric, float(relaxed_correct(answer, said)), said)
    return share(truth.metric, float(_plain(said) == _plain(answer)), said)


def relaxed_correct(expected: str, said: str, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed accuracy: numbers may be off by 5 %, other answers must be equal but for case.

    https://arxiv.org/abs/2203.10244, section 5.1. A percentage is its value over 100.
    """
    truth, answer = expected.strip().lower(), said.strip().lower()
    wanted, number = _number(truth), _number(answer)
    if wanted and number is not None:  # Nothing is within 5 % of 0 but 0, which is equal as a text.
        return abs(number - wanted) / abs(wanted) <= tolerance
    return truth == answer


def _number(text: str) -> float | None:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    return text.rstrip(".").casefold()


def distance(a: str, b: str) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _hits(truth: Truth, points: Sequence[tuple[float, float]]) -> int:
    """How many objects have a point of their own."""
    left = list(truth.outlines or map(_corners, truth.boxes))
    for point in points:
        hit = next((i for i, outline in enumerate(left) if in_polygon(*point, outline)), None)
        if hit is not None:
            del left[hit]
    return len(truth.boxes) - len(left)


def _segment_iou(truth: Truth, outcome: Outcome) -> float:
    segment = next(iter(outcome.get("segments", ())), None)
    if segment is None:
        return 0.0
    box = edges_of(segment.get("box") or segment["bbox"])  # The engine's own output has bbox.
    wanted = truth.outlines[:1] or [_corners(truth.boxes[0])]
    return outline_iou(wanted, placed(segment["svg_path"], box))


def placed(path: str, box: Edges) -> list[Polygon]:
    """The polygons of SVG path data that is relative to a box."""
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    return [[(left + x * width, top + y * height) for x, y in part] for part in polygons(path)]


def outline_iou(a: Sequence[Polygon], b: Sequence[Polygon]) -> float:
    """Intersection over union of two outlines, on a raster around both; 0 if one of them is empty."""
    if not a or not b:
        return 0.0
    corners = np.array(list(chain(*a, *b)))
    low = corners.min(0)
    scale = (_SIDE - 1) / np.maximum(corners.max(0) - low, 1e-9)

    def mask(parts: Sequence[Polygon]) -> np.ndarray:
        scaled = [((np.array(part) - low) * scale).tolist() for part in parts]
        return fill(scaled, _SIDE, _SIDE)

    first, second = mask(a), mask(b)
    union = np.count_nonzero(first | second)
    return np.count_nonzero(first & second) / union if union else 0.0


def _corners(box: Edges) -> Polygon:
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
