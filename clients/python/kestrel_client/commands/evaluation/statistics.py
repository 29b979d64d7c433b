"""The metrics of a data set and of its groups, with confidence intervals, and the tests of two runs.

A metric is a sum of parts over a sum of wholes. Its interval comes from the bootstrap (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993): images are drawn with replacement, and with an image all of its cases, because
they are not independent of each other (Miller, https://arxiv.org/abs/2411.00640). Where every answer is right, or
every one wrong, samples do not differ. The interval is then the exact binomial one of that many images (Clopper and
Pearson, Biometrika 26, 1934).

The interval of a difference comes from the paired bootstrap (Efron and Tibshirani, 1993; for two systems on one test
set: Koehn, https://aclanthology.org/W04-3250): each sample draws images, with all cases of an image and the answers of
both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .scored import ScoredCase

SAMPLES = 2000
"""Samples of the bootstrap."""
ALL = "all"
_CHUNK = 100
_TAIL = 2.5
"""Percent of the samples on either side of an interval."""
Name = tuple[str, str]
"""Group and metric."""


@dataclass(frozen=True, slots=True)
class Total:
    """A metric of a group. ``low`` and ``high``: its 95 % interval; None with fewer than two images."""

    group: str
    metric: str
    cases: int
    value: float
    low: float | None
    high: float | None


def totals(scores: Sequence[ScoredCase]) -> list[Total]:
    """The metrics of all cases and of each group."""
    names = metrics_of(scores)
    images = list(dict.fromkeys(each.image for each in scores))
    parts, wholes, cases = sums(scores, names, images)
    lows, highs = intervals(parts, wholes)
    found = []
    for column, (group, metric) in enumerate(names):
        whole = wholes[:, column].sum()
        if whole > 0:
            value = float(parts[:, column].sum() / whole)
            total = Total(group, metric, cases[group, metric], value, lows[column], highs[column])
            found.append(total)
    return found


def metrics_of(scores: Iterable[ScoredCase]) -> list[Name]:
    """All groups with their metrics. The group of all cases comes first, with the metrics that every group has."""
    by_group: dict[str, dict[str, None]] = defaultdict(dict)
    for each in scores:
        by_group[each.group].update(dict.fromkeys(each.counts))
    shared = [
        metric
        for metric in next(iter(by_group.values()), {})
        if all(metric in others for others in by_group.values())
    ]
    order = sorted(by_group)
    names = [(ALL, metric) for metric in shared]
    if order != [""]:
        names += [(group, metric) for group in order for metric in by_group[group]]
    return names


def sums(
    scores: Iterable[ScoredCase], names: Sequence[Name], images: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any], dict[Name, int]]:
    """Parts and wholes [images, names], and the number of cases of each name."""
    rows = {image: row for row, image in enumerate(images)}
    columns = {name: column for column, name in enumerate(names)}
    parts, wholes = np.zeros((2, len(images), len(names)))
    cases: dict[Name, int] = defaultdict(int)
    for each in scores:
        for metric, (part, whole) in each.counts.items():
            for name in {(ALL, metric), (each.group, metric)}:
                if name in columns:
                    parts[rows[each.image], columns[name]] += part
                    wholes[rows[each.image], columns[name]] += whole
                    cases[name] += 1
    return parts, wholes, cases


def samples(num_images: int, seed: int = 0) -> Iterator[NDArray[Any]]:
    """How often each image is in each sample of the bootstrap: arrays [samples, images], SAMPLES in all."""
    rng = np.random.default_rng(seed)
    for _ in range(SAMPLES // _CHUNK):
        drawn = rng.integers(0, num_images, (_CHUNK, num_images))
        offsets = np.arange(_CHUNK)[:, None] * num_images
        counts = np.bincount((drawn + offsets).ravel(), minlength=_CHUNK * num_images)
        yield counts.reshape(_CHUNK, num_images).astype(np.float64)


def ratios(
    parts: NDArray[Any], wholes: NDArray[Any], weights: Iterable[NDArray[Any]]
) -> NDArray[Any]:
    """The metrics [samples, names]; NaN where a sample has no case."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.concatenate([(w @ parts) / (w @ wholes) for w in weights])


def intervals(
    parts: NDArray[Any], wholes: NDArray[Any]
) -> tuple[list[float | None], list[float | None]]:
    """Lower and upper ends of the intervals of all names; None for names of fewer than two images."""
    lows, highs = ends(ratios(parts, wholes, samples(len(parts))))
    for column in range(parts.shape[1]):
        part, whole = parts[:, column], wholes[:, column]
        images = int((whole > 0).sum())
        outermost = (_TAIL / 100) ** (1 / max(images, 1))
        if images < 2:
            lows[column] = highs[column] = None
        elif (part == whole).all():
            lows[column] = float(outermost)
        elif (part == 0).all():
            highs[column] = float(1 - outermost)
    return lows, highs


def ends(drawn: NDArray[Any]) -> tuple[list[float | None], list[float | None]]:
    """Percentile intervals of the columns of ``drawn`` [samples, names]."""
    lows: list[float | None] = []
    highs: list[float | None] = []
    for column in drawn.T:
        kept = column[~np.isnan(column)]
        low, high = np.percentile(kept, (_TAIL, 100 - _TAIL)) if len(kept) else (None, None)
        lows.append(None if low is None else float(low))
        highs.append(None if high is None else float(high))
    return lows, highs


def plain(total: Total) -> Mapping[str, Any]:
    """For JSON."""
    return {
        "group": total.group,
        "metric": total.metric,
        "cases": total.cases,
        "value": total.value,
        "interval_95": None if total.low is None else [total.low, total.high],
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of both sides. ``low``, ``high``: the 95 % interval of second minus first; ``bootstrap_p``: how
    probable so large a difference is if there is none. None with fewer than two images."""

    group: str
    metric: str
    cases: int
    first: float
    second: float
    low: float | None
    high: float | None
    bootstrap_p: float | None


def differences(first: Sequence[ScoredCase], second: Sequence[ScoredCase]) -> list[Difference]:
    """The metrics of two sides. They have the same cases, in the same order."""
    names = metrics_of(first)
    images = list(dict.fromkeys(each.image for each in first))
    sides = [sums(side, names, images) for side in (first, second)]
    drawn = None
    if len(images) > 1:
        # Both sides have the same samples, because these have a seed.
        rates = [ratios(parts, wholes, samples(len(images))) for parts, wholes, _ in sides]
        gaps = rates[1] - rates[0]
        drawn = gaps, *ends(gaps)
    found = []
    for column, (group, metric) in enumerate(names):
        totals = [(p[:, column].sum(), w[:, column].sum()) for p, w, _ in sides]
        if any(whole <= 0 for _, whole in totals):
            continue
        one, two = (float(part / whole) for part, whole in totals)
        low, high, p = None, None, None
        if drawn is not None:
            gaps, lows, highs = drawn
            gap = gaps[:, column]
            gap = gap[~np.isnan(gap)]
            low, high = lows[column], highs[column]
            tail = min(np.count_nonzero(gap <= 0), np.count_nonzero(gap >= 0))
            p = min(1.0, 2 * (int(tail) + 1) / (len(gap) + 1))
        cases = sides[0][2][group, metric]
        found.append(Difference(group, metric, cases, one, two, low, high, p))
    return found
