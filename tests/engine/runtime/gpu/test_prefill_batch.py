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


def test_text_alone():
    batch = prefill_batch([Row(1, (0, 5, 6), 0, (2,), None)], 4, BLOCK)
    assert batch.blocks == () and batch.num_tokens == 3
    assert batch.slots.tolist() == [8, 9, 10] and batch.last.tolist() == [2]
    assert batch.slots.dtype == batch.positions.dtype == batch.ids.dtype == np.int64


@pytest.mark.parametrize(
    ("tokens", "start", "said"),
    [
        ((0, picture("a")), 3, "an image at position 4"),
        ((1, 2, picture("a")), 0, "amid the text"),
        ((1, PREVIOUS), 0, "not known"),
        ((), 0, "without tokens"),
    ],
)
def test_rows_against_the_contract(tokens, start, said):
    with pytest.raises(AssertionError, match=said):
        prefill_batch([Row(1, tokens, start, (0, 1, 2, 3), None)], 4, BLOCK)
