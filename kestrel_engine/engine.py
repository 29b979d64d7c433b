"""InferenceEngine: the async front of one model.

Owns the parts and their lifetime, on one event loop. A request takes a place in the queue and passes requests/.
The step thread (steps/loop.py) owns what computes, the delivery thread (steps/delivery.py) what turns tokens into
updates. Updates of all requests come back together, at most once in a pause of the delivery thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, Unpack, overload

import numpy as np

from . import clock
from .adapters.lora import LoRA
from .adapters.references import checked_adapter_name
from .building.factory import Built, build_off_loop
from .building.kv_pool import out_of_memory
from .building.room import kept_images, prefix_pages
from .building.runtimes import decode_beside_of
from .callers.calls import SkillCalls
from .callers.lifetime import Lifetime
from .callers.profiling import ProfileRequest, take_profile
from .callers.watchdog import watch
from .config.runtime import RuntimeConfig
from .config.sizes import Sizes, slice_sizes
from .confinement import trial
from .errors import DeadlineExceeded, EngineClosed, ProfileError, RuntimeFailure
from .preprocess.looks import Tiled
from .preprocess.measuring import MeasuredImage
from .requests.open_requests import OpenRequests
from .requests.request import (
    CallerOptions,
    Request,
    RequestOptions,
    request_of,
)
from .requests.submitter import Submitter
from .runtime.profile import Profile
from .scheduler.budget import IDLE_SCALE, StepBudget
from .scheduler.policy import SchedulerPolicy
from .skills.registry import SkillRegistry
from .skills.rule_check import RuleCheck
from .steps.delivery import Delivery, DeliveryThread
from .steps.loop import EngineLoop
from .steps.refining import Refining
from .types.adapter import AdapterCounts
from .types.events import EngineMetrics, EngineResult, StreamUpdate
from .types.info import (
    CompileCounts,
    EngineInfo,
    MaskCounts,
    PlaceCounts,
    SchedulerStats,
    SkillDescription,
)
from .types.observer import Observer
from .types.progress import Progress
from .types.requests import PreparedImage, PreparedTiles
from .types.stream import EngineStream

__all__ = ["EngineMetrics", "EngineResult", "EngineStream", "InferenceEngine", "StreamUpdate"]

logger = logging.getLogger(__name__)

FLUSH_PATIENCE_S = 10.0
"""Seconds that ``flush_caches`` waits for the step in progress."""

STOP_PATIENCE_S = 5.0
"""Seconds that shutdown waits for the running step."""


class InferenceEngine(SkillCalls):
    """Serves the skills of one model. Made by ``create``; used from the event loop that created it."""

    def __init__(
        self,
        config: RuntimeConfig,
        built: Built,
        skills: SkillRegistry | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        """Takes a built runtime; ``create`` is the usual way in. Must be called on a running event loop."""
        self._config = config
        self._built = built
        skills = skills or SkillRegistry.default()
        available = skills.available(built.model)
        self.info: EngineInfo = dataclasses.replace(built.info, skills=available)
        """What this engine serves."""
        self.skills: tuple[SkillDescription, ...] = skills.descriptions(built.model)
        """What each of ``info.skills`` takes."""
        sizes = built.sizes
        self._aio = asyncio.get_running_loop()
        self._open = OpenRequests(
            self.info.model, observer, self._note_idle, self.info.image_positions
        )
        self._delivery = DeliveryThread(
            self._deliver_threadsafe,
            lambda i: self._loop.abort(i),
            lambda i, row: self._loop.refine(i, row),
            Refining(built.model.vision) if built.runtime.limits.refines else None,
        )
        self._loop = EngineLoop(
            built.runtime,
            self._delivery,
            policy=_policy(config, sizes, built),
            observer=observer,
            depth=sizes.steps_out,
            check_rule=RuleCheck(built.model),
        )
        self._lifetime = Lifetime(self._loop)
        self._submitter = Submitter(
            config,
            built,
            skills,
            self._loop,
            self._open,
            self._lifetime,
            observer,
            self._note_idle,
        )
        self._start()
        self._watchdog = asyncio.create_task(self._watch())
        self._is_profiling = False
        self.is_stuck = False
        """After shutdown: a step did not end, and its thread was left behind. The process can only end by os._exit."""
        self._idle = asyncio.Event()

    def _start(self) -> None:
        self._delivery.start()
        self._loop.start()

    @classmethod
    async def create(
        cls,
        config: RuntimeConfig | None = None,
        *,
        skills: SkillRegistry | None = None,
        api_key: str | None = None,
        progress: Progress | None = None,
        observer: Observer | None = None,
        lora: LoRA | None = None,
    ) -> InferenceEngine:
        """Loads the model off the event loop and warms it up.

        ``api_key``: the key of ``config.adapter_sources.api``, by default that of the released models; requests may
        then name fine-tunes, and nothing else needs a key. ``progress`` is called with (done bytes, total bytes, what).
        ``lora``: applies to all requests that name no adapter. Raises ConfigError or ModelLoadError.
        """
        config = config or RuntimeConfig()
        if api_key is not None:
            sources = config.adapter_sources.with_key(api_key)
            config = dataclasses.replace(config, adapter_sources=sources)
        try:
            confined = await asyncio.to_thread(trial.check, config.confine)
        except OSError as error:
            raise RuntimeFailure(f"no process can be started: {error.strerror}") from None
        logger.info("decoders: %s", confined)
        built = await build_off_loop(config, progress, lora)
        return await cls.warmed(config, built, skills=skills, observer=observer)

    @classmethod
    async def warmed(
        cls,
        config: RuntimeConfig,
        built: Built,
        *,
        skills: SkillRegistry | None = None,
        observer: Observer | None = None,
    ) -> InferenceEngine:
        """An engine on parts that are there, warmed up. Raises ConfigError and RuntimeFailure."""
        engine = cls(config, built, skills, observer=observer)
        began = clock.now()
        try:
            await engine._warm_up()
        except RuntimeFailure as error:
            await engine.shutdown(grace_s=0)
            if error.out_of_memory:
                raise out_of_memory(config, built.sizes.max_batch_size, str(error)) from error
            raise
        except BaseException:
            await engine.shutdown(grace_s=0)
            raise
        if built.compiling is not None:
            built.compiling.note_serving(engine._loop.thread)
            if config.kernel_cache_dir is not None and built.compiling.counts.compiled:
                logger.warning(
                    "%d kernels were not in %s, or were made there by another installation or for other settings; they "
                    "were compiled now",
                    built.compiling.counts.compiled,
                    config.kernel_cache_dir,
                )
        load = dataclasses.replace(engine.info.load, warm_up_s=clock.now() - began)
        engine.info = dataclasses.replace(engine.info, load=load)
        return engine

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests now: it is open, and its step thread is alive and makes progress."""
        return self._lifetime.is_ready

    @property
    def num_requests(self) -> int:
        """Requests accepted and unfinished."""
        return len(self._open) + len(self._submitter.unsubmitted)

    @property
    def stats(self) -> SchedulerStats:
        """Requests in the batch, requests that wait for it, and KV pages, now. From any thread."""
        return self._loop.stats

    @property
    def adapter_counts(self) -> AdapterCounts:
        """The adapters that are loaded, now. From any thread."""
        library = self._submitter.adapters
        return AdapterCounts() if library is None else library.counts

    async def list_adapters(self) -> dict[str, int]:
        """The adapters of the operator's folder and those that are loaded, by name in order: the bytes of memory that
        each takes, 0 if it is not loaded."""
        library = self._submitter.adapters
        return {} if library is None else await library.known()

    async def load_adapter(self, name: str) -> int:
        """Loads an adapter, so that its first request does not wait for it. Returns the bytes that it takes.

        It stays until its memory is needed for another one. Raises what a request that names it raises.
        """
        self._lifetime.check_open()
        return await self._submitter.load_adapter(checked_adapter_name(name))

    def unload_adapter(self, name: str) -> bool:
        """Drops an adapter, which running requests keep until they end. Returns whether it was loaded. A later request
        loads it again. Raises InvalidRequest."""
        name, library = checked_adapter_name(name), self._submitter.adapters
        return library is not None and library.drop(name)

    @property
    def places(self) -> PlaceCounts:
        """How the principals share the places of accepted requests, now."""
        return self._submitter.places.counts

    @property
    def compiled(self) -> CompileCounts:
        """Kernels compiled or loaded so far. From any thread."""
        meter = self._built.compiling
        return CompileCounts() if meter is None else meter.counts

    @property
    def mask_counts(self) -> MaskCounts:
        """The work of following constraints so far. From any thread."""
        return self._submitter.constraints.counts

    async def submit(
        self,
        skill: str,
        image: Any = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> EngineStream:
        """Starts a registered skill, or "embed". Returns its stream once the images are prepared and the request
        queued.

        ``image``: an image, an InRegion or InCrops of one, a Tiled image for point and detect, a list of images in the
        order of the prompt, or None. A Tiled image takes a place in the queue for each look. ``settings`` may hold the
        adapter's name in place of ``options``. Raises RequestError, EngineOverloaded, DeadlineExceeded, EngineClosed;
        the stream raises later failures.
        """
        return await self.start(request_of(skill, image, arguments, settings, options))

    async def start(self, request: Request) -> EngineStream:
        """As ``submit``, for a request that the caller has made."""
        return await self._submitter.start(request)

    @overload
    async def prepare_image(
        self, image: Tiled, **options: Unpack[CallerOptions]
    ) -> PreparedTiles: ...

    @overload
    async def prepare_image(
        self, image: Any, **options: Unpack[CallerOptions]
    ) -> PreparedImage: ...

    async def prepare_image(
        self, image: Any, **options: Unpack[CallerOptions]
    ) -> PreparedImage | PreparedTiles:
        """Checks, decodes and tiles an image, an InRegion, InCrops or Tiled image ahead of the requests that will be
        about it, which take the result as their ``image``. Its ``request_id`` is for the observer. Raises ImageError,
        InvalidRequest, EngineOverloaded, DeadlineExceeded, EngineClosed."""
        request = request_of("", None, None, None, {"request_id": "", **options})
        return await self._submitter.prepare_image(dataclasses.replace(request, images=(image,)))

    async def measure_image(self, image: Any, **options: Unpack[CallerOptions]) -> MeasuredImage:
        """Size and crops of an image, an InRegion, InCrops or Tiled image, of which only the header is read. Raises
        as ``prepare_image``, but not what only decoding finds."""
        request = request_of("", None, None, None, {"request_id": "", **options})
        return await self._submitter.measure_image(dataclasses.replace(request, images=(image,)))

    async def count_positions(self, request: Request) -> int:
        """How many positions of the context the prompt of ``request`` takes for one look at its images, without its
        answer. No image is read and nothing computed. A prompt may exceed the context. Raises as ``start``."""
        return await self._submitter.count_positions(request)

    def cancel(self, request_id: str) -> int:
        """Ends the requests of this id as "cancelled", as soon as a step ends; returns how many. One whose image is
        still being prepared is not among them."""
        streams = self._open.named(request_id)
        for stream in streams:
            stream.cancel()
        return len(streams)

    async def flush_caches(self) -> None:
        """Drops prefixes, embeddings and prepared images that no request uses, before the next step.

        Raises DeadlineExceeded if the step in progress takes longer than FLUSH_PATIENCE_S; they are dropped after it.
        """
        self._submitter.images.flush()
        flushed = asyncio.wrap_future(self._loop.flush())
        await asyncio.wait({flushed}, timeout=FLUSH_PATIENCE_S)
        if not flushed.done():
            raise DeadlineExceeded(
                f"the step in progress takes more than {FLUSH_PATIENCE_S:g} s; the caches are emptied when it ends"
            )

    async def profile(
        self, request: ProfileRequest, *, begun: asyncio.Event, stop: asyncio.Event
    ) -> Profile:
        """Records what step thread and device do, and writes it; ``begun`` is set once it records, ``stop`` ends it
        before its bounds. One at a time. Raises ProfileError."""
        if self._is_profiling:
            raise ProfileError("a profile is being taken")
        if not self._lifetime.is_running:
            raise ProfileError("there is no engine to profile")
        self._is_profiling = True
        try:
            return await take_profile(
                self._loop,
                request,
                cuda=self.info.device.startswith("cuda"),
                patience_s=self._config.step_timeout_s,
                begun=begun,
                stop=stop,
            )
        finally:
            self._is_profiling = False

    async def shutdown(self, *, grace_s: float = 10.0) -> None:
        """Refuses new requests, waits up to ``grace_s`` seconds for open ones, fails the others with EngineClosed, and
        frees the model, unless a step hangs (``is_stuck``). Idempotent."""
        self._lifetime.closing()
        if self.num_requests and grace_s > 0:
            try:
                await asyncio.wait_for(self._until_idle(), grace_s)
            except TimeoutError:
                logger.warning(
                    "%d requests were unfinished after %.1f s", self.num_requests, grace_s
                )
        self._lifetime.closed()
        self._watchdog.cancel()
        self.is_stuck = not await asyncio.to_thread(self._loop.stop, STOP_PATIENCE_S)
        if not self.is_stuck:
            await asyncio.to_thread(self._delivery.stop)
        await asyncio.sleep(0)  # Lets the last deliveries reach their streams.
        self._open.fail_all(EngineClosed("the engine was shut down"))
        await self._submitter.close()

    async def __aenter__(self) -> InferenceEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def _call(
        self,
        skill: str,
        image: Any,
        arguments: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        stream: bool = False,
        request_id: str | None = None,
    ) -> EngineResult | EngineStream:
        started = await self.submit(skill, image, arguments, settings, request_id=request_id)
        if stream:
            return started
        async with started:
            return await started.result()

    def check_admission(
        self, principal: str = "", weight: float = 1.0, *, priority: str = "normal"
    ) -> None:
        """Raises EngineOverloaded if such a request would get no place now, EngineClosed if the engine accepts none."""
        self._submitter.check_admission(principal, weight, priority)

    def draw_seed(self, count: int = 1) -> int:
        """The first of ``count`` seeds in a row, for requests that name none."""
        return self._submitter.seeds.draw(count)

    def _deliver_threadsafe(self, deliveries: list[Delivery]) -> None:
        """On the delivery thread."""
        try:
            self._aio.call_soon_threadsafe(self._open.deliver, deliveries)
        except RuntimeError:  # The event loop is closed, and with it all streams.
            logger.debug("dropped %d deliveries: the event loop is closed", len(deliveries))

    async def _watch(self) -> None:
        failure = await watch(self._loop, self._config.step_timeout_s)
        self._lifetime.failed(failure)
        self._open.fail_all(failure)

    async def _until_idle(self) -> None:
        # Between its preparation and its submission a request counts as neither, so check again after each wake-up.
        while self.num_requests:
            self._idle.clear()
            await self._idle.wait()

    def _note_idle(self) -> None:
        if self.num_requests == 0:
            self._idle.set()

    async def _warm_up(self) -> None:
        """Sends a text and a blank image through the whole path, so that no caller waits for lazy initialisation."""
        settings = {"max_tokens": 2, "temperature": 0.0, "seed": 0}
        side = self._built.model.vision.crop_size
        await self.query(question="ready?", settings=settings)
        await self.caption(np.zeros((side, side, 3), np.uint8), settings=settings)


def _budget(config: RuntimeConfig, sizes: Sizes, built: Built) -> StepBudget:
    cuda = built.info.device.startswith("cuda")
    if decode_beside_of(config, built.model, cuda=cuda) != "slices":
        return StepBudget(
            prefill_positions=sizes.step_prefill_positions,
            crops=sizes.step_crops,
            pause=sizes.step_pause,
        )
    crops, positions = slice_sizes(sizes, config.itl_target_ms)
    crops = config.step_crops or crops
    positions = config.step_prefill_positions or positions
    # While nothing decodes, a step holds as much as without slices, for which there is memory (building/room.py).
    most = min(sizes.step_crops / crops, sizes.step_prefill_positions / positions)
    return StepBudget(
        prefill_positions=positions,
        crops=crops,
        idle_scale=math.floor(IDLE_SCALE * most),
        pause=config.step_pause or 0.0,
        slices=True,
    )


def _policy(config: RuntimeConfig, sizes: Sizes, built: Built) -> SchedulerPolicy:
    vision = built.model.vision
    itemsize = 4 if built.info.dtype == "float32" else 2
    crop_bytes = vision.grid**2 * vision.enc_dim * itemsize
    return SchedulerPolicy(
        budget=_budget(config, sizes, built),
        prefix_cache=config.prefix_cache,
        prefix_pages=prefix_pages(config, built.info),
        kept_embeddings=kept_images(config, built.model, itemsize),
        kept_crops=config.crop_cache_bytes // crop_bytes,
        aging_s=config.priority_aging_s,
        itl_target_s=config.itl_target_ms / 1e3,
    )
