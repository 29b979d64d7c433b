"""MaskThreads: compute the masks of constrained texts beside the step thread. Owns the threads, and the matchers that
wait for one.

Principals take turns. At most one thread works for slow matchers, so quick ones wait for none of these.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ... import clock
from ...errors import (
    ConstraintsCostly,
    InvalidRequest,
    KestrelError,
    Quota,
    RequestError,
    RuntimeFailure,
    path_text,
)
from ...fair_queue import FairQueue
from ...types.info import MaskCounts

if TYPE_CHECKING:
    from .grammars import Matcher

REQUEST_S = 2.0
"""Seconds that a request may use."""
PRINCIPAL_S = 10.0
"""Seconds that slow matchers of a principal may use at once."""
REFILL = 0.2
"""Seconds that a principal gets back in each second."""
_MOST_REMEMBERED = 1024


class MatcherBudget:
    """How much processor time a request and a principal may use to follow constraints. For one thread at a time.

    An ordinary mask takes 10 to 500 microseconds, so an ordinary answer uses some 50 ms. The time of quick matchers
    counts for no principal.
    """

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        """By principal: seconds that it has not got back yet, and the instant of that."""

    def spend(self, matcher: Matcher, seconds: float) -> KestrelError | None:
        """Notes that ``matcher`` used ``seconds`` more. Returns the error of its request if that is too much."""
        if matcher.seconds > REQUEST_S:
            return InvalidRequest(
                matcher.field,
                f"is too complex for this text: following it took {matcher.seconds:.1f} s of processor time, the limit "
                f"is {REQUEST_S:g} s; use a simpler constraint (an ambiguous grammar is slow), or lower max_tokens",
            )
        if matcher.is_quick:
            return None
        used = self._debt(matcher.principal) + seconds
        self._used[matcher.principal] = used, clock.now()
        if used <= PRINCIPAL_S:
            return None
        name, most = "seconds to follow constraints", int(PRINCIPAL_S)
        quota = Quota(matcher.principal, name, round(used), most)
        return ConstraintsCostly(
            f"{path_text(matcher.field)} is slow to follow, and slow constraints of {quota.holder} used {used:.1f} s "
            f"of processor time lately; the limit is {PRINCIPAL_S:g} s, and {REFILL:g} s come back each second; use "
            "simpler constraints, or fewer at a time",
            retry_after_s=max(1.0, (used - PRINCIPAL_S) / REFILL),
            quota=quota,
        )

    def _debt(self, principal: str) -> float:
        """The seconds that ``principal`` has not got back yet."""
        now = clock.now()
        if len(self._used) >= _MOST_REMEMBERED:
            entries = self._used.items()
            self._used = {n: (used, at) for n, (used, at) in entries if used > REFILL * (now - at)}
        used, at = self._used.get(principal, (0.0, now))
        return max(0.0, used - REFILL * (now - at))


logger = logging.getLogger(__name__)

_MOST_THREADS = 4


class MaskThreads:
    """The methods may be called from any thread. The threads start with the first one."""

    def __init__(self, *, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """``cpu_clock``: the processor time of the calling thread, in seconds."""
        self.counts = MaskCounts()
        self._budget = MatcherBudget()
        self._cpu_clock = cpu_clock
        self._changed = threading.Condition()
        self._quick: FairQueue[Matcher] = FairQueue()
        self._slow: FairQueue[Matcher] = FairQueue()
        self._is_slow_running = False
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def put(self, job: Matcher) -> None:
        """Has ``job`` computed. Of a principal's jobs, the matcher that has used least time comes first."""
        with self._changed:
            if not self._threads and not self._is_closed:
                self._start()
            queue = self._quick if job.is_quick else self._slow
            queue.push(job, job.principal, job.seconds)
            self._changed.notify()

    def drop(self, job: Matcher) -> None:
        """Removes ``job`` if no thread has taken it."""
        with self._changed:
            for queue in (self._quick, self._slow):
                queue.remove(job, job.principal)

    def close(self) -> None:
        """Ends the threads. Jobs that wait are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        for number in range(min(_MOST_THREADS, max(2, (os.cpu_count() or 2) // 4))):
            thread = threading.Thread(target=self._run, name=f"kestrel-masks-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            was_quick = job.is_quick
            began = self._cpu_clock()
            error = _computed(job)
            seconds = self._cpu_clock() - began
            with self._changed:
                job.seconds += seconds
                self.counts.masks += 1
                self.counts.seconds += seconds
                error = error or self._budget.spend(job, seconds)
                if not was_quick:
                    self._is_slow_running = False
                    self._changed.notify()
            job.done(error)

    def _next(self) -> Matcher | None:
        """Waits for a job. None: the threads end."""
        with self._changed:
            while not self._is_closed:
                if not self._is_slow_running and self._slow.peek() is not None:
                    self._is_slow_running = True
                    return self._slow.pop()
                if self._quick.peek() is not None:
                    return self._quick.pop()
                self._changed.wait()
        return None


def _computed(job: Matcher) -> KestrelError | None:
    try:
        job.compute()
    except RequestError as error:
        return error
    except BaseException:  # The thread's edge. The library's panics are no Exceptions.
        logger.exception("a mask could not be computed")
        return RuntimeFailure("the server failed to follow the constraint")
    return None
