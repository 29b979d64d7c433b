"""ImageMemory: which images are being encoded, and which embeddings and crops' features the runtime keeps.

Owns, by content key, how many crops were scheduled and how many sequences use the image. Embeddings without users stay
until there are more than ``capacity``, in case an image's pages are evicted; the least recently used goes first. Their
pixels and crops do not stay. An image with ``keeps_features`` is dropped as soon as it has no users.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ...types.requests import PreparedImage
from ...types.step import EncodeSlice


class CropFeatures:
    """Which crops' features the runtime keeps, so that crops that repeat in other images skip the tower. Owns, by the
    crops' content keys, what is kept and what is being computed to be kept. A crop is reused only when the step that
    computed it has come back, so a failed step loses nothing that others rely on. The least recently used go first.

    ``capacity``: the number of crops to keep; 0 keeps none. The runtime also holds those that steps underway add."""

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


@dataclass(slots=True)
class _Held:
    """``image``: None without users, because its pixels and crops take more memory than the embedding may."""

    num_crops: int
    image: PreparedImage | None = None
    users: int = 0
    num_scheduled: int = 0

    @property
    def is_encoded(self) -> bool:
        return self.num_scheduled == self.num_crops


class ImageMemory:
    """acquire() when a prefix must be computed, release() when it is; encode() hands out crops in order of need."""

    def __init__(self, capacity: int, kept_crops: int = 0) -> None:
        self._capacity = capacity
        self.crops = CropFeatures(kept_crops)
        self._held: OrderedDict[str, _Held] = OrderedDict()
        # Keys that the runtime has not dropped yet; True if it holds the whole embedding.
        self._dropped: dict[str, bool] = {}

    def acquire(self, image: PreparedImage) -> None:
        """Adds a user. An image that the runtime doesn't hold joins the queue for encoding."""
        held = self._held.get(image.key)
        if held is None:
            held = self._held[image.key] = _Held(image.num_crops)
            if self._dropped.pop(image.key, False):
                held.num_scheduled = image.num_crops
        if held.image is None:
            held.image = image
        held.users += 1
        if held.is_encoded:
            self._held.move_to_end(image.key)

    def release(self, key: str) -> None:
        """Removes a user. An image without users may be dropped."""
        held = self._held[key]
        assert held.users > 0 and held.image, f"image {key} is released once too often"
        held.users -= 1
        if held.users == 0:
            if not held.is_encoded or held.image.keeps_features:
                self._drop(key)
            held.image = None
        idle = [k for k, h in self._held.items() if h.users == 0]
        for each in idle[: max(0, len(idle) - self._capacity)]:
            self._drop(each)

    def is_encoded(self, key: str) -> bool:
        """Whether all crops were scheduled, so that a later part of the same step may use the embedding."""
        return self._held[key].is_encoded

    def encode(self, key: str, max_crops: int) -> EncodeSlice:
        """Schedules further crops of an image: up to ``max_crops`` to encode, and those between them that are kept."""
        held = self._held[key]
        image, first = held.image, held.num_scheduled
        assert image is not None, f"image {key} has no user"
        keys = image.crop_keys or ()
        reused, kept = [], []
        while held.num_scheduled < held.num_crops:
            index = held.num_scheduled
            crop_key = keys[index] if index < len(keys) else None
            if crop_key is not None and crop_key in self.crops:
                reused.append(index)
            elif index - first - len(reused) == max_crops:
                break
            elif crop_key is not None and self.crops.begin(crop_key):
                kept.append(index)
            held.num_scheduled += 1
        assert held.num_scheduled > first, f"image {key} has no crop left"
        self.crops.use(keys[index] for index in reused)
        return EncodeSlice(image, first, held.num_scheduled, tuple(reused), tuple(kept))

    def take_dropped(self) -> dict[str, bool]:
        """Keys that the runtime may drop, each with whether the runtime holds its whole embedding. Each key is returned
        once, unless it is given back."""
        dropped, self._dropped = self._dropped, {}
        return dropped

    def give_back_dropped(self, dropped: dict[str, bool]) -> None:
        """Takes the result of `take_dropped` back. No image was acquired in between."""
        self._dropped = {**dropped, **self._dropped}

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def reset(self) -> None:
        """After a failed step no embedding is trusted: images with users are encoded again, the others are dropped."""
        self.crops.clear()
        for key in list(self._held):
            self._held[key].num_scheduled = 0
            if self._held[key].users == 0:
                del self._held[key]
            self._dropped[key] = False
        self._dropped = dict.fromkeys(self._dropped, False)

    def spoil(self, key: str) -> None:
        """Drops the image's embedding, which can't be trusted. If the image has users, it is encoded again."""
        held = self._held.get(key)
        if held is None:
            if key in self._dropped:
                self._dropped[key] = False
            return
        held.num_scheduled = 0
        if held.users == 0:
            del self._held[key]
        self._dropped[key] = False

    def flush(self) -> None:
        """Drops the images without users, and all kept crops."""
        self.crops.clear()
        for key in [key for key, held in self._held.items() if not held.users]:
            self._drop(key)

    def check(self) -> None:
        """Raises AssertionError unless the bounds hold."""
        assert sum(1 for h in self._held.values() if h.users == 0) <= self._capacity
        assert all(h.is_encoded or h.users for h in self._held.values()), (
            "a half encoded image has no user"
        )
        assert all((h.image is None) == (h.users == 0) for h in self._held.values()), (
            "an image without users takes memory"
        )
        assert not self._dropped.keys() & {k for k, h in self._held.items() if h.num_scheduled}

    def users(self) -> dict[str, int]:
        """Users by key, for checks."""
        return {key: held.users for key, held in self._held.items() if held.users}

    def _drop(self, key: str) -> None:
        held = self._held.pop(key)
        self._dropped[key] = held.is_encoded
