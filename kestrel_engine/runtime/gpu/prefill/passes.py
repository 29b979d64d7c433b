"""Groups the prompt rows of a step into passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ....types.requests import ImageBlock
from ....types.step import Row


def row_size(row: Row) -> tuple[int, int]:
    """Returns the number of image prefixes of a row (0 or 1) and its number of positions, those of later images
    included."""
    positions = sum(t.num_positions if isinstance(t, ImageBlock) else 1 for t in row.tokens)
    begins = row.start == 0 and len(row.tokens) > 1 and isinstance(row.tokens[1], ImageBlock)
    return int(begins), positions


def captured_passes(
    rows: Sequence[Row], block_length: int, *, max_blocks: int, max_text: int
) -> Iterator[list[Row]]:
    """Groups rows, in order, into as few groups as possible.

    A group has at most ``max_blocks`` image prefixes of ``block_length`` positions and at most ``max_text`` other
    positions. A row that exceeds these limits is a group of its own. Blocks are distributed evenly, because a single
    block runs at half the speed of four blocks.
    """
    blocks = sum(row_size(row)[0] for row in rows)
    even = math.ceil(blocks / max(1, math.ceil(blocks / max_blocks)))
    group: list[Row] = []
    held_blocks = held_text = 0
    for row in rows:
        own_blocks, positions = row_size(row)
        text = positions - own_blocks * block_length
        if group and (held_blocks + own_blocks > even or held_text + text > max_text):
            yield group
            group, held_blocks, held_text = [], 0, 0
        group.append(row)
        held_blocks += own_blocks
        held_text += text
    if group:
        yield group


def plain_passes(rows: Sequence[Row], max_positions: int) -> Iterator[list[Row]]:
    """Groups rows, in order, into groups of at most ``max_positions``. A longer row is a group of its own."""
    group: list[Row] = []
    held = 0
    for row in rows:
        _, positions = row_size(row)
        if group and held + positions > max_positions:
            yield group
            group, held = [], 0
        group.append(row)
        held += positions
    if group:
        yield group
