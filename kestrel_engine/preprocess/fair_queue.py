"""FairQueue: which item is served next. Principals take turns; each one's own items go by a rank. Knows no image."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """An item of a lower rank comes before those of the same principal with a higher one. Removing is of the owner:
    it marks an item and skips it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, list[tuple[float, int, Item]]] = OrderedDict()
        self._order = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, item: Item, principal: str, rank: float) -> None:
        heapq.heappush(self._waiting.setdefault(principal, []), (rank, next(self._order), item))

    def peek(self) -> Item | None:
        """The item that `pop` takes; None if there is none."""
        for items in self._waiting.values():
            return items[0][2]
        return None

    def pop(self) -> Item:
        """Takes the first item of the principal whose turn it is. Raises KeyError if there is none."""
        principal, items = self._waiting.popitem(last=False)
        _, _, item = heapq.heappop(items)
        if items:
            self._waiting[principal] = items
        return item
