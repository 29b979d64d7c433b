"""FairShares: who holds how much of a bounded resource, and who holds more than its share. Owns the members.

A resource is what callers take and give back: places in a queue or a batch, bytes of images or uploads. A member's
share is a part of the bound by its weight. A member may hold more while others leave some. What then happens to members
above their shares is the resource's own policy. fair_queue.py decides whose turn it is.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from .errors import Quota

WEIGHT_UNIT = 1000
"""Weights are added as integers, so that a sum that is kept over years stays exact."""


class Member:
    """A principal that uses the resource. ``weight`` is in thousandths, ``held`` in the resource's units."""

    __slots__ = ("held", "name", "uses", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, _thousandths(weight)
        self.held = 0
        self.uses = 0
        """What makes it a member, such as requests or images, whether it holds something for them or not."""


Some = TypeVar("Some", bound=Member)


class FairShares(Generic[Some]):
    """``enter`` and ``leave`` around each use, and ``hold`` in between."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.held = 0
        """What all members hold together."""
        self.members: dict[str, Some] = {}
        self._weights = 0

    def enter(self, member: Some) -> None:
        """Adds a use. ``member``: the one of that name in ``members``, or a new one."""
        if member.uses == 0:
            self.members[member.name] = member
            self._weights += member.weight
        member.uses += 1

    def hold(self, member: Some, amount: int) -> None:
        """The member holds so much more, or less if ``amount`` is negative."""
        member.held += amount
        self.held += amount

    def leave(self, member: Some) -> None:
        """Takes a use back. Without uses, a member is forgotten."""
        member.uses -= 1
        if member.uses == 0:
            del self.members[member.name]
            self._weights -= member.weight

    def weigh(self, member: Some, weight: float) -> None:
        """Sets the weight of a member, or of a new one."""
        before, member.weight = member.weight, _thousandths(weight)
        self._weights += member.weight - before if member.uses else 0

    def exceeds(self, member: Some, more: int = 0) -> bool:
        """Whether ``member`` holds more than its share, or would with ``more``."""
        weights = self._weights if member.uses else self.weights_with(member)
        return (member.held + more) * weights > member.weight * self.bound

    def above(self, taker: Some) -> list[Some]:
        """The members other than ``taker`` that hold more than their shares, now that ``taker`` is one: first the one
        that is furthest above."""
        weights = self.weights_with(taker)
        others = (each for each in self.members.values() if each is not taker)
        found = [each for each in others if each.held * weights > each.weight * self.bound]
        return sorted(found, key=lambda each: (each.held / each.weight, each.name), reverse=True)

    def share(self, member: Some, taker: Some | None = None) -> int:
        """The share of ``member``, now that ``taker`` is a member, too."""
        return self.bound * member.weight // self.weights_with(taker or member)

    def quota(self, member: Some, what: str) -> Quota:
        """``what``: the name of the resource."""
        return Quota(member.name, what, member.held, self.share(member))

    def weights_with(self, member: Some) -> int:
        """The weights of all members, with that of ``member``, which may be new."""
        return self._weights + (0 if member.uses else member.weight)

    def check(self) -> None:
        """Raises AssertionError unless the counts agree."""
        assert self.held == sum(each.held for each in self.members.values())
        assert self._weights == sum(each.weight for each in self.members.values())
        assert all(each.uses > 0 and each.held >= 0 for each in self.members.values())
        assert all(name == each.name for name, each in self.members.items())


def _thousandths(weight: float) -> int:
    return max(1, round(weight * WEIGHT_UNIT))
