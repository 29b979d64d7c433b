"""Pictures: which pictures are being encoded, and which embeddings the runtime keeps.

Owns, by content key, how many crops were scheduled and who still needs the picture. Embeddings that nobody needs stay
until there are more than ``capacity``, least recently used first out, for the case that a picture's pages were evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..types.requests import PreparedImage
from ..types.step import EncodeSlice


@dataclass(slots=True)
class _Picture:
    image: PreparedImage
    users: int = 0
    num_scheduled: int = 0

    @property
    def is_encoded(self) -> bool:
        return self.num_scheduled == self.image.num_crops


class Pictures:
    """acquire() when a prefix must be computed, release() when it is; encode() hands out crops in order of need."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[str, _Picture] = OrderedDict()
        # Keys that the runtime has not been told to drop yet; True if it holds the whole embedding.
        self._dropped: dict[str, bool] = {}

    def acquire(self, image: PreparedImage) -> None:
        """Adds a user; a picture that the runtime doesn't hold joins the queue for encoding."""
        picture = self._held.get(image.key)
        if picture is None:
            picture = self._held[image.key] = _Picture(image)
            if self._dropped.pop(image.key, False):
                picture.num_scheduled = image.num_crops
        picture.users += 1
        if picture.is_encoded:
            self._held.move_to_end(image.key)

    def release(self, key: str) -> None:
        """Takes a user away; what nobody needs may go."""
        picture = self._held[key]
        assert picture.users > 0, f"picture {key} is released once too often"
        picture.users -= 1
        if picture.users == 0 and not picture.is_encoded:
            self._drop(key)
        idle = [k for k, p in self._held.items() if p.users == 0]
        for each in idle[: max(0, len(idle) - self._capacity)]:
            self._drop(each)

    def is_encoded(self, key: str) -> bool:
        """Whether all crops were scheduled, so that a later part of the same step may use the embedding."""
        return self._held[key].is_encoded

    def encode(self, key: str, max_crops: int) -> EncodeSlice:
        """Schedules up to ``max_crops`` further crops of a picture."""
        picture = self._held[key]
        first = picture.num_scheduled
        picture.num_scheduled = min(first + max_crops, picture.image.num_crops)
        assert picture.num_scheduled > first, f"picture {key} has no crop left"
        return EncodeSlice(picture.image, first, picture.num_scheduled)

    def take_dropped(self) -> tuple[str, ...]:
        """Keys that the runtime may forget; each is named once."""
        dropped, self._dropped = tuple(self._dropped), {}
        return dropped

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def reset(self) -> None:
        """After a failed step nothing on the device is trusted: pictures with users are encoded anew, the rest goes."""
        for key in list(self._held):
            self._held[key].num_scheduled = 0
            if self._held[key].users == 0:
                del self._held[key]
            self._dropped[key] = False
        self._dropped = dict.fromkeys(self._dropped, False)

    def spoil(self, key: str) -> None:
        """The picture's embedding can't be trusted: it goes, and is computed anew for those who need it."""
        picture = self._held.get(key)
        if picture is None:
            if key in self._dropped:
                self._dropped[key] = False
            return
        picture.num_scheduled = 0
        if picture.users == 0:
            del self._held[key]
        self._dropped[key] = False

    def flush(self) -> None:
        """Forgets the pictures that nobody uses."""
        for key in [key for key, picture in self._held.items() if not picture.users]:
            self._drop(key)

    def check(self) -> None:
        """Raises AssertionError unless the bounds hold."""
        assert sum(1 for p in self._held.values() if p.users == 0) <= self._capacity
        assert all(p.is_encoded or p.users for p in self._held.values()), (
            "nobody waits for a half encoded picture"
        )
        assert not self._dropped.keys() & {k for k, p in self._held.items() if p.num_scheduled}

    def users(self) -> dict[str, int]:
        """Users by key, for checks."""
        return {key: picture.users for key, picture in self._held.items() if picture.users}

    def _drop(self, key: str) -> None:
        picture = self._held.pop(key)
        self._dropped[key] = picture.is_encoded
