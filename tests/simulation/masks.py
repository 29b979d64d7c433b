"""Masks of constrained texts in the same thread: what mask threads compute comes later, much later, or not at all.

The process that tries constraints first is left out: worlds ask for none that takes long to compile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from kestrel_engine.errors import RuntimeFailure
from kestrel_engine.skills.constraints.grammars import Matcher
from kestrel_engine.types.constraint import Constraint
from kestrel_engine.types.info import MaskCounts

_SECONDS, _LATE_S = (1e-5, 1e-3), (0.1, 5.0)


class Masks:
    """Takes the place of the class MaskThreads, and of its instances. ``lost``, ``slow``: shares of the masks."""

    def __init__(
        self, rng: random.Random, lost: float, slow: float, heard: Callable[[str], None]
    ) -> None:
        self._rng, self._lost, self._slow, self._heard = rng, lost, slow, heard
        self._timers: dict[Matcher, asyncio.TimerHandle] = {}
        self.counts = MaskCounts()

    def __call__(self) -> Masks:
        return self

    def put(self, work: Matcher) -> None:
        seconds = self._rng.uniform(*_SECONDS)
        error = None
        if self._rng.random() < self._lost:
            self._heard("lost mask")
            error = RuntimeFailure("the server failed to follow the constraint")
        elif self._rng.random() < self._slow:
            seconds = self._rng.uniform(*_LATE_S)
        work.seconds += seconds

        def end() -> None:
            del self._timers[work]
            if error is None:
                work.compute()
            work.done(error)

        self._timers[work] = asyncio.get_running_loop().call_later(seconds, end)

    def drop(self, work: Matcher) -> None:
        if (timer := self._timers.pop(work, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        assert not self._timers, "a mask is computed for nobody"


class Untried:
    """Takes the place of GrammarProcess."""

    def __init__(self, confine: str) -> None: ...

    def problem(self, constraint: Constraint) -> str:
        return ""

    def close(self) -> None: ...
