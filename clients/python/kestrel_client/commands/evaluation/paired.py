"""Tests of two runs that answered the same questions.

The exact form of McNemar's test (Psychometrika 12, 1947) tests whether one side has more right answers, where every
answer is right or wrong. The paired bootstrap (Efron and Tibshirani, 1993; for two systems on one test set: Koehn,
https://aclanthology.org/W04-3250) gives the interval of every difference: each sample draws images, with all cases
of an image and the answers of both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .scored import Scored
from .totals import ends, metrics_of, ratios, samples, sums


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of both sides. ``low``, ``high``: the 95 % interval of second minus first; ``bootstrap_p`` and
    ``mcnemar_p``: how probable so large a difference is if there is none. None where a test does not apply."""

    group: str
    metric: str
    cases: int
    first: float
    second: float
    low: float | None
    high: float | None
    bootstrap_p: float | None
    only_first: int
    """Cases that only the first side has right."""
    only_second: int
    mcnemar_p: float | None


def differences(
    first: Sequence[Scored], second: Sequence[Scored], groups: Sequence[str] = ()
) -> list[Difference]:
    """The metrics of two sides. They have the same cases, in the same order."""
    import numpy as np

    names = metrics_of(first, groups)
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
        values = [float(part / whole) for part, whole in totals]
        low, high, p = None, None, None
        if drawn is not None:
            gaps, lows, highs = drawn
            gap = gaps[:, column]
            gap = gap[~np.isnan(gap)]
            low, high = lows[column], highs[column]
            tail = min(np.count_nonzero(gap <= 0), np.count_nonzero(gap >= 0))
            p = min(1.0, 2 * (int(tail) + 1) / (len(gap) + 1))
        right = _right(first, second, group, metric)
        only_first = sum(a and not b for a, b in right or ())
        only_second = sum(b and not a for a, b in right or ())
        test = None if right is None else mcnemar(only_first, only_second)
        cases = sides[0][2][group, metric]
        found.append(
            Difference(
                group=group,
                metric=metric,
                cases=cases,
                first=values[0],
                second=values[1],
                low=low,
                high=high,
                bootstrap_p=p,
                only_first=only_first,
                only_second=only_second,
                mcnemar_p=test,
            )
        )
    return found


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided exact probability of so uneven a division of the cases that one side alone has right."""
    total = only_first + only_second
    if total == 0:
        return 1.0
    tail = ways = 1  # of all divisions: those with no case, one case, … on the smaller side
    for k in range(min(only_first, only_second)):
        ways = ways * (total - k) // (k + 1)
        tail += ways
    return float(min(1.0, 2 * tail / 2**total))


def _right(
    first: Sequence[Scored], second: Sequence[Scored], group: str, metric: str
) -> list[tuple[bool, bool]] | None:
    """Whether the sides have each case right; None if answers can be right in part."""
    pairs = []
    for a, b in zip(first, second, strict=True):
        if metric not in a.counts or group not in ("all", a.group):
            continue
        counts = [tuple(side.counts.get(metric, ())) for side in (a, b)]
        if any(count not in ((0.0, 1.0), (1.0, 1.0)) for count in counts):
            return None
        pairs.append((counts[0][0] == 1.0, counts[1][0] == 1.0))
    return pairs
