"""ConstraintCompiler: compiles the constraints of requests in a thread. Owns the constraints that wait for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ...errors import EngineClosed, EngineOverloaded
from ...skills.constraints.grammars import Grammar, Grammars
from ...types.constraint import Constraint
from ...types.info import MaskCounts
from .preparing import Preparing
from .queue_places import Place

MAX_COMPILING = 32
"""Constraints that may wait to be compiled, each of which takes up to a second."""


class ConstraintCompiler:
    """Requests with the same constraint share its compilation. For one event loop."""

    def __init__(self, grammars: Grammars, preparing: Preparing) -> None:
        self._grammars = grammars
        self._preparing = preparing
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-grammars")
        self._compiling: dict[Constraint, asyncio.Future[Grammar]] = {}

    @property
    def counts(self) -> MaskCounts:
        """The work of following constraints so far. From any thread."""
        return self._grammars.counts

    async def compiled(
        self, constraint: Constraint, timeout_s: float | None, place: Place
    ) -> Grammar:
        """The compiled constraint of a request.

        Raises InvalidRequest naming the place of an error, EngineOverloaded if too many constraints wait to be
        compiled, DeadlineExceeded, EngineClosed, and Displaced if the request loses its place meanwhile.
        """
        compiling = self._compile(constraint)
        try:
            return await self._preparing.run(
                asyncio.shield(compiling),  # Other requests may wait for the same constraint.
                place,
                timeout_s,
                "before the constraint was compiled",
            )
        except asyncio.CancelledError:
            if compiling.cancelled():
                raise EngineClosed("the engine was shut down") from None
            raise

    async def close(self) -> None:
        """Ends what waits with EngineClosed, and waits for the constraint in progress."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._grammars.close()

    def _compile(self, constraint: Constraint) -> asyncio.Future[Grammar]:
        """The compiled constraint, which several requests may await. Raises EngineOverloaded."""
        compiling = self._compiling.get(constraint)
        if compiling is None:
            if len(self._compiling) == MAX_COMPILING:
                raise EngineOverloaded(f"{MAX_COMPILING} constraints wait to be compiled")
            compiling = asyncio.get_running_loop().run_in_executor(
                self._thread, self._grammars.compile, constraint
            )
            self._compiling[constraint] = compiling

            def ended(future: asyncio.Future[Grammar]) -> None:
                del self._compiling[constraint]
                if not future.cancelled():
                    future.exception()  # All requests for it may have ended.

            compiling.add_done_callback(ended)
        return compiling
