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
from dataclasses import replace
from typing import Protocol, TypeVar

from ..errors import Displaced, EngineOverloaded, Quota
from ..fair_shares import FairShares, Member
from ..types.info import PlaceCounts
from ..types.submission import NUM_PRIORITIES

_Result = TypeVar("_Result")

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


class QueuePlace:
    """One request's place, from its acceptance to its end."""

    __slots__ = ("holder", "more", "occupant", "principal", "priority", "weight")

    def __init__(self, holder: _Holder, weight: float, priority: int) -> None:
        self.holder: _Holder | None = holder
        """None once the place was given back."""
        self.principal, self.weight, self.priority = holder.name, weight, priority
        self.occupant: Occupant | None = None
        self.more: list[QueuePlace] = []
        """The further places of a request with several images."""

    def pass_to(self, occupant: Occupant) -> None:
        self.occupant = occupant

    @property
    def is_waiting(self) -> bool:
        return self.occupant is None or self.occupant.is_waiting

    def displace(self, error: Displaced) -> None:
        if self.occupant is not None:
            self.occupant.displace(error)


class _Holder(Member):
    """A principal that has places."""

    __slots__ = ("waiting",)

    def __init__(self, principal: str, weight: float) -> None:
        super().__init__(principal, weight)
        self.waiting = [OrderedDict[QueuePlace, None]() for _ in range(NUM_PRIORITIES)]
        """By priority, oldest first; requests that were admitted in the meantime are among them."""

    def newest_waiting(self, best: int = 0) -> QueuePlace | None:
        """The newest waiting place of the least priority, not better than ``best``. Places of admitted requests are
        removed on the way, so that each is checked once."""
        for level in reversed(self.waiting[best:]):
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
        self.displaced = 0
        """Requests that lost their place to others, since the start."""
        self.shares: FairShares[_Holder] = FairShares(self.bound)

    @property
    def held(self) -> int:
        return self.shares.held

    @property
    def counts(self) -> PlaceCounts:
        holders = self.shares.members.values()
        return PlaceCounts(
            bound=self.bound,
            held=self.held,
            principals=len(holders),
            largest_held=max((holder.held for holder in holders), default=0),
            displaced=self.displaced,
        )

    def check(self, principal: str, weight: float, priority: int) -> None:
        """Raises EngineOverloaded if ``take`` would."""
        self._room(self._holder(principal, weight), priority)

    def take(self, principal: str, weight: float, priority: int) -> QueuePlace:
        """A place; another request may lose its own. Raises EngineOverloaded."""
        holder = self._holder(principal, weight)
        victim = self._room(holder, priority)
        self.shares.enter(holder)
        error = None if victim is None else self._displaced(victim)
        place = QueuePlace(holder, weight, priority)
        self.shares.hold(holder, 1)
        holder.waiting[priority][place] = None
        if victim is not None and error is not None:
            self.give_back(victim)
            self.displaced += 1
            victim.displace(error)
        return place

    def take_more(self, place: QueuePlace, count: int) -> None:
        """Adds ``count`` places to ``place``, or as many as there are: a request holds the memory of its images. Raises
        EngineOverloaded."""
        for _ in range(min(count, self.bound - 1)):
            more = self.take(place.principal, place.weight, place.priority)
            more.pass_to(place)
            place.more.append(more)

    def give_back(self, place: QueuePlace) -> None:
        """Gives back the place and those that were added to it. Idempotent."""
        for more in place.more:
            self.give_back(more)
        holder, place.holder = place.holder, None
        if holder is not None:
            holder.waiting[place.priority].pop(place, None)
            self.shares.hold(holder, -1)
            self.shares.leave(holder)

    def _holder(self, principal: str, weight: float) -> _Holder:
        """The principal's, or a new one that holds nothing yet."""
        return self.shares.members.get(principal) or _Holder(principal, weight)

    def _room(self, holder: _Holder, priority: int) -> QueuePlace | None:
        """The place that another request must give up; None if a place is free. Raises EngineOverloaded."""
        if self.held < self.bound + (self.reserved if priority == 0 else 0):
            return None
        is_within = holder.held == 0 or not self.shares.exceeds(holder, 1)
        above = [h for h in self.shares.above(holder) if h.held > 1]
        victim = None
        if is_within:
            victim = _first(above, best=0)
        if victim is None and priority == 0:
            others = [h for h in self.shares.members.values() if h is not holder]
            victim = _first([holder, *(others if is_within else above)], best=1)
        if victim is None:
            quota = self._quota(holder)
            raise EngineOverloaded(
                f"{self.held} requests are running or waiting; the bound is {self.bound} "
                f"(max_queue={self._max_queue} + max_batch_size={self._max_batch_size}); {_format(quota)}",
                quota=quota,
            )
        return victim

    def _displaced(self, victim: QueuePlace) -> Displaced:
        """The error of the request that had the place ``victim``."""
        assert victim.holder is not None
        quota = self._quota(victim.holder)
        why = "the request lost its place in the queue to one of a better claim"
        return Displaced(f"{why}: {_format(quota)}", quota=quota)

    def _quota(self, holder: _Holder) -> Quota:
        quota = self.shares.quota(holder, "places in the queue")
        return replace(quota, share=max(1, quota.share))


def _format(quota: Quota) -> str:
    holds = "holds" if quota.principal else "hold"
    return f"{quota.holder} {holds} {quota.held}, the share is {quota.share}"


def _first(holders: list[_Holder], *, best: int) -> QueuePlace | None:
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


async def until_displaced(place: QueuePlace, awaited: Awaitable[_Result]) -> _Result:
    """The result of ``awaited``. If the request loses its place before, cancels ``awaited`` and raises Displaced."""
    task = asyncio.current_task()
    assert task is not None, "requests are submitted from tasks"
    cancelling = task.cancelling()
    prepared = _Prepared(task)
    place.pass_to(prepared)
    try:
        return await awaited
    except asyncio.CancelledError:
        if prepared.error is None or task.uncancel() > cancelling:
            raise
        raise prepared.error from None
