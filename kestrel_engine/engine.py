"""InferenceEngine: the async front of one model.

Owns admission and the open streams, on one event loop. The step thread (steps/loop.py) owns what computes, the delivery
thread (steps/delivery.py) what turns tokens into updates. The skill checks a request, the pool prepares its image, the
skill builds the prompt, and the step thread takes it. Updates of all requests come back together, at most once in a
pause of the delivery thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, overload

import numpy as np

from .adapters.files import checked_adapter_name
from .adapters.library import AdapterLibrary, Lease
from .adapters.lora import LoRA
from .config import RuntimeConfig, Sizes
from .errors import (
    AdapterNotFound,
    DeadlineExceeded,
    EngineClosed,
    EngineOverloaded,
    InvalidRequest,
    KestrelError,
    ProfileError,
    RequestError,
    RuntimeFailure,
)
from .factory import Built, build
from .front.calls import SkillCalls
from .front.looks import LookGroup
from .front.open_requests import OpenRequest, OpenRequests
from .front.profiling import ProfileRequest, take_profile
from .front.queue_places import Place, QueuePlaces, until_displaced
from .front.request_options import check_timeout, check_weight, checked_priority, checked_request_id
from .front.stream import EngineStream
from .front.token_limit import token_limit
from .front.watchdog import watch
from .front.whole_image import prompt_in_region
from .preprocess.crop_keys import with_crop_keys
from .preprocess.crops import crop_boxes
from .preprocess.looks import Tiled
from .preprocess.pool import Preprocessed, PreprocessPool
from .preprocess.prepared_cache import Looks
from .runtime.gpu.memory import out_of_memory
from .runtime.profile import Profile
from .scheduler.budget import StepBudget
from .scheduler.policy import SchedulerPolicy
from .skills.base import SkillContext, SkillDefaults, SkillRequest
from .skills.constraints.grammars import Grammar, Grammars
from .skills.embed import EMBED, EmbedSkill
from .skills.prompts import build_prompt, check_context, check_images
from .skills.registry import SkillRegistry
from .skills.rule_check import RuleCheck, check_prompt
from .steps.delivery import Delivery, DeliveryThread
from .steps.loop import EngineLoop, Work
from .steps.refining import Refining
from .types.constraint import Constraint
from .types.embedding import EmbeddingSpec
from .types.events import EngineMetrics, EngineResult, StreamUpdate
from .types.info import CompileCounts, EngineInfo, MaskCounts, PlaceCounts, SchedulerStats
from .types.observer import ImageEvent, Observer
from .types.progress import Progress
from .types.requests import Coord, PreparedImage, PreparedTiles
from .types.submission import Submission
from .types.timings import FrontTimings

__all__ = ["EngineMetrics", "EngineResult", "EngineStream", "InferenceEngine", "StreamUpdate"]

logger = logging.getLogger(__name__)

FLUSH_PATIENCE_S = 10.0
"""Seconds that ``flush_caches`` waits for the step in progress."""

MAX_COMPILING = 32
"""Constraints that may wait to be compiled, each of which takes up to a second."""

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
        self._skills = skills or SkillRegistry.default()
        available = self._skills.available(built.model)
        self.info: EngineInfo = dataclasses.replace(built.info, skills=available)
        """What this engine serves."""
        self._sizes = config.sizes(cuda=built.info.device.startswith("cuda"))
        self._context = SkillContext(
            model=built.model,
            codec=built.codec,
            defaults=SkillDefaults(
                max_tokens=config.default_max_tokens,
                temperature=config.default_temperature,
                top_p=config.default_top_p,
                max_objects=config.default_max_objects,
                min_score=config.min_score,
                max_text_bytes=config.max_text_bytes,
            ),
            refines=built.runtime.limits.refines,
            calibration=built.calibration,
        )
        self._pool = PreprocessPool(
            self._sizes.preprocess_threads,
            config.image_limits,
            built.model.vision,
            decode_bytes=config.decode_bytes,
            timeout_s=config.decode_timeout_s,
            cache_bytes=config.image_cache_bytes,
            max_waiting_pixels=config.max_queued_pixels,
            device_pixels=built.device_pixels,
        )
        self._limits = built.runtime.limits
        self._adapters: AdapterLibrary | None = built.adapters
        self._grammars = Grammars(built.codec, built.model.text.vocab_size, built.model.ids.eos_id)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="kestrel-grammars")
        self._compiling: dict[Constraint, asyncio.Future[Grammar]] = {}
        self._places = QueuePlaces(config.max_queue, self._sizes.max_batch_size)
        self._observer = observer
        self._aio = asyncio.get_running_loop()
        self._open = OpenRequests(self.info.model, observer, self._note_idle)
        self._delivery = DeliveryThread(
            self._deliver_threadsafe,
            lambda i: self._loop.abort(i),
            lambda i, row: self._loop.refine(i, row),
            Refining(built.model.vision) if self._limits.refines else None,
        )
        self._loop = EngineLoop(
            built.runtime,
            self._delivery,
            policy=_policy(config, self._sizes, built),
            observer=observer,
            depth=self._sizes.steps_out,
            check_rule=RuleCheck(built.model),
        )
        self._delivery.start()
        self._loop.start()
        self._watchdog = asyncio.create_task(self._watch())
        self._failure: KestrelError | None = None
        self._ids = itertools.count(1)
        self._preparing = 0
        self._profiling = False
        self._closing = self._closed = False
        self.is_stuck = False
        """After shutdown: a step did not end, and its thread was left behind. The process can only end by os._exit."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._seeds = itertools.count(config.seed) if config.seed is not None else None

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

        ``api_key`` (or MOONDREAM_API_KEY) is accepted for callers of the vendor's engine and not needed. ``progress``
        is called with (done bytes, total bytes, what). ``lora``: applies to all requests that name no adapter. Raises
        ConfigError or ModelLoadError.
        """
        config = config or RuntimeConfig()
        built = await asyncio.to_thread(build, config, progress, lora)
        engine = cls(config, built, skills, observer=observer)
        began = time.monotonic()
        try:
            await engine._warm_up()
        except RuntimeFailure as error:
            await engine.shutdown(grace_s=0)
            if error.out_of_memory:
                raise out_of_memory(config, engine._sizes.max_batch_size, str(error)) from error
            raise
        except BaseException:
            await engine.shutdown(grace_s=0)
            raise
        if built.compiling is not None:
            built.compiling.serving = True
        load = dataclasses.replace(engine.info.load, warm_up_s=time.monotonic() - began)
        engine.info = dataclasses.replace(engine.info, load=load)
        return engine

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests now: it is open, and its step thread is alive and makes progress."""
        return not self._closing and self._failure is None and self._loop.alive

    @property
    def num_requests(self) -> int:
        """Requests accepted and unfinished."""
        return len(self._open) + self._preparing

    @property
    def stats(self) -> SchedulerStats:
        """Requests in the batch, requests that wait for it, and KV pages, now. From any thread."""
        return self._loop.stats

    @property
    def places(self) -> PlaceCounts:
        """How the principals share the places of accepted requests, now."""
        return self._places.counts

    @property
    def compiled(self) -> CompileCounts:
        """Kernels compiled or loaded so far. From any thread."""
        meter = self._built.compiling
        return CompileCounts() if meter is None else meter.counts

    @property
    def mask_counts(self) -> MaskCounts:
        """The work of following constraints so far. From any thread."""
        return self._grammars.counts

    async def submit(
        self,
        skill: str,
        image: Any = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        priority: str = "normal",
        timeout_s: float | None = None,
        cache_salt: str = "",
        principal: str = "",
        weight: float = 1.0,
    ) -> EngineStream:
        """Starts a registered skill, or "embed". Returns its stream once the images are prepared and the request
        queued.

        ``image``: an image, an InRegion of one, a Tiled image for point and detect, a list of images in the order of
        the prompt, or None. A Tiled image takes a place in the queue for each look. ``priority``: "high", "normal" or
        "low". ``timeout_s``: the request is dropped if nothing was computed for it by then. ``cache_salt``: images and
        prefixes are shared with requests of the same salt only. ``principal``: the caller's name; "" is one principal,
        too. ``weight``: the principal's share relative to others, above 0. Raises RequestError, EngineOverloaded,
        DeadlineExceeded, EngineClosed; the stream raises later failures.
        """
        request_id = checked_request_id(request_id)
        check_timeout(timeout_s)
        place = self._take_place(principal, weight, priority)
        held = ExitStack()
        held.callback(self._places.give_back, place)
        try:
            return await self._submit(
                place, held, skill, image, arguments, settings, request_id, timeout_s, cache_salt
            )
        except BaseException:
            held.close()
            raise

    async def _submit(
        self,
        place: Place,
        held: ExitStack,
        skill: str,
        image: Any,
        arguments: Mapping[str, Any] | None,
        settings: Mapping[str, Any] | None,
        request_id: str,
        timeout_s: float | None,
        cache_salt: str,
    ) -> EngineStream:
        """``submit`` for a request that has its place in the queue. ``held``: what it gives back at its end."""
        now = time.monotonic()
        timings = FrontTimings(accepted_at=now)
        spec = EmbedSkill() if skill == EMBED else self._skills.get(skill)
        adapter_name, settings = _without_adapter(settings or {})
        request = spec.build(arguments or {}, settings, self._context)
        check_prompt(request.prompt_suffix, self._built.model)
        images = _as_list(image)
        num_looks = _check_tiled(images, request)
        check_images(request, len(images), self._config.max_images)
        model, context = self._built.model, self._limits.max_seq_length
        embeds = request.embedding is not None
        positions = 0 if embeds else check_context(request, len(images), model, context)
        max_tokens = token_limit(
            request,
            positions,
            context=context,
            most=self._config.max_new_tokens,
            default=self._context.defaults.max_tokens,
        )
        request = dataclasses.replace(request, token_limit=max_tokens)
        if len(images) * num_looks > 1:
            self._places.take_more(place, len(images) * num_looks - 1)
        if request.constraint is not None:
            request = await self._compiled(request, request.constraint, timeout_s, place)
        adapter = self._built.lora
        if adapter_name is not None:
            lease = await self._leased(adapter_name, timeout_s, place)
            held.callback(lease.give_back)
            adapter = lease.adapter
        namespace: Hashable = cache_salt if adapter is None else (cache_salt, adapter.key)
        prepared: list[Looks] = []
        if images:
            prepared, timings = await self._prepare(images, now, timeout_s, cache_salt, place)
        self._check_alive()
        if adapter is not None and adapter.changes_vision:
            prepared = [tuple(look.with_adapter(adapter) for look in each) for each in prepared]
        if request.embedding is not None:
            ((image,),) = prepared
            request, image = self._to_embed(request, request.embedding, image)
            prepared = [(image,)]
        is_tiled = num_looks > 1
        looks = _sequences(prepared, is_tiled)
        bounds = [b for b in (timeout_s, self._config.max_queue_wait_s) if b is not None]
        queue_limited = bool(bounds) and min(bounds) != timeout_s
        seed = self._seed(request)
        ids = [next(self._ids) for _ in looks]

        def for_all(command: Callable[[int], None]) -> None:
            for sequence_id in ids:
                command(sequence_id)

        abort = partial(for_all, self._loop.abort)
        stream = EngineStream(request_id, abort)
        group, merging = None, request.merging
        if merging is not None and (is_tiled or merging.max_overlap is not None):
            group = LookGroup(len(looks), merging, abort)
        opened: list[OpenRequest] = []
        works: list[Work] = []
        for sequence_id, images_of_look in zip(ids, looks, strict=True):
            seen = _in_region(request, images_of_look)
            control = spec.new_control(seen, max_tokens, self._context)
            submission = Submission(
                sequence_id=sequence_id,
                prompt=() if embeds else build_prompt(seen, images_of_look, model),
                images=images_of_look,
                sampling=dataclasses.replace(request.sampling, seed=seed),
                rule=control.rule(0),
                max_tokens=max_tokens,
                namespace=namespace,
                principal=place.principal,
                weight=place.weight,
                priority=place.priority,
                arrived_at=now,
                deadline_at=now + min(bounds) if bounds else None,
                embedding=request.embedding,
                adapter=adapter,
            )
            output = spec.new_output(seen, self._context)
            refines = request.refine and self._limits.refines and bool(images_of_look)
            works.append(Work(request_id, submission, control, output, queue_limited, refines))
            opened.append(OpenRequest(skill, stream, timings, submission, held.close, group=group))
        for each in opened:
            self._open.add(each.submission.sequence_id, each)
        place.is_waiting = lambda: all(each.admitted_at is None for each in opened)
        place.displace = lambda error: for_all(lambda i: self._loop.refuse(i, error))
        self._idle.clear()
        for work in works:
            self._loop.submit(work)
        return stream

    @overload
    async def prepare_image(
        self,
        image: Tiled,
        *,
        timeout_s: float | None = ...,
        cache_salt: str = ...,
        request_id: str = ...,
        priority: str = ...,
        principal: str = ...,
        weight: float = ...,
    ) -> PreparedTiles: ...

    @overload
    async def prepare_image(
        self,
        image: Any,
        *,
        timeout_s: float | None = ...,
        cache_salt: str = ...,
        request_id: str = ...,
        priority: str = ...,
        principal: str = ...,
        weight: float = ...,
    ) -> PreparedImage: ...

    async def prepare_image(
        self,
        image: Any,
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: str = "normal",
        principal: str = "",
        weight: float = 1.0,
    ) -> PreparedImage | PreparedTiles:
        """Checks, decodes and tiles an image, an InRegion or a Tiled image ahead of the requests that will be about it,
        which take the result as their ``image``; ``request_id`` is for the observer, ``priority``, ``principal`` and
        ``weight`` are as for ``submit``. Raises ImageError, InvalidRequest, EngineOverloaded, DeadlineExceeded,
        EngineClosed."""
        check_timeout(timeout_s)
        place = self._take_place(principal, weight, priority)
        now = time.monotonic()
        timings = FrontTimings(accepted_at=now)
        looks: Looks = ()
        error = ""
        try:
            (looks,), timings = await self._prepare([image], now, timeout_s, cache_salt, place)
            return PreparedTiles(looks) if isinstance(image, Tiled) else looks[0]
        except BaseException as failed:
            error = type(failed).__name__
            raise
        finally:
            self._places.give_back(place)
            self._observe_image(request_id, timings, looks, error)

    def cancel(self, request_id: str) -> int:
        """Ends the requests of this id as "cancelled", as soon as a step ends; returns how many. One whose image is
        still being prepared is not among them."""
        found = self._open.named(request_id)
        for sequence_id in found:
            self._loop.abort(sequence_id)
        return len(set(found.values()))

    async def flush_caches(self) -> None:
        """Drops prefixes, embeddings and prepared images that no request uses, before the next step.

        Raises DeadlineExceeded if the step in progress takes longer than FLUSH_PATIENCE_S; they are dropped after it.
        """
        self._pool.flush()
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
        if self._profiling:
            raise ProfileError("a profile is being taken")
        if self._closed or not self._loop.alive:
            raise ProfileError("there is no engine to profile")
        self._profiling = True
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
            self._profiling = False

    async def shutdown(self, *, grace_s: float = 10.0) -> None:
        """Refuses new requests, waits up to ``grace_s`` seconds for open ones, fails the others with EngineClosed, and
        frees the model, unless a step hangs (``is_stuck``). Idempotent."""
        self._closing = True
        if self.num_requests and grace_s > 0:
            try:
                await asyncio.wait_for(self._until_idle(), grace_s)
            except TimeoutError:
                logger.warning(
                    "%d requests were unfinished after %.1f s", self.num_requests, grace_s
                )
        self._closed = True
        self._watchdog.cancel()
        self.is_stuck = not await asyncio.to_thread(self._loop.stop, STOP_PATIENCE_S)
        if not self.is_stuck:
            await asyncio.to_thread(self._delivery.stop)
        await asyncio.sleep(0)  # Lets the last deliveries reach their streams.
        self._open.fail_all(EngineClosed("the engine was shut down"))
        self._pool.close()
        if self._adapters is not None:
            await self._adapters.close()
        await asyncio.to_thread(self._compiler.shutdown, cancel_futures=True)
        self._grammars.close()

    async def __aenter__(self) -> InferenceEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def _call(
        self,
        skill: str,
        image: Any,
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any] | None,
        stream: bool,
        request_id: str | None,
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
        self._check_open()
        self._places.check(principal, weight, checked_priority(priority))

    def _take_place(self, principal: str, weight: float, priority: str) -> Place:
        self._check_open()
        check_weight(weight)
        return self._places.take(principal, weight, checked_priority(priority))

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosed("the engine is shutting down")
        self._check_alive()

    def _check_alive(self) -> None:
        """Raises EngineClosed unless the step thread can compute accepted requests."""
        if self._closed:
            raise EngineClosed("the engine was shut down")
        if self._failure is not None:
            raise EngineClosed(f"the engine has failed: {self._failure}")
        if not self._loop.alive:
            raise EngineClosed("the engine's step thread has died")

    async def _prepare(
        self,
        images: Sequence[Any],
        accepted_at: float,
        timeout_s: float | None,
        cache_salt: str,
        place: Place,
    ) -> tuple[list[Looks], FrontTimings]:
        """The looks at each image: one, or those of a tiled image. Raises Displaced besides, if the request loses its
        place meanwhile."""
        ready = [_looks_of(image) for image in images]
        if all(ready):
            return ready, FrontTimings(accepted_at=accepted_at)
        try:
            with self._prepares():
                async with asyncio.timeout(timeout_s):
                    preparing = self._prepare_each(images, cache_salt, place)
                    prepared = await until_displaced(place, preparing)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline of {timeout_s} s passed in preprocessing"
            ) from None
        # Images of one request are prepared at the same time if decoders are free.
        now = time.monotonic()
        timings = FrontTimings(
            accepted_at=accepted_at,
            preprocess_s=min(sum(each.seconds for each in prepared), now - accepted_at),
            prepared_at=now,
        )
        return [each.looks for each in prepared], timings

    async def _prepare_each(
        self, images: Sequence[Any], cache_salt: str, place: Place
    ) -> list[Preprocessed]:
        """Prepares the images at the same time. The error of an image names its place, if there are several."""
        if len(images) == 1:
            return [await self._prepare_one(images[0], cache_salt, place)]

        async def prepare(image: Any) -> Preprocessed:
            if ready := _looks_of(image):
                return Preprocessed(ready, 0.0)
            return await self._prepare_one(image, cache_salt, place)

        tasks = [asyncio.create_task(prepare(image)) for image in images]
        try:
            prepared = []
            for index, task in enumerate(tasks):
                try:
                    prepared.append(await task)
                except RequestError as error:
                    field = f"images[{index}]{error.field.removeprefix('image')}"
                    raise type(error)(field, error.message) from error
            return prepared
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare_one(self, image: Any, cache_salt: str, place: Place) -> Preprocessed:
        prepared = await self._pool.prepare(
            image, cache_salt, principal=place.principal, is_high=place.priority == 0
        )
        if not self._config.crop_cache_bytes:
            return prepared

        def keyed() -> Looks:
            return tuple(with_crop_keys(look, cache_salt) for look in prepared.looks)

        return Preprocessed(await asyncio.to_thread(keyed), prepared.seconds)

    async def _compiled(
        self, request: SkillRequest, constraint: Constraint, timeout_s: float | None, place: Place
    ) -> SkillRequest:
        """``request`` with its compiled constraint.

        Raises InvalidRequest naming the place of an error, EngineOverloaded if too many constraints wait to be
        compiled, and Displaced if the request loses its place meanwhile.
        """
        compiling = self._compile(constraint)
        try:
            with self._prepares():
                async with asyncio.timeout(timeout_s):
                    # Shielded, because other requests may wait for the same constraint.
                    grammar = await until_displaced(place, asyncio.shield(compiling))
        except asyncio.CancelledError:
            if compiling.cancelled():
                raise EngineClosed("the engine was shut down") from None
            raise
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline of {timeout_s} s passed before the constraint was compiled"
            ) from None
        return dataclasses.replace(request, grammar=grammar)

    async def _leased(self, name: str, timeout_s: float | None, place: Place) -> Lease:
        """The adapter ``name``, loaded. Raises the errors of ``AdapterLibrary.acquire``, and Displaced if the request
        loses its place meanwhile."""
        library = self._adapters
        if library is None:
            raise AdapterNotFound(
                "adapter", f"there is no adapter {name!r}: this server has none (--adapters-dir)"
            )
        try:
            with self._prepares():
                async with asyncio.timeout(timeout_s):
                    return await until_displaced(place, library.acquire(name))
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline of {timeout_s} s passed before the adapter was loaded"
            ) from None

    @contextmanager
    def _prepares(self) -> Iterator[None]:
        """Counts a request that is not submitted yet."""
        self._preparing += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._preparing -= 1
            self._note_idle()

    def _compile(self, constraint: Constraint) -> asyncio.Future[Grammar]:
        """The compiled constraint, which several requests may await. Raises EngineOverloaded."""
        compiling = self._compiling.get(constraint)
        if compiling is None:
            if len(self._compiling) == MAX_COMPILING:
                raise EngineOverloaded(f"{MAX_COMPILING} constraints wait to be compiled")
            compiling = self._aio.run_in_executor(
                self._compiler, self._grammars.compile, constraint
            )
            self._compiling[constraint] = compiling

            def ended(future: asyncio.Future[Grammar]) -> None:
                del self._compiling[constraint]
                if not future.cancelled():
                    future.exception()  # All requests for it may have ended.

            compiling.add_done_callback(ended)
        return compiling

    def _observe_image(
        self, request_id: str, timings: FrontTimings, looks: Looks, error: str
    ) -> None:
        if self._observer is None:
            return
        event = ImageEvent(
            request_id=request_id,
            error=error,
            size=looks[0].image_size if looks else None,
            num_crops=sum(look.num_crops for look in looks),
            seconds=timings.preprocess_s,
            accepted_at=timings.accepted_at,
            ended_at=time.monotonic(),
        )
        try:
            self._observer.on_image(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on an image")

    def _to_embed(
        self, request: SkillRequest, spec: EmbeddingSpec, image: PreparedImage
    ) -> tuple[SkillRequest, PreparedImage]:
        """The request with the boxes of the crops, and the image as the runtime gets it. Raises InvalidRequest if the
        embeddings are larger than the caller takes."""
        vision = self._built.model.vision
        boxes = crop_boxes(image.tiling, vision)
        one_by_one, limit = request.options["one_by_one"], request.options["max_bytes"]
        count = 1 if one_by_one else spec.image + spec.crops * len(boxes)
        vectors = vision.grid**2 if spec.patches else 1
        num_bytes = count * vectors * vision.proj_out_dim * (2 if spec.half else 4)
        if limit is not None and num_bytes > limit:
            other = "" if one_by_one else ", leave out the crops, or use a stream"
            raise InvalidRequest(
                "pooling",
                f"{count} embeddings take {num_bytes} bytes, the limit is {limit}: pool them, use float16{other}",
            )
        if spec.crops:
            # The runtime drops the features of other images. So this one does not share their embedding.
            key = f"{image.key}/crops"
            image = dataclasses.replace(image, key=key, keeps_features=True)
        return dataclasses.replace(request, options={"boxes": boxes}), image

    def draw_seed(self, count: int = 1) -> int:
        """The first of ``count`` seeds in a row, for requests that name none."""
        if self._seeds is None:
            return secrets.randbits(53)
        first, *_ = itertools.islice(self._seeds, count)
        return first % 2**64

    def _seed(self, request: SkillRequest) -> int:
        return self.draw_seed() if request.seed is None else request.seed

    def _deliver_threadsafe(self, deliveries: list[Delivery]) -> None:
        """On the delivery thread."""
        try:
            self._aio.call_soon_threadsafe(self._open.deliver, deliveries)
        except RuntimeError:  # The event loop is closed, and with it all streams.
            logger.debug("dropped %d deliveries: the event loop is closed", len(deliveries))

    async def _watch(self) -> None:
        self._failure = await watch(self._loop, self._config.step_timeout_s)
        self._open.fail_all(self._failure)

    async def _until_idle(self) -> None:
        # Between its preparation and its submission a request counts as neither, so check again after each wake-up.
        while self.num_requests:
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


def _without_adapter(settings: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The name of the adapter, if there is one, and the settings for the skill. Raises InvalidRequest."""
    if not isinstance(settings, Mapping) or "adapter" not in settings:
        return None, settings
    name = settings["adapter"]
    if name is not None:
        name = checked_adapter_name(name)
    return name, {key: value for key, value in settings.items() if key != "adapter"}


def _as_list(image: Any) -> list[Any]:
    """The images of a request."""
    if isinstance(image, (list, tuple)):
        return list(image)
    return [] if image is None else [image]


def _looks_of(image: Any) -> Looks:
    """The looks at an image that is prepared; none for another image."""
    if isinstance(image, PreparedTiles):
        return image.looks
    return (image,) if isinstance(image, PreparedImage) else ()


def _sequences(prepared: Sequence[Looks], is_tiled: bool) -> list[Looks]:
    """The images of each sequence of a request: one look at a tiled image, or all images together."""
    if is_tiled:
        return [(look,) for look in prepared[0]]
    return [tuple(looks[0] for looks in prepared)]


def _check_tiled(images: Sequence[Any], request: SkillRequest) -> int:
    """The number of looks at an image of the request: 1 unless it is tiled. Raises InvalidRequest."""
    for image in images:
        if not isinstance(image, (Tiled, PreparedTiles)):
            continue
        if len(images) > 1:
            raise InvalidRequest("tiles", f"are for one image; the request has {len(images)}")
        if request.merging is None:
            raise InvalidRequest(
                "tiles", f"are for skills that find objects; {request.skill} looks at an image once"
            )
        if any(isinstance(token, Coord) for token in request.prompt_suffix):
            raise InvalidRequest(
                "spatial_refs", "must be empty for a tiled image: a tile may not show the places"
            )
        return image.tiles.num_looks if isinstance(image, Tiled) else len(image.looks)
    return 1


def _in_region(request: SkillRequest, images: Sequence[PreparedImage]) -> SkillRequest:
    """The request with its spatial references in the coordinates of its only image, if that is a region. Raises
    InvalidRequest."""
    region = images[0].region if len(images) == 1 else None
    if region is None:
        return request
    suffix = prompt_in_region(request.prompt_suffix, region)
    return dataclasses.replace(request, prompt_suffix=suffix)


def _policy(config: RuntimeConfig, sizes: Sizes, built: Built) -> SchedulerPolicy:
    vision = built.model.vision
    crop_bytes = vision.grid**2 * vision.enc_dim * (4 if built.info.dtype == "float32" else 2)
    return SchedulerPolicy(
        budget=StepBudget(
            prefill_positions=sizes.step_prefill_positions,
            crops=sizes.step_crops,
            pause=sizes.step_pause,
        ),
        prefix_cache=config.prefix_cache,
        kept_embeddings=config.kept_embeddings,
        kept_crops=config.crop_cache_bytes // crop_bytes,
        aging_s=config.priority_aging_s,
        itl_target_s=config.itl_target_ms / 1e3,
    )
