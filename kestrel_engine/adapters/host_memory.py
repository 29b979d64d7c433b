"""HostMemory: adapters in the memory of the host, ready to be copied to a GPU; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from ..types.adapter import Adapter


class HostMemory:
    """At most ``max_bytes``. For one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Adapter] = OrderedDict()
        self.num_bytes = 0

    def get(self, token: Hashable) -> Adapter | None:
        """The adapter of this version; None if it is not there."""
        found = self._kept.get(token)
        if found is not None:
            self._kept.move_to_end(token)
        return found

    def keep(self, token: Hashable, adapter: Adapter) -> None:
        if adapter.num_bytes > self._max_bytes or token in self._kept:
            return
        self._kept[token] = adapter
        self.num_bytes += adapter.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
