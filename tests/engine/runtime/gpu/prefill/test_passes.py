"""Rows go together as passes hold them, in order, nobody left out."""

import pytest

from kestrel_engine.runtime.gpu.prefill.prefill import captured_passes, plain_passes, row_size
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import Row

BLOCK = 7


def row(number, *, picture=False, text=0):
    block = (0, ImageBlock("p", BLOCK - 1)) if picture else ()
    return Row(number, (*block, *range(1, text + 1)), 0, (0,), None)


def sizes(rows, max_blocks=4, max_text=10):
    groups = list(captured_passes(rows, BLOCK, max_blocks=max_blocks, max_text=max_text))
    assert [r for group in groups for r in group] == list(rows)
    return [len(group) for group in groups]


def test_sizes_of_rows():
    assert row_size(row(1, picture=True, text=3)) == (1, BLOCK + 3)
    assert row_size(row(1, text=3)) == (0, 3)
    assert row_size(row(1, text=1)) == (0, 1)
    later = Row(1, (5, ImageBlock("b", BLOCK - 1), 6), 7, (), None)
    assert row_size(later) == (0, BLOCK + 1)
    both = Row(1, (0, ImageBlock("a", BLOCK - 1), ImageBlock("b", BLOCK - 1), 6), 0, (), None)
    assert row_size(both) == (1, 2 * BLOCK)


@pytest.mark.parametrize(
    ("blocks", "groups"),
    [(1, [1]), (4, [4]), (5, [3, 2]), (6, [3, 3]), (8, [4, 4]), (9, [3, 3, 3])],
)
def test_images_are_spread_evenly(blocks, groups):
    assert sizes([row(i, picture=True) for i in range(blocks)]) == groups


def test_text_counts_beside_blocks():
    rows = [row(1, picture=True, text=6), row(2, text=4), row(3, text=1), row(4, picture=True)]
    assert sizes(rows) == [2, 2]
    assert sizes([row(1, text=40), row(2, text=1)]) == [1, 1]


def test_no_rows_no_pass():
    assert sizes([]) == []
    assert list(plain_passes([], 10)) == []


def test_plain_passes_count_positions():
    rows = [row(1, picture=True), row(2, text=3), row(3, text=1), row(4, text=40), row(5, text=1)]
    assert [len(group) for group in plain_passes(rows, 10)] == [2, 1, 1, 1]
