"""Converts rows of prompt tokens to the arrays of one prefill pass, on the host with numpy.

The flat batch starts with all image prefixes (BOS and image, which attend in both directions), block by block, so that
their attention needs no gathering. The text tokens of all rows follow, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....types.requests import Coord, ImageBlock, Size
from ....types.step import Previous, Row


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text of one row: ``count`` tokens from index ``begin`` of the flat batch, at positions from ``start`` on."""

    begin: int
    count: int
    start: int
    page_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The arrays of a pass. ``ids``, ``positions`` and ``slots``: [num_tokens] int64. The id of an image position or a
    value is 0. ``last``: [num_rows] int64, the index of each row's last token."""

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    last: np.ndarray
    blocks: tuple[str, ...]
    """Image keys, in the order of their blocks."""
    block_length: int
    """Positions of a block, including BOS."""
    text: tuple[TextPart, ...]
    coord_places: np.ndarray
    """[n] int64, the indices of coordinates."""
    coord_values: np.ndarray
    """[n] float32."""
    size_places: np.ndarray
    """[n] int64, the indices of sizes."""
    size_values: np.ndarray
    """[n, 2] float32."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def prefill_batch(rows: Sequence[Row], page_size: int, block_length: int) -> PrefillBatch:
    """Builds the arrays for ``rows``. ``block_length``: the positions of the model's image prefix.

    Raises AssertionError for rows that violate the contract of StepPlan.
    """
    images = [_image(row, block_length) for row in rows]
    keys = tuple(image.key for image in images if image is not None)
    ids: list[int] = [0] * (len(keys) * block_length)
    coords: list[tuple[int, float]] = []
    sizes: list[tuple[int, float, float]] = []
    slots: list[np.ndarray] = []
    block_positions = np.arange(block_length)
    block = 0
    for row, image in zip(rows, images, strict=True):
        if image is not None:
            assert isinstance(row.tokens[0], int)
            ids[block * block_length] = row.tokens[0]
            slots.append(_slots(row.page_table, block_positions, page_size))
            block += 1
    text: list[TextPart] = []
    last: list[int] = []
    positions = [block_positions] * len(keys)
    block = 0
    for row, image in zip(rows, images, strict=True):
        tokens, start = row.tokens, row.start
        if image is not None:
            block += 1
            tokens, start = tokens[2:], block_length
        if not tokens:
            assert image is not None, f"sequence {row.sequence_id}: a row without tokens"
            last.append(block * block_length - 1)
            continue
        begin = len(ids)
        for place, token in enumerate(tokens, begin):
            if isinstance(token, int):
                ids.append(token)
                continue
            ids.append(0)
            if isinstance(token, Coord):
                coords.append((place, token.value))
            elif isinstance(token, Size):
                sizes.append((place, token.width, token.height))
            else:
                assert not isinstance(token, Previous), (
                    f"sequence {row.sequence_id}: a token that is not known"
                )
                raise AssertionError(f"sequence {row.sequence_id}: an image amid the text")
        own = np.arange(start, start + len(tokens))
        positions.append(own)
        slots.append(_slots(row.page_table, own, page_size))
        text.append(TextPart(begin, len(tokens), start, row.page_table))
        last.append(len(ids) - 1)
    return PrefillBatch(
        ids=np.array(ids, dtype=np.int64),
        positions=np.concatenate(positions).astype(np.int64, copy=False),
        slots=np.concatenate(slots),
        last=np.array(last, dtype=np.int64),
        blocks=keys,
        block_length=block_length,
        text=tuple(text),
        coord_places=np.array([place for place, _ in coords], dtype=np.int64),
        coord_values=np.array([value for _, value in coords], dtype=np.float32),
        size_places=np.array([place for place, _, _ in sizes], dtype=np.int64),
        size_values=np.array([(w, h) for _, w, h in sizes], dtype=np.float32).reshape(-1, 2),
    )


def _image(row: Row, block_length: int) -> ImageBlock | None:
    """Returns the image at the beginning of the row, after BOS; None without an image."""
    block = row.tokens[1] if len(row.tokens) > 1 else None
    if not isinstance(block, ImageBlock):
        return None
    assert row.start == 0, f"sequence {row.sequence_id}: an image at position {row.start + 1}"
    assert block.num_positions == block_length - 1, (block.num_positions, block_length)
    return block


def _slots(page_table: tuple[int, ...], positions: np.ndarray, page_size: int) -> np.ndarray:
    """Returns the slots of ``positions``, int64."""
    pages = np.array(page_table, dtype=np.int64)
    page, offset = np.divmod(positions, page_size)
    slots: np.ndarray = pages[page] * page_size + offset
    return slots
