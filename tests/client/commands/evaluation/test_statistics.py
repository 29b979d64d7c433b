"""Totals, intervals and the paired test."""

import pytest

from kestrel_client.commands.evaluation.scored import ScoredCase
from kestrel_client.commands.evaluation.statistics import differences, totals


def scored(image, part, whole=1.0, group="", metric="right", row=0):
    counts = {metric: (float(part), float(whole))}
    return ScoredCase(f"{image}", row, "0", group, "q", "e", "s", float(part), counts, None)


def test_a_metric_is_the_sum_of_parts_over_the_sum_of_wholes():
    scores = [scored(0, 1, 4, "a"), scored(1, 3, 4, "b"), scored(2, 2, 2, "b")]
    found = {total.group: total for total in totals(scores)}
    assert [*found] == ["all", "a", "b"]
    assert found["all"].value == 0.6 and found["b"].value == pytest.approx(5 / 6)
    assert found["a"].low is None and found["all"].low < 0.6 < found["all"].high


def test_intervals_agree_with_the_normal_one_and_keep_images_together():
    single = totals([scored(i, i % 2) for i in range(400)])[0]
    assert single.value == 0.5
    assert single.low == pytest.approx(0.451, abs=0.01)
    assert single.high == pytest.approx(0.549, abs=0.01)
    # The same answers, four of each image alike, say only as much as 100 images do.
    several = totals([scored(i // 4, i // 4 % 2, row=i) for i in range(400)])[0]
    assert several.high - several.low == pytest.approx(2 * (single.high - single.low), rel=0.15)


def test_all_right_is_not_certain():
    total = totals([scored(i, 1) for i in range(100)])[0]
    assert (total.value, total.high) == (1, 1)
    assert total.low == pytest.approx(0.9638, abs=1e-4)  # Clopper and Pearson, 100 of 100
    total = totals([scored(i, 0) for i in range(100)])[0]
    assert (total.low, total.high) == (0, pytest.approx(0.0362, abs=1e-4))


def test_a_difference_that_is_there_is_found_and_one_that_is_not_is_not():
    first = [scored(i, i % 10 != 0) for i in range(300)]
    second = [scored(i, i % 10 not in (0, 1)) for i in range(300)]
    (found,) = differences(first, second)
    assert found.second - found.first == pytest.approx(-0.1)
    assert found.low < -0.1 < found.high < 0
    assert found.bootstrap_p < 0.01
    other = [scored(i, i % 10 != 5) for i in range(300)]
    (none,) = differences(first, other)
    assert none.bootstrap_p > 0.5
