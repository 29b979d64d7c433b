"""Turns: which steps compute favoured sequences only. Owns the balance of time between these and the others.

A step lasts as long as all that it computes, so a sequence beside a full batch gets its tokens as late as the batch
does. Sequences of principals within their share of the batch are favoured over those of principals beyond it, and those
of the best priority over the rest. While both run, steps of the favoured alone come between steps of all, so that the
others get a bounded part of the time. Without others, or without favoured ones, every step is for all.
"""

from __future__ import annotations

from collections.abc import Collection

from ..sequence import Sequence
from ..shares import Shares

_URGENT, _WITHIN, _BEYOND = range(3)
_OTHERS = {_URGENT: 0.25, _WITHIN: 1.0}
"""Seconds of steps for all that one second of steps for the favoured allows, by the rank of the favoured."""

_AHEAD_S = 1.0
"""After a time without favoured sequences, they may have the device for themselves for this many seconds. So answers
that come one after the other wait for no step of the others, who computed in between."""

_MOST_ALONE = 32
"""Most consecutive steps for the favoured alone."""


class Turns:
    """``begin`` before each step, ``ended`` when one has come back. Times are the scheduler's clock, in seconds.

    The balance also counts while no sequence is favoured: all time of the others then counts for them, up to what the
    favoured need for ``_AHEAD_S`` alone.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._favoured: int | None = None
        self._limit = _BEYOND
        self._num_alone = 0
        self._others = 0.0
        """What ``_OTHERS`` has for the favoured, or for the last ones."""
        self._credit = 0.0
        """Seconds that steps for all may take; negative if they took more."""
        self._num_out = 0
        """Steps for all that are out."""
        self._longest = 0.0
        """Seconds of the last step for all."""
        self._seen_at = 0.0
        self._ended_alone: bool | None = None

    @property
    def alone(self) -> bool:
        """Whether the current step is for the favoured alone."""
        return self._limit < _BEYOND

    def begin(self, running: Collection[Sequence], now: float, *, idle: bool) -> None:
        """Decides which sequences the next step computes. ``idle``: no step is out."""
        self._settle(now, idle=idle)
        favoured = self._favoured_of(running)
        if favoured != self._favoured:
            self._favoured, self._num_alone = favoured, 0
        if favoured is None:
            self._limit = _BEYOND
            return
        self._others = _OTHERS[favoured]
        self._credit = max(self._credit, -self._others * _AHEAD_S)
        # Steps for all that are out will be taken from the balance.
        enough = self._credit > (1 + self._num_out) * self._longest
        self._limit = _BEYOND if enough or self._num_alone == _MOST_ALONE else favoured

    def for_all(self) -> None:
        """Makes the current step one for all, because the favoured have nothing to compute."""
        self._limit = _BEYOND

    def launched(self) -> None:
        self._num_alone = self._num_alone + 1 if self.alone else 0
        self._num_out += not self.alone

    def ended(self, *, alone: bool) -> None:
        """Notes that a step has come back. Its time is that between two calls of ``begin``."""
        self._ended_alone = alone
        self._num_out -= not alone

    def of(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """The sequences of ``running`` that the step computes."""
        return [s for s in running if self.has_turn(s)] if self.alone else running

    def has_turn(self, sequence: Sequence) -> bool:
        """Whether the current step computes ``sequence``."""
        return self._limit == _BEYOND or self._rank(sequence) <= self._limit

    def _favoured_of(self, running: Collection[Sequence]) -> int | None:
        """The rank of the favoured, if others run beside them."""
        if len(self._shares.members) <= 1:
            # Counted, not looked up in each sequence: this runs before every step.
            for account in self._shares.members.values():
                return _URGENT if 0 < account.num_urgent < account.held else None
            return None
        ranks = {self._rank(sequence) for sequence in running}
        return min(ranks) if len(ranks) > 1 else None

    def _settle(self, now: float, *, idle: bool) -> None:
        """Adds the time of the step that has come back to the balance."""
        if self._ended_alone is not None:
            elapsed = now - self._seen_at
            if not self._ended_alone:
                self._longest = elapsed
                self._credit = max(self._credit - elapsed, -_AHEAD_S)
            else:
                self._credit += self._others * elapsed
            self._ended_alone, self._seen_at = None, now
        elif idle:
            self._seen_at = now

    def _rank(self, sequence: Sequence) -> int:
        assert sequence.account is not None
        if self._shares.exceeds(sequence.account):
            return _BEYOND
        return _URGENT if sequence.priority == 0 else _WITHIN
