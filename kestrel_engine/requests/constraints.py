"""ConstraintCompiler: compiles the constraints of requests in a thread. Owns the constraints that wait for it, and the
compiled ones that were used last.

Principals take turns. Each constraint that waits is that of a request with a place in the queue, so places bound them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor

from ..errors import EngineClosed
from ..fair_queue import FairQueue
from ..skills.constraints.grammars import Grammar, Grammars
from ..types.constraint import Constraint
from ..types.info import MaskCounts
from .queue_places import QueuePlace
from .unsubmitted import Unsubmitted

MAX_CACHED = 32
"""Compiled constraints that are kept."""


class _Job:
    """A constraint to compile, for the requests that wait for it."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.compiled: asyncio.Future[Grammar] = asyncio.get_running_loop().create_future()
        self.waiting: Counter[str] = Counter()
        """Requests by principal."""


class ConstraintCompiler:
    """Requests with the same constraint share its compilation. For one event loop."""

    def __init__(self, grammars: Grammars, unsubmitted: Unsubmitted) -> None:
        self.grammars = grammars
        self._unsubmitted = unsubmitted
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-grammars")
        self.jobs: dict[Constraint, _Job] = {}
        self.queue: FairQueue[_Job] = FairQueue()
        self._running: _Job | None = None
        self._cache: OrderedDict[Constraint, tuple[str, Grammar]] = OrderedDict()
        """With the principal for which each was compiled; the one that was used last is the last."""
        self.is_closed = False

    @property
    def counts(self) -> MaskCounts:
        """The work of following constraints so far. From any thread."""
        return self.grammars.counts

    async def compiled(
        self, constraint: Constraint, deadline_at: float | None, place: QueuePlace
    ) -> Grammar:
        """The compiled constraint of a request.

        Raises InvalidRequest naming the place of an error, DeadlineExceeded, EngineClosed, and Displaced if the request
        loses its place meanwhile.
        """
        cached = self._cache.get(constraint)
        if cached is not None:
            self._cache.move_to_end(constraint)
            return cached[1].of(place.principal)
        if self.is_closed:
            raise EngineClosed("the engine was shut down")
        job = self.jobs.get(constraint)
        if job is None:
            job = self.jobs[constraint] = _Job(constraint)
        if not job.waiting[place.principal] and job is not self._running:
            self.queue.push(job, place.principal, place.priority)
        job.waiting[place.principal] += 1
        self._compile_next()
        try:
            grammar = await self._unsubmitted.run(
                asyncio.shield(job.compiled),  # Other requests may wait for the same constraint.
                place,
                deadline_at,
                "before the constraint was compiled",
            )
        except asyncio.CancelledError:
            if job.compiled.cancelled():
                raise EngineClosed("the engine was shut down") from None
            raise
        finally:
            job.waiting[place.principal] -= 1
            if not job.waiting[place.principal]:
                self.queue.remove(job, place.principal)
            if not job.waiting.total() and job is not self._running:
                self.jobs.pop(constraint, None)
        return grammar.of(place.principal)

    async def close(self) -> None:
        """Ends what waits with EngineClosed, and waits for the constraint in progress."""
        self.is_closed = True
        for job in self.jobs.values():
            if job is not self._running:
                job.compiled.cancel()
        await asyncio.to_thread(self._thread.shutdown)
        self.grammars.close()

    def _compile_next(self) -> None:
        """Starts the next constraint if none is being compiled."""
        while self._running is None and not self.is_closed and self.queue.peek() is not None:
            job = self.queue.pop()
            if job.compiled.done():  # It waited for several principals.
                continue
            self._running = job
            running = asyncio.get_running_loop().run_in_executor(
                self._thread, self.grammars.compile, job.constraint
            )
            running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Future[Grammar]) -> None:
        job, self._running = self._running, None
        assert job is not None
        del self.jobs[job.constraint]
        error = running.exception()
        if error is not None:
            job.compiled.set_exception(error)
            job.compiled.exception()  # All requests for it may have ended.
        else:
            grammar = running.result()
            job.compiled.set_result(grammar)
            principal = next(iter(+job.waiting), "")
            self.keep(job.constraint, principal, grammar)
        self._compile_next()

    def keep(self, constraint: Constraint, principal: str, grammar: Grammar) -> None:
        """Keeps a compiled constraint, in place of the oldest one of the principal with the most."""
        if len(self._cache) == MAX_CACHED:
            numbers = Counter(owner for owner, _ in self._cache.values())
            most = max(numbers.values())
            oldest = next(key for key, (owner, _) in self._cache.items() if numbers[owner] == most)
            del self._cache[oldest]
        self._cache[constraint] = principal, grammar
