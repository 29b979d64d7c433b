"""Seeds: the seeds of requests that name none. Owns the next one.

Any thread may draw one, because a thread checks requests with long texts.
"""

from __future__ import annotations

import itertools
import secrets


class Seeds:
    """``first``: seeds count up from it; None: they are random."""

    def __init__(self, first: int | None) -> None:
        self._next = None if first is None else itertools.count(first)

    def draw(self, count: int = 1) -> int:
        """The first of ``count`` seeds in a row."""
        if self._next is None:
            return secrets.randbits(53)
        first, *_ = itertools.islice(self._next, count)
        return first % 2**63
