"""Finds decode rows whose page tables begin with the same pages, such as rows about the same image.

The keys and values of the common pages can be read once for all of these rows, as in FlashInfer's cascade inference and
in Hydragen (arXiv 2402.05099). This module works on plain integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..types.step import Row


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """Two or more rows of one token each that have their first ``num_pages`` pages in common. ``indices``: the places
    of the rows in the batch."""

    rows: list[Row]
    indices: list[int]
    num_pages: int


def shared_beginnings(
    rows: Sequence[Row], page_size: int, *, at_least: int = 2
) -> Iterator[SharedBeginning]:
    """Finds all groups of ``at_least`` rows or more."""
    by_first_page: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if len(row.tokens) == 1 and row.start >= page_size:
            by_first_page.setdefault(row.page_table[0], []).append(index)
    for indices in by_first_page.values():
        if len(indices) >= at_least:
            members = [rows[i] for i in indices]
            yield SharedBeginning(members, indices, _common_pages(members, page_size))


def find_groups(rows: Sequence[Row], page_size: int) -> tuple[list[SharedBeginning], set[int]]:
    """Returns the groups that save reads in a padded batch, and the indices of all rows in these groups."""
    groups = []
    for group in shared_beginnings(rows, page_size):
        shared = group.num_pages * page_size
        own = [row.start + 1 - shared for row in group.rows]
        # Rows are padded to the longest row. The padding must not cost more than reading the common pages for each row.
        if max(own) * len(own) - sum(own) < shared * (len(own) - 1):
            groups.append(group)
    return groups, {index for group in groups for index in group.indices}


def _common_pages(rows: Sequence[Row], page_size: int) -> int:
    """Returns how many leading pages all rows have in common, without pages that this step writes."""
    tables = [row.page_table for row in rows]
    # All tables share the beginning that the smallest and the largest table in sort order share.
    low, high = min(tables), max(tables)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return min(same, *(row.start // page_size for row in rows))
