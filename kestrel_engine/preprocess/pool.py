"""PreprocessPool: prepares images in decoder processes. Owns the decoders, their memory budget and the next image.

A new image goes to one of ``processes`` decoders. If the header shows that the image is expensive (in time or memory),
the decoder answers with the cost instead of the crops. The image then waits for a decoder of expensive images. There
are few of these. Each is forked for one image, has a low priority (nice), and starts only if the memory budget has room
for the image. Therefore small images never wait for huge ones. While all decoders are busy, the pool first learns the
costs of the waiting images. It then decodes them in turns of their principals, and cheap images before expensive ones.
An image that has waited long enough is not overtaken.

The engine limits the number of waiting images (``max_queue``), and the pool the number of their pixels. All methods
belong to one event loop. Raw pixels whose crops the device makes need no decoder (raw_images.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import clock
from ..config.image_limits import ImageLimits
from ..errors import (
    EngineClosed,
    EngineOverloaded,
    ImageTooLargeError,
    ImageTooSlowError,
    PixelsWaiting,
    RuntimeFailure,
)
from ..fair_queue import FairQueue
from ..processes.template import confined
from ..types.model_config import VisionConfig
from .decoding.costs import FIELD, Cost
from .decoding.open_image import ImageSource, OnBackground, read_source
from .jobs import HeaderSize, ImageJob, PreparedLooks
from .known_bytes import KnownBytes
from .looks import WHOLE, selection_of, selection_values
from .measuring import MeasuredImage, measured
from .prepared_cache import PreparedCache, source_digest, source_key
from .processes.answers import MOST_TEXT, Answers
from .processes.decoder_process import MODULE, DecoderProcess
from .processes.segments import new_segment, write_segment
from .raw_images import RawImages

HASHED_AT_ONCE_BYTES = 256 * 1024
"""Encoded bytes of up to this size are hashed on the event loop, so that a repeated image does not wait for a thread.
This takes 0.1 ms on a processor with instructions for SHA-256, and 0.8 ms on others."""

ENCODED_SHARE = 10
"""A tenth of the cache holds encoded bytes (known_bytes.py). Those of a JPEG take about a tenth of its pixels."""

MOST_THREADS_AN_IMAGE = 16
"""Resizing to the crops takes three quarters of an image's time, and about thirty bands can be resized in parallel.
Decoding uses one thread, which runs beside them."""

CHEAP_SECONDS = 0.5
"""An image that may take longer is expensive. A photograph of 12 megapixels takes less."""

CHEAP_BYTES = 96 * 2**20
"""An image that may take more memory is expensive too. The limit is lower if half of the budget, divided by the number
of decoders, is less."""

EXPENSIVE_NICE = 10
"""Decoders of expensive images get a tenth of a processor that other processes use too."""

MOST_SPARE_BYTES = 8 * 2**20
"""A decoder keeps memory for the crops of an image of its last image's size, if they take no more than this."""

_NOTHING = Cost(0, 0, 0.0)


@dataclass(slots=True, eq=False)
class _Run:
    """The job of a busy decoder. ``failure``: the error of the job once the decoder has ended."""

    job: ImageJob
    timer: asyncio.TimerHandle
    expensive: bool
    failure: Exception | None = None


class PoolLoad(NamedTuple):
    """The images that a pool works on: ``images`` in preparation, for ``callers`` who wait; those ``queued`` and
    ``queued_expensive``, ``running`` and ``running_expensive``; ``waiting_pixels`` of the queues; ``expensive_bytes``
    in use; ``idle`` decoders."""

    images: int
    callers: int
    queued: int
    queued_expensive: int
    running: int
    running_expensive: int
    waiting_pixels: int
    expensive_bytes: int
    idle: int


class PreprocessPool:
    """Prepares ``processes`` cheap images at the same time, and a quarter as many expensive ones, at least one. Memory
    is limited to ``decode_bytes``, the memory of the processes themselves, and ``cache_bytes`` of prepared images and
    their encoded bytes. An image that is alone in the pool is resized by ``processes`` threads."""

    def __init__(
        self,
        processes: int,
        limits: ImageLimits,
        vision: VisionConfig,
        *,
        decode_bytes: int = 2**30,
        timeout_s: float = 30.0,
        cache_bytes: int = 0,
        max_waiting_pixels: int | None = None,
        device_pixels: int = 0,
        with_crop_keys: bool = False,
        confine: str = "auto",
    ) -> None:
        """``confine``: as RuntimeConfig.confine. ``device_pixels``: as in ``crops.cut_crops``. ``timeout_s``: limit on
        the seconds to decode one image. ``with_crop_keys``: whether each crop gets a key, by which the engine
        recognises equal crops."""
        self._device_pixels, self._with_crop_keys = device_pixels, with_crop_keys
        self._limits, self._vision = limits, vision
        self._processes, self._timeout_s, self._confine = processes, timeout_s, confine
        self._cheap = Cost(
            limits.max_pixels, min(CHEAP_BYTES, decode_bytes // 2 // processes), CHEAP_SECONDS
        )
        self._most_expensive, self._running_expensive = max(1, processes // 4), 0
        self._expensive_bytes = self._free_bytes = decode_bytes - processes * self._cheap.num_bytes
        self._max_waiting, self._waiting_pixels = max_waiting_pixels, 0
        self._answers = Answers(limits.max_pixels, vision, device_pixels)
        self._known_bytes = KnownBytes(cache_bytes // ENCODED_SHARE)
        self._cache = PreparedCache(cache_bytes - cache_bytes // ENCODED_SHARE)
        self._raw = RawImages(
            limits,
            vision,
            self._cache,
            device_pixels=device_pixels,
            with_crop_keys=with_crop_keys,
            threads=processes,
        )
        self._making: dict[bytes, ImageJob] = {}
        self._unknown, self._known, self._expensive = (FairQueue[ImageJob]() for _ in range(3))
        self._idle: list[DecoderProcess] = []
        self._runs: dict[DecoderProcess, _Run] = {}
        self._closed = False
        confined.start(MODULE)

    async def prepare(
        self,
        source: ImageSource,
        namespace: str = "",
        *,
        principal: str = "",
        is_high: bool = False,
    ) -> PreparedLooks:
        """Decodes and tiles one image, which may be an InRegion, InCrops or Tiled. Requests of one namespace share
        repeated images. ``is_high``: the request has the best priority. If all callers of an image are cancelled, a
        waiting image is dropped, and the process of an expensive image is killed.

        Raises the errors of ``begin_image``, ImageTooSlowError, PixelsWaiting, EngineOverloaded (no process can be
        started), RuntimeFailure, and EngineClosed after ``close``.
        """
        self._check_open()
        began = clock.now()
        source, selection = selection_of(source, self._vision.max_crops, self._vision.budget)
        background = source.colour if isinstance(source, OnBackground) else None
        if self._raw.takes(source):
            if selection == WHOLE:
                return await self._raw.prepare(source, namespace)
            digest: bytes | None = await self._raw.digest(source)
        elif isinstance(source, bytes):
            digest = await self._bytes_digest(source, namespace)
        else:
            digest = await asyncio.to_thread(source_digest, source)
        key = None if digest is None else source_key(digest, namespace, background, selection)
        if key is not None and (kept := self._cache.find(key)) is not None:
            return PreparedLooks(kept, clock.now() - began)
        if isinstance(source, bytes):
            payload = read_source(source, self._limits)
        else:
            payload = await asyncio.to_thread(read_source, source, self._limits)
        self._check_open()
        job = self._making.get(key) if key is not None else None
        if job is None:
            result = asyncio.get_running_loop().create_future()
            job = ImageJob(
                payload, principal, key, result, namespace, background, selection, digest
            )
            job.is_high = is_high
            if key is not None:
                self._making[key] = job
            job.wait_in(self._unknown)
            self._dispatch()
        elif is_high and not job.is_high:
            job.is_high = True
            if job.queue is not None:
                job.wait_in(job.queue)
        del payload, source
        prepared: PreparedLooks = await self._result_of(job)
        return prepared

    async def measure(
        self, source: ImageSource, *, principal: str = "", is_high: bool = False
    ) -> MeasuredImage:
        """The size and the crops of an image, an InRegion, InCrops or Tiled, whose header alone a decoder reads. Raises
        as ``prepare``, but not what only decoding finds."""
        self._check_open()
        source, selection = selection_of(source, self._vision.max_crops, self._vision.budget)
        payload = await asyncio.to_thread(read_source, source, self._limits)
        self._check_open()
        if isinstance(payload, np.ndarray):
            size = HeaderSize(payload.shape[1], payload.shape[0])
        else:
            result = asyncio.get_running_loop().create_future()
            job = ImageJob(payload, principal, None, result, "", is_high=is_high, header_only=True)
            job.wait_in(self._unknown)
            self._dispatch()
            size = await self._result_of(job)
        return measured(size, selection, self._limits, self._vision)

    async def _result_of(self, job: ImageJob) -> Any:
        job.waiters += 1
        try:
            return await asyncio.shield(job.result)
        finally:
            job.waiters -= 1
            if not job.waiters:
                self._give_up(job)

    async def _bytes_digest(self, source: bytes, namespace: str) -> bytes:
        """The source digest of encoded bytes. Those that came before are not hashed."""
        digest = self._known_bytes.find(source, namespace)
        if digest is None:
            if len(source) <= HASHED_AT_ONCE_BYTES:
                digest = source_digest(source)
            else:
                digest = await asyncio.to_thread(source_digest, source)
            assert digest is not None, "bytes have one"
            self._known_bytes.keep(source, namespace, digest)
        return digest

    @property
    def load(self) -> PoolLoad:
        return PoolLoad(
            len(self._making),
            sum(job.waiters for job in self._making.values()),
            len(self._unknown) + len(self._known),
            len(self._expensive),
            len(self._runs),
            self._running_expensive,
            self._waiting_pixels,
            self._expensive_bytes - self._free_bytes,
            len(self._idle),
        )

    def flush(self) -> None:
        """Drops the prepared images that are kept for repeats."""
        self._cache.flush()
        self._known_bytes.flush()

    def close(self) -> None:
        """Refuses further images, fails the present ones with EngineClosed, and ends all decoders. Idempotent."""
        self._closed = True
        for queue in (self._unknown, self._known, self._expensive):
            while queue.peek() is not None:
                self._fail(queue.pop(), EngineClosed("preprocessing is shut down"))
        for decoder, run in list(self._runs.items()):
            decoder.close()
            self._end_run(decoder)
            self._fail(run.job, EngineClosed("preprocessing is shut down"))
        for decoder in self._idle:
            decoder.close()
        self._idle.clear()
        self._raw.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("preprocessing is shut down")

    def _dispatch(self) -> None:
        while not self._closed and self._next_expensive():
            self._start(self._expensive.pop(), None)
        while not self._closed and self._num_cheap < self._processes:
            if self._next(self._unknown) is not None:
                # If several images wait, the decoders first report their costs, because the cheapest goes first.
                crowded = self._next(self._known) is not None or len(self._unknown) > 1
                self._start(self._unknown.pop(), _NOTHING if crowded else self._cheap)
            elif self._next(self._known) is not None:
                self._start(self._known.pop(), self._cheap)
            else:
                return

    @property
    def _num_cheap(self) -> int:
        return sum(not run.expensive for run in self._runs.values())

    def _next(self, queue: FairQueue[ImageJob]) -> ImageJob | None:
        """The first job of ``queue`` that still waits in it."""
        while (job := queue.peek()) is not None and (job.result.done() or job.queue is not queue):
            queue.pop()
        return job

    def _next_expensive(self) -> bool:
        """Whether the first expensive image may start. Smaller ones do not overtake it, so it starts at some time."""
        job = self._next(self._expensive)
        return (
            job is not None
            and job.cost is not None
            and self._running_expensive < self._most_expensive
            and job.cost.num_bytes <= self._free_bytes
        )

    def _start(self, job: ImageJob, granted: Cost | None) -> None:
        """Gives ``job`` to an idle or a new decoder. ``granted``: the cost up to which the decoder prepares the image
        at once; None for an expensive image, which gets a separate decoder within the budget."""
        expensive = granted is None
        granted = granted or job.cost
        assert granted is not None and job.payload is not None
        alone = not self._runs and not len(self._known) and not expensive
        message = {
            "shape": job.payload.shape if isinstance(job.payload, np.ndarray) else None,
            "background": job.background,
            "header_only": job.header_only,
            "selection": selection_values(job.selection),
            "granted": granted._asdict(),
            "threads": min(MOST_THREADS_AN_IMAGE, self._processes) if alone else 1,
            "device_pixels": self._device_pixels,
            "crop_keys": self._with_crop_keys,
        }
        self._begin_run(job)
        with contextlib.ExitStack() as stack:
            try:
                source = new_segment()
                stack.callback(os.close, source)
                write_segment(source, job.payload)
                decoder = None if expensive else self._idle_decoder()
                decoder = decoder or self._new_decoder(expensive, granted.num_bytes)
            except OSError as error:
                text = f"no process can be started to decode images: {error.strerror}"
                self._fail(job, EngineOverloaded(text))
                return
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._too_slow, decoder)
            self._runs[decoder] = _Run(job, timer, expensive)
            if expensive and job.cost is not None:
                self._running_expensive += 1
                self._free_bytes -= job.cost.num_bytes
            with contextlib.suppress(
                OSError
            ):  # The decoder has just ended. Its end is reported next.
                decoder.send(message, source)

    def _idle_decoder(self) -> DecoderProcess | None:
        """Returns a decoder that accepts an image, no longer idle; None if there is none."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.is_ready():
                return decoder
        return None

    def _new_decoder(self, expensive: bool, num_bytes: int) -> DecoderProcess:
        return DecoderProcess(
            self._limits,
            self._vision,
            self._answered,
            num_bytes=max(num_bytes, self._cheap.num_bytes),
            confine=self._confine,
            nice=EXPENSIVE_NICE if expensive else 0,
        )

    def _answered(self, decoder: DecoderProcess, message: dict[str, Any]) -> None:
        """Handles the answer of a decoder to its job, or the decoder's end."""
        run = self._runs.get(decoder)
        if run is None:
            # It ended while it was idle, or an image that controls it sent a second answer.
            decoder.close()
            if decoder in self._idle:
                self._idle.remove(decoder)
            return
        try:
            outcome = self._answers.read(message, run.job, decoder.crops, run.failure)
        except OSError as error:
            decoder.close()
            outcome = EngineOverloaded(f"no memory is available for an image: {error.strerror}")
        except Exception as error:  # An image that controls its decoder chose the answer.
            decoder.close()
            outcome = RuntimeFailure(f"a decoder sent an invalid answer: {error!r}"[:MOST_TEXT])
        self._end_run(decoder)
        if run.expensive:
            decoder.close()
        if isinstance(outcome, Cost):
            self._learn_cost(run.job, outcome)
        elif isinstance(outcome, HeaderSize):
            self._finish(run.job, outcome)
        elif isinstance(outcome, PreparedLooks):
            if decoder.is_open:
                # The image keeps its segment. A large new one is not prepared: the next image may be small.
                num_bytes = sum(look.num_bytes for look in outcome.looks)
                decoder.renew_crops(num_bytes if num_bytes <= MOST_SPARE_BYTES else 0)
            self._finish(run.job, outcome)
        else:
            self._fail(run.job, outcome)
        if decoder.is_open:
            self._idle.append(decoder)
        self._dispatch()

    def _learn_cost(self, job: ImageJob, cost: Cost) -> None:
        """Queues ``job`` by the cost that its decoder found in the header, if the limits allow it."""
        job.cost = cost
        job.expensive = cost.num_bytes > self._cheap.num_bytes or cost.seconds > self._cheap.seconds
        if job.result.done():
            return
        if job.expensive and cost.num_bytes > self._expensive_bytes:
            text = f"takes {cost.num_bytes} bytes to decode, the limit is {self._expensive_bytes}"
            self._fail(job, ImageTooLargeError(FIELD, text))
        elif (
            self._max_waiting is not None
            and self._waiting_pixels
            and self._waiting_pixels + cost.pixels > self._max_waiting
        ):
            text = (
                f"images of {self._waiting_pixels} pixels wait to be decoded; with the {cost.pixels} of this image "
                f"they would exceed the limit of {self._max_waiting} (max_queued_pixels)"
            )
            self._fail(job, PixelsWaiting(text))
        else:
            job.waits = True
            self._waiting_pixels += cost.pixels
            job.wait_in(self._expensive if job.expensive else self._known)

    def _begin_run(self, job: ImageJob) -> None:
        self._waiting_pixels -= job.cost.pixels if job.waits and job.cost else 0
        job.waits, job.queue = False, None

    def _end_run(self, decoder: DecoderProcess) -> None:
        run = self._runs.pop(decoder)
        run.timer.cancel()
        if run.expensive and run.job.cost is not None:
            self._running_expensive -= 1
            self._free_bytes += run.job.cost.num_bytes

    def _too_slow(self, decoder: DecoderProcess) -> None:
        run = self._runs.get(decoder)
        if run is not None:
            text = f"took more than {self._timeout_s:g} s to decode"
            run.failure = ImageTooSlowError(FIELD, text)
            decoder.kill()

    def _give_up(self, job: ImageJob) -> None:
        """Drops ``job``, which has no more waiters, unless it is done."""
        if job.result.done():
            return
        for decoder, run in self._runs.items():
            if run.job is job:
                if run.expensive:
                    run.failure = EngineClosed("no request waits for it")
                    decoder.kill()
                return  # The decoder finishes a cheap image. The cache keeps its crops.
        self._begin_run(job)
        job.result.cancel()
        self._forget(job)

    def _finish(self, job: ImageJob, done: PreparedLooks | HeaderSize) -> None:
        if job.key is not None and isinstance(done, PreparedLooks):
            self._cache.keep_looks(job.key, done.looks)
        self._forget(job)
        if not job.result.done():
            job.result.set_result(done)

    def _fail(self, job: ImageJob, error: Exception) -> None:
        self._forget(job)
        if not job.result.done():
            job.result.set_exception(error)
            job.result.exception()  # Avoids asyncio's warning if all callers are gone.

    def _forget(self, job: ImageJob) -> None:
        """Removes the job's data. A later caller of the same image starts a new job."""
        job.payload = None
        if job.key is not None and self._making.get(job.key) is job:
            del self._making[job.key]
