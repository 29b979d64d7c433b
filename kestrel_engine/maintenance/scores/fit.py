"""Fits a calibration of scores: from results whose correctness is known to rising curves, and how far they are off.

This is isotonic regression (pool adjacent violators) on groups of results with neighbouring raw scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...types.calibration import Curve

GROUPS = 30
"""The most groups of a curve."""
LEAST_IN_GROUP = 25
BINS = 15
"""Bins of equal width for the expected calibration error."""

Judged = tuple[float, bool]
"""The score of a result, and whether the result is correct."""


def fit(results: Sequence[Judged]) -> Curve:
    """Returns the curve of ``results`` with raw scores. Raises ValueError if there are none."""
    if not results:
        raise ValueError("no result to fit")
    blocks = _pooled(_groups(sorted(results)))
    points = [(0.0, 0.0), *((raw, score) for raw, score, _ in blocks)]
    # A raw score of 1 gets the share of the last group.
    points.append((1.0, points[-1][1]))
    curve: list[tuple[float, float]] = []
    for raw, score in points:
        if curve and raw <= curve[-1][0]:
            curve[-1] = (curve[-1][0], max(score, curve[-1][1]))
        else:
            curve.append((raw, score))
    return Curve(tuple(raw for raw, _ in curve), tuple(score for _, score in curve))


def calibration_error(results: Sequence[Judged], bins: int = BINS) -> float:
    """The expected calibration error: the mean difference between score and share of correct results, over bins of
    equal width weighted by their counts. 0 without results."""
    if not results:
        return 0.0
    scores, correct = np.array(results, float).T
    places = np.minimum((scores * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(places, scores - correct)).sum() / len(results))


def _groups(ordered: Sequence[Judged]) -> list[tuple[float, float, int]]:
    """Divides results into groups of nearly equal size: mean raw score, share of correct results, count."""
    count = min(GROUPS, max(1, len(ordered) // LEAST_IN_GROUP))
    return [
        (float(part[:, 0].mean()), float(part[:, 1].mean()), len(part))
        for part in np.array_split(np.array(ordered, float), count)
    ]


def _pooled(groups: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Joins neighbouring groups until the shares rise."""
    blocks: list[tuple[float, float, int]] = []
    for group in groups:
        blocks.append(group)
        while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
            (a_raw, a_share, a), (b_raw, b_share, b) = blocks[-2:]
            joined = a + b
            raw, share = (a_raw * a + b_raw * b) / joined, (a_share * a + b_share * b) / joined
            blocks[-2:] = [(raw, share, joined)]
    return blocks
