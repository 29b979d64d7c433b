"""Bounded threads that prepare pictures beside the event loop. Owns the threads and the jobs between loop and thread.

How many jobs may wait is the engine's decision (``max_queue``); the pool bounds only how many run. All methods but
``close`` belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from ..config import ImageLimits
from ..errors import EngineClosed, PixelsWaiting
from ..model_config import VisionConfig
from ..requests import PreparedImage
from .crops import Allocate, Piece, new_bytes, prepare
from .images import ImageSource, begin_image, num_pixels
from .prepared_cache import PreparedCache, in_namespace, source_key

HASHED_AT_ONCE_BYTES = 1024 * 1024
"""Up to this size encoded bytes are looked up on the event loop, half a millisecond at most: a repeat then doesn't wait
for a thread."""

MOST_THREADS_A_PICTURE = 16
"""Resizing to the crops takes three quarters of a picture's time, and splits into some thirty bands; decoding does not
split, but goes on beside it."""


@dataclass(frozen=True, slots=True, eq=False)
class Preprocessed:
    """``seconds``: the work alone, without waiting for a thread."""

    image: PreparedImage
    seconds: float


class PreprocessPool:
    """``threads`` pictures at once, so pixels in memory are bounded by ``threads`` times ``limits.max_pixels``, besides
    ``cache_bytes`` of prepared ones that are kept for repeats. ``max_waiting_pixels`` may wait for a thread. A picture
    that has the pool to itself is resized by its idle threads too, one of many by its own only."""

    def __init__(
        self,
        threads: int,
        limits: ImageLimits,
        vision: VisionConfig,
        *,
        cache_bytes: int = 0,
        max_waiting_pixels: int | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """``allocate``: memory for crops, such as a device reads without the host."""
        self._allocate = allocate or new_bytes
        self._max_waiting, self._waiting_pixels = max_waiting_pixels, 0
        self._limits, self._vision = limits, vision
        self._threads, self._running = threads, 0
        self._cache = PreparedCache(cache_bytes)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kestrel-preprocess")
        # Jobs wait here, not in the executor's queue, so that a cancelled one lets its picture go at once.
        self._free = asyncio.Semaphore(threads)
        self._closed = False

    async def prepare(
        self, source: ImageSource, namespace: str = "", *, principal: str = ""
    ) -> Preprocessed:
        """Opens and tiles one picture; first come, first served. Repeats are shared within a namespace.

        ``principal``: who asks. It does not change the order yet.

        A job cancelled while it waits never starts. One cancelled while it runs ends on its own (a thread can't be
        stopped; its length is bounded by the limits) and counts against ``threads`` until then. Raises what
        ``open_image`` raises, PixelsWaiting, and EngineClosed after ``close``.
        """
        key = None
        if isinstance(source, bytes) and len(source) <= HASHED_AT_ONCE_BYTES:
            began = time.perf_counter()
            self._check_open()
            key = source_key(source, namespace)
            kept = self._cache.find(key) if key is not None else None
            if kept is not None:
                return Preprocessed(kept, time.perf_counter() - began)
        await self._turn(source)
        try:
            self._check_open()
            # Only a picture that is alone: pieces of several would keep the interpreter from the step thread.
            share = 1 if self._running else min(MOST_THREADS_A_PICTURE, self._threads)
            future = self._executor.submit(self._run, source, namespace, key, max(1, share))
        except BaseException:
            self._free.release()
            raise
        self._running += 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Preprocessed] = loop.create_future()

        def tell(job: Future[Preprocessed]) -> None:
            # No loop any more: nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._job_done, job, result)

        future.add_done_callback(tell)
        # A caller that is cancelled cancels this, not the job.
        return await result

    async def _turn(self, source: ImageSource) -> None:
        """Waits for a thread. Only a picture that must wait is looked at for its size, and a single one always may."""
        if self._max_waiting is None or not self._free.locked():
            await self._free.acquire()
            return
        pixels = await asyncio.to_thread(num_pixels, source)
        if self._waiting_pixels and self._waiting_pixels + pixels > self._max_waiting:
            raise PixelsWaiting(
                f"pictures of {self._waiting_pixels} pixels wait to be decoded; with these {pixels} it would be more "
                f"than {self._max_waiting} (max_queued_pixels)"
            )
        self._waiting_pixels += pixels
        try:
            await self._free.acquire()
        finally:
            self._waiting_pixels -= pixels

    def flush(self) -> None:
        """Forgets the prepared pictures that are kept for repeats."""
        self._cache.flush()

    def close(self) -> None:
        """Takes no more jobs and waits for the running ones. Blocks: an event loop calls it in a thread. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=True)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("preprocessing is shut down")

    def _run(
        self, source: ImageSource, namespace: str, key: bytes | None, threads: int
    ) -> Preprocessed:
        started = time.perf_counter()

        def make() -> PreparedImage:
            begun = begin_image(source, self._limits)
            split = partial(self._split, threads=threads) if threads > 1 else None
            image = prepare(begun, self._vision, run=split, allocate=self._allocate)
            return in_namespace(image, namespace)

        image = self._cache.get(source, make, namespace, key)
        return Preprocessed(image, time.perf_counter() - started)

    def _split(self, pieces: Sequence[Piece], threads: int) -> None:
        """Calls all ``pieces``: the calling thread does, and of the others up to ``threads`` in all, if they are idle.

        Waits for nobody who has not begun, so it can't wait for itself. Raises what a piece raised.
        """
        left = deque(pieces)

        def work() -> None:
            while True:
                try:
                    piece = left.popleft()
                except IndexError:
                    return
                piece()

        helpers = []
        try:
            for _ in range(min(threads, len(pieces)) - 1):
                helpers.append(self._executor.submit(work))
        except RuntimeError:
            pass  # closed meanwhile: alone then
        try:
            work()
        finally:
            left.clear()
            running = [helper for helper in helpers if not helper.cancel()]
            wait(running)
        for helper in running:
            helper.result()

    def _job_done(self, job: Future[Preprocessed], result: asyncio.Future[Preprocessed]) -> None:
        self._running -= 1
        self._free.release()
        if result.done():
            return  # The caller is gone.
        error = job.exception()
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(job.result())
