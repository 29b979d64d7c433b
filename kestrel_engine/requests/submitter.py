"""Submitter: from a request to one with a place in the queue and all that it needs, and on to the step thread.

Owns what a request needs: places, seeds, the preparation of images, the compiler of constraints, the library of
adapters. Its stages are the functions that complete a request; each gets the request and returns what it adds.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from .. import clock
from ..adapters.library import AdapterLibrary
from ..building.factory import Built
from ..callers.lifetime import Lifetime
from ..config.runtime import RuntimeConfig
from ..errors import AdapterNotFound
from ..preprocess.measuring import MeasuredImage
from ..skills.base import SkillRequest
from ..skills.constraints.grammars import Grammar, Grammars
from ..skills.registry import SkillRegistry
from ..steps.loop import EngineLoop
from ..types.adapter import Adapter
from ..types.constraint import Constraint
from ..types.observer import Observer
from ..types.requests import PreparedImage, PreparedTiles
from ..types.stream import EngineStream
from .constraints import ConstraintCompiler
from .image_preparation import ImagePreparation, new_pool
from .open_requests import OpenRequests
from .queue_places import QueuePlace, QueuePlaces
from .request import (
    Request,
    Reservation,
    TokenEstimate,
    check_request_id,
    check_weight,
    checked_priority,
)
from .request_check import RequestCheck, has_long_text, num_looks
from .seeds import Seeds
from .sequence_start import SequenceStart
from .unsubmitted import Unsubmitted

_Result = TypeVar("_Result")


class Submitter:
    """``start`` for each request. For one event loop."""

    def __init__(
        self,
        config: RuntimeConfig,
        built: Built,
        skills: SkillRegistry,
        loop: EngineLoop,
        opened: OpenRequests,
        lifetime: Lifetime,
        observer: Observer | None,
        on_end: Callable[[], None],
    ) -> None:
        """``on_end`` is called whenever a request is no longer being prepared."""
        self._lora = built.lora
        self._lifetime = lifetime
        self.unsubmitted = Unsubmitted(on_end)
        sizes = built.sizes
        self.places = QueuePlaces(config.max_queue, sizes.max_batch_size)
        self.seeds = Seeds(config.seed)
        self._check = RequestCheck(config, built, skills, self.seeds)
        self._sequences = SequenceStart(config, built, loop, opened, self._check)
        pool, vision = new_pool(config, sizes, built), built.model.vision
        self.images = ImagePreparation(
            pool, config.image_limits, vision, self.unsubmitted, observer
        )
        vocab_size, eos_id = built.model.text.vocab_size, built.model.ids.eos_id
        grammars = Grammars(built.codec, vocab_size, eos_id, confine=config.confine)
        self.constraints = ConstraintCompiler(grammars, self.unsubmitted)
        self.adapters = built.adapters
        self._image_positions = built.info.image_positions

    def check_admission(self, principal: str, weight: float, priority: str) -> None:
        """Raises EngineOverloaded if such a request would get no place now, EngineClosed if none is accepted."""
        self._lifetime.check_open()
        self.places.check(principal, weight, checked_priority(priority))

    async def start(self, request: Request) -> EngineStream:
        """As ``InferenceEngine.start``."""
        check_request_id(request.request_id)
        return await self._submit(request, self._take_place(request))

    async def prepare_image(self, request: Request) -> PreparedImage | PreparedTiles:
        """The only image of ``request``, which is no more than an image ahead of the requests that will be about it."""
        place = self._take_place(request)
        try:
            return await self.images.prepare_ahead(request, place)
        finally:
            self.places.give_back(place)

    async def measure_image(self, request: Request) -> MeasuredImage:
        """Size and crops of the only image of ``request``."""
        place = self._take_place(request)
        try:
            return await self.images.measure(request, place)
        finally:
            self.places.give_back(place)

    async def count_positions(self, request: Request) -> int:
        """The positions of the prompt of one look at the images of ``request``, which nothing reads."""
        place = self._take_place(request)
        try:
            checked = await self._checked(request, place, self._check.made)
        finally:
            self.places.give_back(place)
        return self._check.positions(checked, len(request.images))

    async def close(self) -> None:
        """Ends decoders, adapters' loading and the compiler. The step thread has ended or was left behind."""
        self.images.close()
        if self.adapters is not None:
            await self.adapters.close()
        await self.constraints.close()

    async def load_adapter(self, name: str) -> int:
        """Loads the adapter ``name``. Returns its bytes. Raises the errors of ``AdapterLibrary.acquire``."""
        lease = await self._library(name).acquire(name)
        lease.give_back()
        return lease.adapter.num_bytes

    def _take_place(self, request: Request) -> QueuePlace:
        self._lifetime.check_open()
        check_weight(request.weight)
        priority = checked_priority(request.priority)
        return self.places.take(request.principal, request.weight, priority)

    async def _submit(self, request: Request, place: QueuePlace) -> EngineStream:
        """Starts a request. ``place``: its place in the queue, which it gives back at its end, or if this raises."""
        held = ExitStack()
        held.callback(self.places.give_back, place)
        try:
            ready = await self._completed(request, place, held)
            self._lifetime.check_alive()
            return self._sequences.start(ready, place, held.close)
        except BaseException:
            held.close()
            raise

    async def _completed(self, request: Request, place: QueuePlace, held: ExitStack) -> Request:
        """The request with all that it needs. ``held``: what the request gives back at its end."""
        accepted_at = clock.now()
        checked = await self._checked(request, place, self._check.check)
        if (count := num_looks(request)) > 1:
            self.places.take_more(place, count - 1)
        reservation = self._reserved(request, checked, held)
        engine = _Services(self, request, place)
        checked = await checked.before_images(engine)
        loaded = await self._loaded(request, engine, held)
        images, timings = await self.images.prepare(request, accepted_at, place)
        began, before = clock.now(), checked
        checked = await checked.after_images(engine, images)
        if checked is not before:
            timings = dataclasses.replace(timings, looking_s=clock.now() - began)
        return dataclasses.replace(
            request,
            checked=checked,
            loaded=loaded,
            images=images,
            timings=timings,
            reservation=reservation,
        )

    def _reserved(
        self, request: Request, checked: SkillRequest, held: ExitStack
    ) -> Reservation | None:
        """Reserves the tokens of a request, if it asks for that."""
        if request.reserve is None:
            return None
        looks, num_images = num_looks(request) or 1, len(request.images)
        positions = self._check.positions(checked, num_images)
        image = self._image_positions * num_images
        text = max(0, positions - image)  # An image that is read in place of tokens has no prompt.
        output = looks * (checked.token_limit or 0) if positions else 0
        estimate = TokenEstimate(looks * text, looks * image, output)
        reservation = request.reserve(estimate)
        held.callback(reservation.close)
        return reservation

    async def _checked(
        self, request: Request, place: QueuePlace, check: Callable[[Request], SkillRequest]
    ) -> SkillRequest:
        if not has_long_text(request):
            return check(request)
        return await self.unsubmitted.run(
            asyncio.to_thread(check, request),
            place,
            request.deadline_at,
            "before its text was encoded",
        )

    async def _loaded(self, request: Request, engine: _Services, held: ExitStack) -> Adapter | None:
        """The adapter of a request. Raises the errors of ``AdapterLibrary.acquire``."""
        name = request.adapter
        if name is None:
            return self._lora
        acquired = self._library(name).acquire(name)
        lease = await engine.wait(acquired, "before the adapter was loaded")
        held.callback(lease.give_back)
        return lease.adapter

    def _library(self, name: str) -> AdapterLibrary:
        """Raises AdapterNotFound if requests may name no adapters."""
        if self.adapters is None:
            raise AdapterNotFound(
                "adapter", f"there is no adapter {name!r}: this server has none (--adapters-dir)"
            )
        return self.adapters


class _Services:
    """What a kind of work may ask of the engine for one request (skills.base.EngineServices)."""

    def __init__(self, submitter: Submitter, request: Request, place: QueuePlace) -> None:
        self._submitter, self._request, self._place = submitter, request, place

    async def compiled(self, constraint: Constraint) -> Grammar:
        compiler, deadline_at = self._submitter.constraints, self._request.deadline_at
        return await compiler.compiled(constraint, deadline_at, self._place)

    async def ask(
        self,
        skill: str,
        image: PreparedImage,
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> EngineStream:
        beside = self._place
        own = self._submitter.places.take(beside.principal, beside.weight, beside.priority)
        request = dataclasses.replace(
            self._request,
            skill=skill,
            images=(image,),
            arguments=arguments,
            settings=settings,
        )
        return await self._submitter._submit(request, own)

    async def wait(self, awaited: Awaitable[_Result], what: str) -> _Result:
        return await self._submitter.unsubmitted.run(
            awaited, self._place, self._request.deadline_at, what
        )
