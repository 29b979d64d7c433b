"""Runs ``map`` for both clients: bounded, in order, with errors in place of results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from ..errors import InvalidRequestError, KestrelError

R = TypeVar("R")
I = TypeVar("I")  # noqa: E741

Progress: TypeAlias = Callable[[int, int | None], Any]
"""Called after each image with the number of finished images and the total, None if that is unknown."""


def run_bounded(
    items: Iterable[I], work: Callable[[I], R], concurrency: int, progress: Progress | None
) -> list[R | KestrelError]:
    """Calls ``work`` for every item, in at most ``concurrency`` threads. A KestrelError takes the place of its result.

    An iterator is read no faster than work starts. Any other exception ends the run.
    """
    total = _checked(items, concurrency)
    results: list[Any] = []
    running: dict[Future[R | KestrelError], int] = {}
    waiting, done = iter(items), 0

    def attempt(item: I) -> R | KestrelError:
        try:
            return work(item)
        except KestrelError as error:
            return error

    with ThreadPoolExecutor(concurrency, "kestrel-map") as pool:
        while True:
            for item in islice(waiting, concurrency - len(running)):
                running[pool.submit(attempt, item)] = len(results)
                results.append(None)
            if not running:
                return results
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                results[running.pop(future)] = future.result()
                done += 1
                if progress is not None:
                    progress(done, total)


async def gather_bounded(
    items: Iterable[I],
    work: Callable[[I], Awaitable[R]],
    concurrency: int,
    progress: Progress | None,
) -> list[R | KestrelError]:
    """Like ``run_bounded``, on an event loop."""
    total = _checked(items, concurrency)
    results: list[Any] = []
    waiting = iter(items)
    done = 0

    async def worker() -> None:
        nonlocal done
        for item in waiting:  # shared by all workers
            place = len(results)
            results.append(None)
            try:
                results[place] = await work(item)
            except KestrelError as error:
                results[place] = error
            done += 1
            if progress is not None:
                progress(done, total)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return results


def _checked(items: Iterable[Any], concurrency: int) -> int | None:
    """Returns the number of items if it is known. Raises InvalidRequestError."""
    if concurrency < 1:
        raise InvalidRequestError(f"concurrency={concurrency}: must be at least 1")
    if isinstance(items, (str, bytes)):
        raise InvalidRequestError("images: must be several images, not one; give a list")
    return len(items) if isinstance(items, Sized) else None
