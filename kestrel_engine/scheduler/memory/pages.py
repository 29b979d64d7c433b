"""PagePool: which KV pages are free, and how often each taken one is referenced. Ints only; no device memory here."""

from __future__ import annotations

import heapq


class PagePool:
    """A fixed number of pages with reference counts; a page is free exactly when its count is zero."""

    def __init__(self, num_pages: int, most: int | None = None) -> None:
        """``most``: how many pages should ever be taken; None: all."""
        assert num_pages >= 1, num_pages
        self.num_pages = num_pages
        self._most = num_pages if most is None else min(most, num_pages)
        self._references = [0] * num_pages
        # The lowest page is taken first: the host gives memory for as many pages as were taken at the same time, and
        # attention on a CPU reads consecutive pages without a copy. Pages that were never taken are above all others.
        self._num_used = 0
        """Pages that were ever taken."""
        self._returned: list[int] = []
        """Those of them that are free, as a heap."""

    @property
    def num_free(self) -> int:
        return len(self._returned) + self.num_pages - self._num_used

    @property
    def num_ready(self) -> int:
        """Free pages that can be taken without that more than ``most`` pages have ever been taken."""
        never = self._most - self._num_used
        # Not max(), which costs more: this runs for every page that a sequence gets.
        return len(self._returned) + (never if never > 0 else 0)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free pages with one reference each. Mutates. Callers check ``num_free`` first."""
        assert 0 <= count <= self.num_free, f"allocate({count}) with {self.num_free} pages free"
        pages: list[int] = []
        for _ in range(count):
            if self._returned:
                page = heapq.heappop(self._returned)
            else:
                page, self._num_used = self._num_used, self._num_used + 1
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds one reference to each of ``pages``, all of them taken. Mutates."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and can't be shared"
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drops one reference from each of ``pages``; the last one frees it. Mutates."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released once too often"
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._returned, page)

    def references(self, page: int) -> int:
        return self._references[page]

    def check(self) -> None:
        """Raises AssertionError unless the free list and the counts agree."""
        free = {*self._returned, *range(self._num_used, self.num_pages)}
        assert len(free) == self.num_free, "a page is in the free list twice"
        for page, count in enumerate(self._references):
            assert count >= 0, f"page {page} has {count} references"
            assert (page in free) == (count == 0), (
                f"page {page}: {count} references, in free list: {page in free}"
            )
