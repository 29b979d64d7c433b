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
from typing import Protocol

from ...errors import KestrelError, RequestError, RuntimeFailure
from ...fair_queue import FairQueue
from ...types.info import MaskCounts
from .matcher_budget import MatcherBudget, Spender

logger = logging.getLogger(__name__)

_MOST_THREADS = 4


class MaskJob(Spender, Protocol):
    """A matcher that wants its next mask."""

    def compute(self) -> None:
        """Raises RequestError."""
        ...

    def done(self, error: KestrelError | None) -> None: ...


class MaskThreads:
    """The methods may be called from any thread. The threads start with the first one."""

    def __init__(
        self,
        budget: MatcherBudget | None = None,
        *,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``cpu_clock``: the processor time of the calling thread, in seconds."""
        self.counts = MaskCounts()
        self._budget = budget or MatcherBudget()
        self._cpu_clock = cpu_clock
        self._changed = threading.Condition()
        self._quick: FairQueue[MaskJob] = FairQueue()
        self._slow: FairQueue[MaskJob] = FairQueue()
        self._is_slow_running = False
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def put(self, job: MaskJob) -> None:
        """Has ``job`` computed. Of a principal's jobs, the matcher that has used least time comes first."""
        with self._changed:
            if not self._threads and not self._is_closed:
                self._start()
            queue = self._quick if job.is_quick else self._slow
            queue.push(job, job.principal, job.seconds)
            self._changed.notify()

    def drop(self, job: MaskJob) -> None:
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

    def _next(self) -> MaskJob | None:
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


def _computed(job: MaskJob) -> KestrelError | None:
    try:
        job.compute()
    except RequestError as error:
        return error
    except BaseException:  # The thread's edge. The library's panics are no Exceptions.
        logger.exception("a mask could not be computed")
        return RuntimeFailure("the server failed to follow the constraint")
    return None
