"""PagePool: which KV pages are free, and how often each taken one is referenced. Ints only; no device memory here."""

from __future__ import annotations

import heapq


class PagePool:
    """A fixed number of pages with reference counts; a page is free exactly when its count is zero."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, num_pages
        self._references = [0] * num_pages
        # A heap. The lowest page is taken first: the host gives memory for as many pages as were taken at the same
        # time, and attention on a CPU reads consecutive pages without a copy.
        self._free = list(range(num_pages))
        self._num_used = 0

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_free_of(self, most: int) -> int:
        """Free pages that can be taken without that more than ``most`` pages have ever been taken."""
        return self.num_free - (self.num_pages - max(self._num_used, min(most, self.num_pages)))

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free pages with one reference each. Mutates. Callers check ``num_free`` first."""
        assert 0 <= count <= len(self._free), f"allocate({count}) with {len(self._free)} pages free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        # Pages that were never taken are above all others.
        self._num_used = max([self._num_used, *(page + 1 for page in pages)])
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
                heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        return self._references[page]

    def check(self) -> None:
        """Raises AssertionError unless the free list and the counts agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page, count in enumerate(self._references):
            assert count >= 0, f"page {page} has {count} references"
            assert (page in free) == (count == 0), (
                f"page {page}: {count} references, in free list: {page in free}"
            )
