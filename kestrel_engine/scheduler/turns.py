"""Turns: which steps compute favoured sequences only. Owns the balance of time between these and the others.

A step lasts as long as all that it computes, so a sequence beside a full batch gets its tokens as late as the batch
does. Sequences of principals within their share of the batch are favoured over those of principals beyond it, and those
of the best priority over the rest. While both run, steps of the favoured alone come between steps of all, so that the
others get a bounded part of the time. Without others, or without favoured ones, every step is for all.
"""

from __future__ import annotations

from collections.abc import Collection

from .sequence import Sequence
from .shares import Shares

_URGENT, _WITHIN, _BEYOND = range(3)
_OTHERS = {_URGENT: 0.25, _WITHIN: 1.0}
"""Seconds of steps for all that one second of steps for the favoured allows, by the rank of the favoured."""

_MOST_ALONE = 32
"""Most consecutive steps for the favoured alone."""


class Turns:
    """``begin`` before each step, ``ended`` when one has come back. Times are the scheduler's clock, in seconds."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._favoured: int | None = None
        self._limit = _BEYOND
        self._num_alone = 0
        self._credit = 0.0
        """Seconds that steps for all may take; negative if they took too many."""
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
        favoured = self._favoured_of(running)
        if favoured != self._favoured:
            self._favoured, self._credit, self._num_alone = favoured, 0.0, 0
        self._settle(now, idle=idle)
        if favoured is None or self._credit > self._longest or self._num_alone == _MOST_ALONE:
            self._limit = _BEYOND
        else:
            self._limit = favoured

    def for_all(self) -> None:
        """Makes the current step one for all, because the favoured have nothing to compute."""
        self._limit = _BEYOND

    def launched(self) -> None:
        """Notes that the current step was launched."""
        self._num_alone = self._num_alone + 1 if self.alone else 0

    def ended(self, *, alone: bool) -> None:
        """Notes that a step has come back. Its time is that between two calls of ``begin``."""
        self._ended_alone = alone

    def of(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """The sequences of ``running`` that the step computes."""
        return [s for s in running if self.has_turn(s)] if self.alone else running

    def has_turn(self, sequence: Sequence) -> bool:
        """Whether the current step computes ``sequence``."""
        return self._limit == _BEYOND or self._rank(sequence) <= self._limit

    def _favoured_of(self, running: Collection[Sequence]) -> int | None:
        """The rank of the favoured, if others run beside them."""
        if self._shares.num_principals <= 1:
            # Counted, not looked up in each sequence: this runs before every step.
            account = next((sequence.account for sequence in running), None)
            both = account is not None and 0 < account.num_urgent < account.num_running
            return _URGENT if both else None
        ranks = {self._rank(sequence) for sequence in running}
        return min(ranks) if len(ranks) > 1 else None

    def _settle(self, now: float, *, idle: bool) -> None:
        """Adds the time of the step that has come back to the balance."""
        if self._ended_alone is not None:
            elapsed = now - self._seen_at
            if not self._ended_alone:
                self._longest = elapsed
                self._credit -= elapsed
            elif self._favoured is not None:
                self._credit += _OTHERS[self._favoured] * elapsed
            self._ended_alone, self._seen_at = None, now
        elif idle:
            self._seen_at = now

    def _rank(self, sequence: Sequence) -> int:
        assert sequence.account is not None
        if self._shares.is_over(sequence.account):
            return _BEYOND
        return _URGENT if sequence.priority == 0 else _WITHIN
