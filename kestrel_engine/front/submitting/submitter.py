"""Submitter: from a request with a place in the queue to one with all that it needs, and on to the step thread.

Owns what a request needs first: the preparation of images, the compiler of constraints, the library of adapters.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack

from ... import clock
from ...adapters.library import AdapterLibrary, Lease
from ...errors import AdapterNotFound
from ...preprocess.prepared_cache import Looks
from ...types.adapter import Adapter
from ...types.requests import PreparedImage
from ...types.stream import EngineStream
from ...types.timings import FrontTimings
from ..lifetime import Lifetime
from .checked import Asked, RequestCheck, has_long_text
from .constraints import ConstraintCompiler
from .images import ImagePreparation
from .preparing import Preparing
from .presence import LOOK, LOOK_SETTINGS, Presence, find_absences
from .queue_places import Place, QueuePlaces
from .sequence_start import Ready, SequenceStart


class Submitter:
    """``submit`` for each request. For one event loop."""

    def __init__(
        self,
        lora: Adapter | None,
        lifetime: Lifetime,
        *,
        check: RequestCheck,
        places: QueuePlaces,
        preparing: Preparing,
        images: ImagePreparation,
        constraints: ConstraintCompiler,
        adapters: AdapterLibrary | None,
        sequences: SequenceStart,
    ) -> None:
        """``lora``: the adapter of requests that name none."""
        self._lora = lora
        self._lifetime = lifetime
        self._check = check
        self._places = places
        self._preparing = preparing
        self._sequences = sequences
        self.images = images
        self.constraints = constraints
        self.adapters = adapters

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

    async def submit(self, asked: Asked, place: Place) -> EngineStream:
        """Starts a request. ``place``: its place in the queue, which it gives back at its end, or if this raises."""
        held = ExitStack()
        held.callback(self._places.give_back, place)
        try:
            ready = await self._prepare(asked, place, held)
            self._lifetime.check_alive()
            return self._sequences.start(ready, place, held.close)
        except BaseException:
            held.close()
            raise

    async def _prepare(self, asked: Asked, place: Place, held: ExitStack) -> Ready:
        """The request with all that it needs. ``held``: what the request gives back at its end."""
        deadline_at = asked.deadline_at
        timings = FrontTimings(accepted_at=asked.accepted_at)
        if has_long_text(asked):
            checked = await self._preparing.run(
                asyncio.to_thread(self._check.check, asked),
                place,
                deadline_at,
                "before its text was encoded",
            )
        else:
            checked = self._check.check(asked)
        request, images = checked.request, checked.images
        if len(images) * checked.num_looks > 1:
            self._places.take_more(place, len(images) * checked.num_looks - 1)
        if request.constraint is not None:
            grammar = await self.constraints.compiled(request.constraint, deadline_at, place)
            request = dataclasses.replace(request, grammar=grammar)
        adapter = self._lora
        if checked.adapter is not None:
            lease = await self._leased(checked.adapter, deadline_at, place)
            held.callback(lease.give_back)
            adapter = lease.adapter
        prepared: list[Looks] = []
        if images:
            prepared, timings = await self.images.prepare(
                images, asked.accepted_at, deadline_at, asked.cache_salt, place
            )
        presence = None
        if request.presupposed is not None:
            began = clock.now()
            look = dataclasses.replace(
                asked,
                skill=LOOK,
                settings={**LOOK_SETTINGS, "adapter": checked.adapter},
                accepted_at=began,
            )
            presence = await self._look(look, request.presupposed.objects, prepared, place)
            timings = dataclasses.replace(timings, looking_s=clock.now() - began)
        return Ready(
            asked=asked,
            checked=checked,
            request=request,
            images=prepared,
            adapter=adapter,
            timings=timings,
            presence=presence,
        )

    async def _look(
        self, asked: Asked, objects: Sequence[str], prepared: Sequence[Looks], place: Place
    ) -> Presence:
        """Whether the images show ``objects``. Each look is a request of its own, with a place in the queue. ``asked``:
        the look, without image and object.

        Raises what ``submit`` does, and Displaced if the request loses its place meanwhile.
        """

        async def start(image: PreparedImage, name: str) -> EngineStream:
            own = self._places.take(place.principal, place.weight, place.priority)
            look = dataclasses.replace(asked, image=image, arguments={"object": name})
            return await self.submit(look, own)

        return await self._preparing.run(
            find_absences(objects, prepared, start),
            place,
            asked.deadline_at,
            "before the objects that the question presupposes were looked for",
        )

    async def _leased(self, name: str, deadline_at: float | None, place: Place) -> Lease:
        """The adapter ``name``, loaded. Raises the errors of ``AdapterLibrary.acquire``, and Displaced if the request
        loses its place meanwhile."""
        acquired = self._library(name).acquire(name)
        return await self._preparing.run(
            acquired, place, deadline_at, "before the adapter was loaded"
        )

    def _library(self, name: str) -> AdapterLibrary:
        """Raises AdapterNotFound if requests may name no adapters."""
        if self.adapters is None:
            raise AdapterNotFound(
                "adapter", f"there is no adapter {name!r}: this server has none (--adapters-dir)"
            )
        return self.adapters
