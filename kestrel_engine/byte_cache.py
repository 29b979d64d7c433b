"""ByteCache: values by key within a limit on their bytes; the least recently used go first. Owns that order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Values of at most ``max_bytes`` together; with 0, none. Belongs to one thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Key) -> Value | None:
        """Returns the value of ``key``, or None. This counts as a use."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def keep(self, key: Key, value: Value, num_bytes: int) -> None:
        """Stores a value of ``num_bytes``, in place of an earlier one of ``key``, and drops the least recently used
        ones beyond the limit. A value that alone exceeds it is not stored."""
        if num_bytes > self.max_bytes:
            return
        _, before = self._kept.pop(key, (None, 0))
        self._kept[key] = value, num_bytes
        self.num_bytes += num_bytes - before
        while self.num_bytes > self.max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.num_bytes -= dropped

    def flush(self) -> None:
        """Drops all values."""
        self._kept.clear()
        self.num_bytes = 0
