"""FairQueue: decides which item is served next. Principals take turns. The items of a principal are ordered by rank."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Among the items of a principal, an item of lower rank comes first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, list[tuple[float, int, Item]]] = OrderedDict()
        self._order = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, item: Item, principal: str, rank: float) -> None:
        heapq.heappush(self._waiting.setdefault(principal, []), (rank, next(self._order), item))

    def peek(self) -> Item | None:
        """Returns the item that ``pop`` would remove; None if the queue is empty."""
        for items in self._waiting.values():
            return items[0][2]
        return None

    def remove(self, item: Item, principal: str) -> None:
        """Removes ``item`` of ``principal``. Without effect if it is not there."""
        items = self._waiting.get(principal, [])
        kept = [entry for entry in items if entry[2] is not item]
        if not kept:
            self._waiting.pop(principal, None)
        elif len(kept) < len(items):
            heapq.heapify(kept)
            self._waiting[principal] = kept

    def pop(self) -> Item:
        """Removes and returns the first item of the principal whose turn it is. Raises KeyError if the queue is
        empty."""
        principal, items = self._waiting.popitem(last=False)
        _, _, item = heapq.heappop(items)
        if items:
            self._waiting[principal] = items
        return item
