"""Converts rows of prompt tokens to the arrays of one prefill pass, on the host with numpy.

The flat batch starts with all image prefixes (BOS and image, which attend in both directions), block by block, so that
their attention needs no gathering. The other tokens of all rows follow, row by row: text, and images later in a prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....types.requests import Coord, ImageBlock, Size, Token
from ....types.step import Previous, Row


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a row, or an image after its beginning: ``count`` tokens from index ``begin`` of the flat batch, at
    positions from ``start`` on."""

    begin: int
    count: int
    start: int
    page_table: tuple[int, ...]
    row: int = 0
    """The index of the row in the pass."""
    image: str | None = None
    """The key of the image. Its positions attend to all positions up to the last one of the image."""


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
    block_rows: tuple[int, ...]
    """The index of each block's row in the pass."""
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

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The flat batch as runs of tokens of one row: the row's index in the pass, and the number of tokens."""
        blocks = [(row, self.block_length) for row in self.block_rows]
        return blocks + [(part.row, part.count) for part in self.text]


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
    for index, (row, image) in enumerate(zip(rows, images, strict=True)):
        tokens, start = row.tokens, row.start
        if image is not None:
            block += 1
            tokens, start = tokens[2:], block_length
        if not tokens:
            assert image is not None, f"sequence {row.sequence_id}: a row without tokens"
            last.append(block * block_length - 1)
            continue
        table, position = row.page_table, start
        for is_image, run in itertools.groupby(tokens, _is_image):
            for later in run if is_image else ():
                assert isinstance(later, ImageBlock) and position != 1, (
                    f"sequence {row.sequence_id}: an image that is not in the row of its BOS"
                )
                count = later.num_positions
                assert count == block_length - 1, (count, block_length)
                text.append(TextPart(len(ids), count, position, table, index, later.key))
                ids += [0] * count
                position += count
            if is_image:
                continue
            begin = len(ids)
            for place, token in enumerate(run, begin):
                if isinstance(token, int):
                    ids.append(token)
                    continue
                ids.append(0)
                if isinstance(token, Coord):
                    coords.append((place, token.value))
                else:
                    assert isinstance(token, Size), (
                        f"sequence {row.sequence_id}: a token that is not known"
                    )
                    sizes.append((place, token.width, token.height))
            text.append(TextPart(begin, len(ids) - begin, position, table, index))
            position += len(ids) - begin
        own = np.arange(start, position)
        positions.append(own)
        slots.append(_slots(table, own, page_size))
        last.append(len(ids) - 1)
    return PrefillBatch(
        ids=np.array(ids, dtype=np.int64),
        positions=np.concatenate(positions).astype(np.int64, copy=False),
        slots=np.concatenate(slots),
        last=np.array(last, dtype=np.int64),
        blocks=keys,
        block_length=block_length,
        block_rows=tuple(index for index, image in enumerate(images) if image is not None),
        text=tuple(text),
        coord_places=np.array([place for place, _ in coords], dtype=np.int64),
        coord_values=np.array([value for _, value in coords], dtype=np.float32),
        size_places=np.array([place for place, _, _ in sizes], dtype=np.int64),
        size_values=np.array([(w, h) for _, w, h in sizes], dtype=np.float32).reshape(-1, 2),
    )


def _image(row: Row, block_length: int) -> ImageBlock | None:
    """Returns the image of the prefix that the row begins with; None if it begins with no prefix."""
    block = row.tokens[1] if row.start == 0 and len(row.tokens) > 1 else None
    if not isinstance(block, ImageBlock):
        return None
    assert block.num_positions == block_length - 1, (block.num_positions, block_length)
    return block


def _is_image(token: Token | Previous) -> bool:
    return isinstance(token, ImageBlock)


def _slots(page_table: tuple[int, ...], positions: np.ndarray, page_size: int) -> np.ndarray:
    """Returns the slots of ``positions``, int64."""
    pages = np.array(page_table, dtype=np.int64)
    page, offset = np.divmod(positions, page_size)
    slots: np.ndarray = pages[page] * page_size + offset
    return slots
