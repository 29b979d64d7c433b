"""Decode rows that begin with the same pages, as those of one image do: their keys can be read once for all.

Ints only; knows no tensor. The idea is that of cascade inference (FlashInfer) and Hydragen (arXiv 2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types.step import Row


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """Two or more rows of one token, their ``indices`` in the batch, and how many leading pages all have in common."""

    rows: list[Row]
    indices: list[int]
    num_pages: int


def find_groups(rows: Sequence[Row], page_size: int) -> tuple[list[SharedBeginning], set[int]]:
    """The groups worth forming, and the indices of the rows in them."""
    by_first_page: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if len(row.tokens) == 1 and row.start >= page_size:
            by_first_page.setdefault(row.page_table[0], []).append(index)
    groups = []
    for indices in by_first_page.values():
        if len(indices) < 2:
            continue
        members = [rows[i] for i in indices]
        num_pages = _common_pages(members, page_size)
        shared = num_pages * page_size
        own = [row.start + 1 - shared for row in members]
        # Rows are padded to the longest: that must not cost more than reading the beginning for each of them.
        if max(own) * len(own) - sum(own) < shared * (len(own) - 1):
            groups.append(SharedBeginning(members, indices, num_pages))
    return groups, {index for group in groups for index in group.indices}


def _common_pages(rows: Sequence[Row], page_size: int) -> int:
    """Pages that all tables begin with and that nobody writes to in this step."""
    tables = [row.page_table for row in rows]
    # What the first and the last in order have in common, all have.
    low, high = min(tables), max(tables)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return min(same, *(row.start // page_size for row in rows))
