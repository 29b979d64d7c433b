"""Rows become a flat batch: images first, then text, with every token's position and slot."""

import numpy as np
import pytest

from kestrel_engine.runtime.gpu.prefill.batch import prefill_batch
from kestrel_engine.types.requests import Coord, ImageBlock, Size
from kestrel_engine.types.step import PREVIOUS, Row

BLOCK = 6
"""Positions of an image prefix here: BOS and 5."""


def picture(key):
    return ImageBlock(key, BLOCK - 1)


def test_images_come_first_and_text_follows_row_by_row():
    rows = [
        Row(1, (0, picture("a"), 11, 12), 0, (4, 5, 6, 7), None),
        Row(2, (21, Coord(0.25), Size(0.5, 0.125)), 7, (9, 8, 3, 2, 1), None),
        Row(3, (0, picture("b")), 0, (20, 21), None),
    ]
    batch = prefill_batch(rows, 3, BLOCK)
    assert batch.blocks == ("a", "b")
    assert batch.ids.tolist() == [0] * 12 + [11, 12, 21, 0, 0]
    assert batch.positions.tolist() == [*range(6), *range(6), 6, 7, 7, 8, 9]
    assert batch.slots.tolist() == [
        *(12, 13, 14, 15, 16, 17), *(60, 61, 62, 63, 64, 65), 18, 19, 3 * 3 + 1, 3 * 3 + 2, 2 * 3,
    ]  # fmt: skip
    assert batch.last.tolist() == [13, 16, 11]
    assert [(t.begin, t.count, t.start) for t in batch.text] == [(12, 2, 6), (14, 3, 7)]
    assert batch.text[1].page_table == (9, 8, 3, 2, 1)
    assert batch.coord_places.tolist() == [15] and batch.coord_values.tolist() == [0.25]
    assert batch.size_places.tolist() == [16]
    assert np.array_equal(batch.size_values, np.array([[0.5, 0.125]], np.float32))


def test_later_images_are_parts_of_their_own():
    rows = [
        Row(1, (0, picture("a"), picture("b"), 11, 12, picture("a"), 13), 0, (0, 1, 2, 3, 4, 5, 6, 7), None),
        Row(2, (picture("c"),), 9, (8, 9, 10, 11, 12), None),
        Row(3, (0, 21, picture("b"), Coord(0.5)), 0, (13, 14, 15), None),
    ]  # fmt: skip
    batch = prefill_batch(rows, 3, BLOCK)
    assert batch.blocks == ("a",)
    parts = [(t.begin, t.count, t.start, t.row, t.image) for t in batch.text]
    assert parts == [
        *((6, 5, 6, 0, "b"), (11, 2, 11, 0, None), (13, 5, 13, 0, "a"), (18, 1, 18, 0, None)),
        (19, 5, 9, 1, "c"),
        *((24, 2, 0, 2, None), (26, 5, 2, 2, "b"), (31, 1, 7, 2, None)),
    ]
    assert batch.ids.tolist() == [0] * 11 + [11, 12] + [0] * 5 + [13] + [0] * 5 + [0, 21] + [0] * 6
    assert batch.positions.tolist() == [*range(6), *range(6, 19), *range(9, 14), *range(8)]
    assert batch.slots[19:24].tolist() == [33, 34, 35, 36, 37]
    assert batch.last.tolist() == [18, 23, 31] and batch.coord_places.tolist() == [31]
    assert batch.text[4].page_table == (8, 9, 10, 11, 12)


def test_text_alone():
    batch = prefill_batch([Row(1, (0, 5, 6), 0, (2,), None)], 4, BLOCK)
    assert batch.blocks == () and batch.num_tokens == 3
    assert batch.slots.tolist() == [8, 9, 10] and batch.last.tolist() == [2]
    assert batch.slots.dtype == batch.positions.dtype == batch.ids.dtype == np.int64


@pytest.mark.parametrize(
    ("tokens", "start", "said"),
    [
        ((picture("a"), 5), 1, "not in the row of its BOS"),
        ((0, picture("a"), ImageBlock("b", 2)), 0, "2, 6"),
        ((1, PREVIOUS), 0, "not known"),
        ((), 0, "without tokens"),
    ],
)
def test_rows_against_the_contract(tokens, start, said):
    with pytest.raises(AssertionError, match=said):
        prefill_batch([Row(1, tokens, start, (0, 1, 2, 3), None)], 4, BLOCK)
