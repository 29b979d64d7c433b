"""Everything in one thread: what can happen now happens in an order that a seed chooses.

An event loop whose time is a still clock. Between its rounds it calls the turns of the step loop and of the delivery
thread, and the work that others would give to a thread. If nothing can happen, time jumps to the next event.
"""

import asyncio
import math
import random
import selectors
from collections.abc import Callable
from typing import Any

from kestrel_engine import clock
from tests.clock import StillClock

_LATE, _LATEST_S = 0.1, 0.02
"""How often a thread begins late, and how late at most."""

_MOST_ROUNDS = 20_000
"""Rounds of the event loop in one instant."""

_MOST_CANCELS = 10
"""A task may begin another one, or wait for one, when it is cancelled."""


class Turns:
    """Takes the place of a thread: ``turn`` is called while it returns True, at instants that ``next_at`` gives.

    ``next_at``: the instant from which a turn does not wait; None while nothing is to be done.
    """

    def __init__(
        self, turn: Callable[[], bool], next_at: Callable[[], float | None], rng: random.Random
    ) -> None:
        self._turn, self._next_at, self._rng = turn, next_at, rng
        self._ended, self._not_before = False, 0.0

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return not self._ended

    def join(self, timeout: float | None = None) -> None:
        """Takes turns until the last one."""
        until = math.inf if timeout is None else clock.now() + timeout
        while not self._ended:
            at = self._next_at()
            if at is None or at > until:
                assert timeout is not None, "a thread waits for another, which waits for nothing"
                clock.sleep(max(0.0, until - clock.now()))
                return
            clock.sleep(max(0.0, at - clock.now()))
            self.turn()

    def next_at(self) -> float | None:
        at = None if self._ended else self._next_at()
        return None if at is None else max(at, self._not_before)

    def turn(self) -> None:
        self._ended = not self._turn()
        late = self._rng.random() < _LATE
        self._not_before = clock.now() + self._rng.random() * _LATEST_S if late else 0.0


class OneThread(asyncio.SelectorEventLoop):
    """The event loop. ``turns``: what else happens in this thread."""

    def __init__(self, still: StillClock, rng: random.Random) -> None:
        super().__init__()
        self._still, self._rng = still, rng
        self._files: Any = self._selector  # type: ignore[has-type]
        self._selector = _Rounds(self._files, self)
        self.turns: list[Turns] = []
        self._rounds, self._seen = 0, 0.0
        self.time = still.now  # type: ignore[method-assign]
        # Nothing runs in another thread.
        self.call_soon_threadsafe = self.call_soon  # type: ignore[method-assign]

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *arguments: Any) -> Any:  # type: ignore[override]
        """Calls the work later, between other events."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = work(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        late_s = self._rng.random() * _LATEST_S if self._rng.random() < _LATE else 0.0
        self.call_later(late_s, run)
        return future

    def close(self) -> None:
        self._selector = self._files
        super().close()

    def end_tasks(self) -> None:
        """Ends what is left of a world that broke, so that nothing of it runs later. Takes no more turns."""
        self.turns.clear()
        self._rounds = 0
        for _ in range(_MOST_CANCELS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1))
        raise AssertionError(f"cancelled, and they go on: {asyncio.all_tasks(self)}")

    def between_rounds(self, timeout: float | None) -> None:
        """``timeout``: seconds until the next timer, 0 if a callback is ready, None if there is neither."""
        now = self._still.now()
        self._rounds, self._seen = (self._rounds + 1, now) if now == self._seen else (0, now)
        assert self._rounds < _MOST_ROUNDS, "something goes on and on, and no time passes"
        if timeout == 0 and self._rng.random() < 0.5:
            return
        known = [(at, turns) for turns in self.turns if (at := turns.next_at()) is not None]
        due = [turns for at, turns in known if at <= now]
        if due:
            self._rng.choice(due).turn()
        elif timeout != 0:
            ats = [at for at, _ in known] + ([] if timeout is None else [now + timeout])
            assert ats and min(ats) < math.inf, "everyone waits, and nothing can come"
            self._still.advance(max(0.0, min(ats) - now))


class _Rounds:
    """Takes the place of the event loop's selector, which the loop asks between its rounds."""

    def __init__(self, own: selectors.BaseSelector, loop: OneThread) -> None:
        self._own, self._loop = own, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.between_rounds(timeout)
        return []
