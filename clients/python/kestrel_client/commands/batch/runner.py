"""Runs the rows of a batch with as many requests in flight as the server takes.

The number of requests in flight grows by one for each round of successes and is halved when the server refuses a
request because it is busy (additive increase, multiplicative decrease, as in TCP: RFC 5681). A row whose request was
refused, or lost with its server, is asked again. It fails only by an error that would come again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrel_client import (
    AnalyzeResult,
    AsyncKestrelClient,
    KestrelError,
    OverloadedError,
    PermissionDeniedError,
    RpcError,
    Task,
    UnauthenticatedError,
    UnavailableError,
)

from ..connection import BUSY
from ..parser import CommandError
from .journal import Journal, has_failed
from .rows import Row

FIRST_IN_FLIGHT = 4
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class Pace:
    """The limit on requests in flight, between 1 and ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(min(FIRST_IN_FLIGHT, most))
        self._shrunk_at = -1.0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def succeeded(self) -> None:
        self._limit = min(self._limit + 1 / self._limit, self._most)

    def refused(self, started: float) -> None:
        """Halves the limit, once for all requests that were in flight together. ``started``: when the request began."""
        if started > self._shrunk_at:
            self._limit = max(1.0, self._limit / 2)
            self._shrunk_at = time.monotonic()


@dataclass
class Summary:
    """What a run has done."""

    rows: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Rows and tasks that failed, by status."""
    refused: int = 0
    """Requests that were asked again, because the server was busy or away."""
    output_tokens: int = 0
    seconds: float = 0.0
    most_in_flight: int = 0


@dataclass(frozen=True)
class Runner:
    """Asks ``client`` for the tasks of each row and appends the results to ``journal``.

    ``options``: of every call. ``most``: the most requests in flight. ``patience_s``: how long no request may succeed
    before the run is given up. ``on_result``: called with each row and its result, before the result is written.
    """

    client: AsyncKestrelClient
    journal: Journal
    tasks: Callable[[Row], Mapping[str, Task]]
    options: Mapping[str, Any]
    most: int
    patience_s: float
    on_result: Callable[[Row, AnalyzeResult], None]
    on_done: Callable[[Summary, int], None]
    """Called after each row, with the number of requests in flight."""

    async def run(self, rows: Iterable[Row]) -> Summary:
        """Runs all rows. Raises CommandError if the server stays away or refuses the caller, and OSError if a result
        cannot be written."""
        summary, pace = Summary(), Pace(self.most)
        began = time.monotonic()
        last_success = [began]
        running: set[asyncio.Task[None]] = set()
        try:
            for row in rows:
                while len(running) >= pace.limit:
                    running = await _first_done(running)
                running.add(asyncio.create_task(self._row(row, summary, pace, last_success)))
                summary.most_in_flight = max(summary.most_in_flight, len(running))
                self.on_done(summary, len(running))
            while running:
                running = await _first_done(running)
                self.on_done(summary, len(running))
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            summary.seconds = time.monotonic() - began
        return summary

    async def _row(self, row: Row, summary: Summary, pace: Pace, last_success: list[float]) -> None:
        line: dict[str, Any] = {"image": row.image}
        if row.number is not None:
            line["row"] = row.number
        pause = _PAUSE_S
        while True:
            started = time.monotonic()
            try:
                result = await self.client.analyze(row.source, self.tasks(row), **self.options)
                for refused in result.errors.values():
                    if _is_passing(refused):
                        raise refused
            except KestrelError as error:
                if isinstance(error, (UnauthenticatedError, PermissionDeniedError)):
                    raise CommandError(f"{error.message} [{error.code.name}]") from None
                if not _is_passing(error):
                    line["error"] = _plain(error)
                    summary.errors[line["error"]["code"]] += 1
                    break
                waited = time.monotonic() - last_success[0]
                if waited > self.patience_s:
                    raise CommandError(
                        f"no request has succeeded for {waited:.0f} s: {error}. "
                        "The same command continues with the rows that are left"
                    ) from None
                pace.refused(started)
                summary.refused += 1
                await asyncio.sleep(max(pause, getattr(error, "retry_after_s", None) or 0.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                last_success[0] = time.monotonic()
                pace.succeeded()
                self.on_result(row, result)
                summary.output_tokens += result.usage.output_tokens
                summary.errors.update(each.code.name for each in result.errors.values())
                line |= result.to_dict()
                break
        self.journal.append(line)
        summary.rows += 1
        summary.failed += has_failed(line)


def _is_passing(error: KestrelError) -> bool:
    """Whether the same request may succeed later. The refusal of a call says when to come back, unless the message is
    too large; that of a task has a reason."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s is not None or error.reason in BUSY
    return isinstance(error, UnavailableError)


def _plain(error: KestrelError) -> dict[str, str]:
    if isinstance(error, RpcError):
        return {"code": error.code.name, "message": error.message, "reason": error.reason}
    return {"code": "CLIENT", "message": str(error), "reason": type(error).__name__}


async def _first_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits until a task is done, and returns the others. Raises the error of one that failed."""
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        error = each.exception()
        if error is not None:
            running -= done
            raise error
    return left
