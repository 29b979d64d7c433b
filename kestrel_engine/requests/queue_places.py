"""QueuePlaces: which requests the engine accepts, and which waiting request gives way to another. Owns the places.

A request has a place from its acceptance to its end: while its image is prepared, while it waits, while it runs. There
are ``max_queue`` + ``max_batch_size`` places, and a few more for the best priority. One principal may hold all of them
while no other calls. When none is free, a request of a principal below its share takes the place of the newest waiting
request of the principal that is furthest above its own; a request of the best priority also takes that of waiting work
of lesser priority. Requests for which something was computed keep their places. Pure data, for one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from ..errors import Displaced, EngineOverloaded, Quota
from ..types.info import PlaceCounts

_Result = TypeVar("_Result")

_NUM_PRIORITIES = 3
_WEIGHT_UNIT = 1000
_RESERVED_OF_QUEUE = 16
"""For each of this many places in the queue, one place is added for the best priority."""


class Occupant(Protocol):
    """A request that has a place, as far as it has come."""

    @property
    def is_waiting(self) -> bool:
        """Whether nothing was computed for it."""
        ...

    def displace(self, error: Displaced) -> None:
        """Ends it with ``error``."""
        ...


class Place:
    """One request's place, from its acceptance to its end."""

    __slots__ = ("_occupant", "holder", "more", "principal", "priority", "weight")

    def __init__(self, holder: _Holder, weight: float, priority: int) -> None:
        self.holder: _Holder | None = holder
        """None once the place was given back."""
        self.principal, self.weight, self.priority = holder.principal, weight, priority
        self._occupant: Occupant | None = None
        self.more: list[Place] = []
        """The further places of a request with several images."""

    def pass_to(self, occupant: Occupant) -> None:
        """From now on ``occupant`` has the place."""
        self._occupant = occupant

    @property
    def is_waiting(self) -> bool:
        """As of its occupant."""
        return self._occupant is None or self._occupant.is_waiting

    def displace(self, error: Displaced) -> None:
        """As of its occupant."""
        if self._occupant is not None:
            self._occupant.displace(error)


class _Holder:
    """A principal that has places. ``weight`` is in thousandths."""

    def __init__(self, principal: str, weight: int) -> None:
        self.principal, self.weight = principal, weight
        self.held = 0
        # By priority, oldest first; requests that were admitted in the meantime are among them.
        self._waiting: list[OrderedDict[Place, None]] = [
            OrderedDict() for _ in range(_NUM_PRIORITIES)
        ]

    def add(self, place: Place) -> None:
        self.held += 1
        self._waiting[place.priority][place] = None

    def remove(self, place: Place) -> None:
        self.held -= 1
        self._waiting[place.priority].pop(place, None)

    def newest_waiting(self, best: int = 0) -> Place | None:
        """The newest waiting place of the least priority, not better than ``best``. Places of admitted requests are
        removed on the way, so that each is checked once."""
        for level in reversed(self._waiting[best:]):
            while level:
                place = next(reversed(level))
                if place.is_waiting:
                    return place
                del level[place]
        return None


class QueuePlaces:
    """``take`` at a request's start, ``give_back`` at its end."""

    def __init__(self, max_queue: int, max_batch_size: int) -> None:
        self._max_queue, self._max_batch_size = max_queue, max_batch_size
        self.bound = max_queue + max_batch_size
        self.reserved = max(1, max_queue // _RESERVED_OF_QUEUE)
        """Places for the best priority alone."""
        self.held = 0
        self.displaced = 0
        """Requests that lost their place to others, since the start."""
        self._holders: dict[str, _Holder] = {}
        self._weights = 0

    @property
    def counts(self) -> PlaceCounts:
        return PlaceCounts(
            bound=self.bound,
            held=self.held,
            principals=len(self._holders),
            largest_held=max((holder.held for holder in self._holders.values()), default=0),
            displaced=self.displaced,
        )

    def check(self, principal: str, weight: float, priority: int) -> None:
        """Raises EngineOverloaded if ``take`` would."""
        self._room(self._holder(principal, weight), priority)

    def take(self, principal: str, weight: float, priority: int) -> Place:
        """A place; another request may lose its own. Raises EngineOverloaded."""
        holder = self._holder(principal, weight)
        victim = self._room(holder, priority)
        if principal not in self._holders:
            self._holders[principal] = holder
            self._weights += holder.weight
        error = None if victim is None else self._displaced(victim)
        place = Place(holder, weight, priority)
        holder.add(place)
        self.held += 1
        if victim is not None and error is not None:
            self.give_back(victim)
            self.displaced += 1
            victim.displace(error)
        return place

    def take_more(self, place: Place, count: int) -> None:
        """Adds ``count`` places to ``place``, or as many as there are: a request holds the memory of its images. Raises
        EngineOverloaded."""
        for _ in range(min(count, self.bound - 1)):
            more = self.take(place.principal, place.weight, place.priority)
            more.pass_to(place)
            place.more.append(more)

    def give_back(self, place: Place) -> None:
        """Gives back the place and those that were added to it. Idempotent."""
        for more in place.more:
            self.give_back(more)
        holder, place.holder = place.holder, None
        if holder is None:
            return
        holder.remove(place)
        self.held -= 1
        if holder.held == 0:
            del self._holders[holder.principal]
            self._weights -= holder.weight

    def _holder(self, principal: str, weight: float) -> _Holder:
        """The principal's, or a new one that holds nothing yet."""
        known = self._holders.get(principal)
        return known or _Holder(principal, max(1, round(weight * _WEIGHT_UNIT)))

    def _room(self, holder: _Holder, priority: int) -> Place | None:
        """The place that another request must give up; None if a place is free. Raises EngineOverloaded."""
        if self.held < self.bound + (self.reserved if priority == 0 else 0):
            return None
        weights = self._weights + (0 if holder.held else holder.weight)
        is_within = holder.held == 0 or (holder.held + 1) * weights <= holder.weight * self.bound
        others = [h for h in self._holders.values() if h is not holder]
        above = [h for h in others if h.held > 1 and h.held * weights > h.weight * self.bound]
        above.sort(key=lambda h: h.held / h.weight, reverse=True)
        victim = None
        if is_within:
            victim = _first(above, best=0)
        if victim is None and priority == 0:
            victim = _first([holder, *(others if is_within else above)], best=1)
        if victim is None:
            raise self._refusal(holder, weights)
        return victim

    def _displaced(self, victim: Place) -> Displaced:
        """The error of the request that had the place ``victim``."""
        assert victim.holder is not None
        return Displaced(
            f"the request lost its place in the queue to one of a better claim: "
            f"{self._format_quota(victim.holder, self._weights)}",
            quota=self._quota(victim.holder, self._weights),
        )

    def _refusal(self, holder: _Holder, weights: int) -> EngineOverloaded:
        return EngineOverloaded(
            f"{self.held} requests are running or waiting; the bound is {self.bound} "
            f"(max_queue={self._max_queue} + max_batch_size={self._max_batch_size}); "
            f"{self._format_quota(holder, weights)}",
            quota=self._quota(holder, weights),
        )

    def _quota(self, holder: _Holder, weights: int) -> Quota:
        share = max(1, self.bound * holder.weight // weights)
        return Quota(holder.principal, "places in the queue", holder.held, share)

    def _format_quota(self, holder: _Holder, weights: int) -> str:
        quota = self._quota(holder, weights)
        name = quota.principal or "callers without credentials"
        hold = "holds" if quota.principal else "hold"
        return f"{name} {hold} {quota.held}, the share is {quota.share}"


def _first(holders: list[_Holder], *, best: int) -> Place | None:
    for holder in holders:
        place = holder.newest_waiting(best)
        if place is not None:
            return place
    return None


class _Prepared:
    """A task that prepares a request."""

    is_waiting = True

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.error: Displaced | None = None
        """Set once the request has lost its place."""

    def displace(self, error: Displaced) -> None:
        if self.error is None:  # A request with several places may lose more than one.
            self.error = error
            self._task.cancel()


async def until_displaced(place: Place, work: Awaitable[_Result]) -> _Result:
    """The result of ``work``. If the request loses its place before, cancels ``work`` and raises Displaced."""
    task = asyncio.current_task()
    assert task is not None, "requests are submitted from tasks"
    cancelling = task.cancelling()
    prepared = _Prepared(task)
    place.pass_to(prepared)
    try:
        return await work
    except asyncio.CancelledError:
        if prepared.error is None or task.uncancel() > cancelling:
            raise
        raise prepared.error from None
