"""CropFeatures: which crops' features the runtime keeps, so that crops that repeat in other images skip the tower.

Owns, by the crops' content keys, what is kept and what is being computed to be kept. A crop is reused only when the
step that computed it has come back, so a failed step loses nothing that others rely on. The least recently used crops
are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from ...types.step import EncodeSlice


class CropFeatures:
    """``capacity``: the number of crops to keep; 0 keeps none. The runtime also holds those that steps underway add."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._underway: dict[str, bool] = {}
        """Keys that a step that is out computes; False if the result must be dropped."""
        self._dropped: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def use(self, keys: Iterable[str]) -> None:
        """Marks kept crops as used."""
        for key in keys:
            self._kept.move_to_end(key)

    def begin(self, key: str) -> bool:
        """Whether the step that computes this crop shall keep it: no other step does."""
        if not self._capacity or key in self._underway or key in self._kept:
            return False
        self._underway[key] = True
        return True

    def came_back(self, pieces: Iterable[EncodeSlice], *, failed: bool) -> None:
        """Takes the result of a step: what it computed may be reused from now on, unless the step failed."""
        for key in (key for piece in pieces for key in piece.kept_keys):
            if self._underway.pop(key) and not failed:
                self._kept[key] = None
            else:
                self._dropped.append(key)
        while len(self._kept) > self._capacity:
            self._dropped.append(self._kept.popitem(last=False)[0])

    def forget(self, keys: Iterable[str]) -> None:
        """Drops these crops, whose features can't be trusted."""
        for key in keys:
            if key in self._underway:
                self._underway[key] = False
            elif key in self._kept:
                del self._kept[key]
                self._dropped.append(key)

    def clear(self) -> None:
        """Drops all crops that are kept."""
        self._dropped += self._kept
        self._kept.clear()

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def take_dropped(self) -> tuple[str, ...]:
        """Keys that the runtime drops before the next step encodes; each is returned once."""
        # A key may have begun again since it was dropped. The runtime drops it first, and then keeps the new result.
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def check(self, underway: Collection[str]) -> None:
        """Raises AssertionError unless the bounds hold. ``underway``: what the steps that are out compute and keep."""
        assert len(self._kept) <= self._capacity
        assert self._underway.keys() == set(underway)
        assert not self._kept.keys() & self._underway.keys()
