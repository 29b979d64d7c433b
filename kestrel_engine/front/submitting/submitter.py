"""Submitter: from a request with a place in the queue to its sequences on the step thread.

Owns what a request needs first: the preparation of images, the compiler of constraints, the library of adapters; and
the ids of sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ...adapters.library import AdapterLibrary, Lease
from ...building.factory import Built
from ...config.runtime import RuntimeConfig
from ...errors import AdapterNotFound, InvalidRequest
from ...preprocess.crops import crop_boxes
from ...preprocess.prepared_cache import Looks
from ...skills.base import SkillRequest
from ...skills.prompts import build_prompt
from ...steps.active import Work
from ...steps.loop import EngineLoop
from ...types.embedding import EmbeddingSpec
from ...types.requests import PreparedImage
from ...types.stream import EngineStream
from ...types.submission import Submission
from ...types.timings import FrontTimings
from ..lifetime import Lifetime
from ..looks import LookGroup
from ..open_requests import OpenRequest, OpenRequests
from ..whole_image import prompt_in_region
from .checked import RequestCheck
from .constraints import ConstraintCompiler
from .images import ImagePreparation
from .preparing import Preparing
from .presence import LOOK, LOOK_SETTINGS, Presence, find_absences
from .queue_places import Place, QueuePlaces
from .seeds import Seeds


class Submitter:
    """``submit`` for each request. For one event loop."""

    def __init__(
        self,
        config: RuntimeConfig,
        built: Built,
        loop: EngineLoop,
        lifetime: Lifetime,
        opened: OpenRequests,
        *,
        check: RequestCheck,
        places: QueuePlaces,
        preparing: Preparing,
        images: ImagePreparation,
        constraints: ConstraintCompiler,
        adapters: AdapterLibrary | None,
        seeds: Seeds,
    ) -> None:
        self._config = config
        self._built = built
        self._loop = loop
        self._lifetime = lifetime
        self._open = opened
        self._check = check
        self._places = places
        self._preparing = preparing
        self._seeds = seeds
        self.images = images
        self.constraints = constraints
        self.adapters = adapters
        self._ids = itertools.count(1)

    async def close(self) -> None:
        """Ends decoders, adapters' loading and the compiler. The step thread has ended or was left behind."""
        self.images.close()
        if self.adapters is not None:
            await self.adapters.close()
        await self.constraints.close()

    async def submit(
        self,
        place: Place,
        skill: str,
        image: Any,
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        request_id: str,
        timeout_s: float | None,
        cache_salt: str,
    ) -> EngineStream:
        """Starts a request. ``place``: its place in the queue, which it gives back at its end, or if this raises."""
        held = ExitStack()
        held.callback(self._places.give_back, place)
        try:
            return await self._submit(
                place,
                held,
                skill,
                image,
                arguments,
                settings,
                request_id=request_id,
                timeout_s=timeout_s,
                cache_salt=cache_salt,
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
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        request_id: str,
        timeout_s: float | None,
        cache_salt: str,
    ) -> EngineStream:
        """``held``: what the request gives back at its end."""
        now = time.monotonic()
        timings = FrontTimings(accepted_at=now)
        checked = self._check.check(skill, image, arguments, settings)
        request, images, num_looks = checked.request, checked.images, checked.num_looks
        if len(images) * num_looks > 1:
            self._places.take_more(place, len(images) * num_looks - 1)
        if request.constraint is not None:
            grammar = await self.constraints.compiled(request.constraint, timeout_s, place)
            request = dataclasses.replace(request, grammar=grammar)
        adapter = self._built.lora
        if checked.adapter is not None:
            lease = await self._leased(checked.adapter, timeout_s, place)
            held.callback(lease.give_back)
            adapter = lease.adapter
        namespace: Hashable = cache_salt if adapter is None else (cache_salt, adapter.key)
        prepared: list[Looks] = []
        if images:
            prepared, timings = await self.images.prepare(images, now, timeout_s, cache_salt, place)
        presence = None
        if request.presupposed is not None:
            began = time.monotonic()
            presence = await self._look(
                request.presupposed.objects,
                prepared,
                place,
                {**LOOK_SETTINGS, "adapter": checked.adapter},
                request_id=request_id,
                timeout_s=None if timeout_s is None else timeout_s - (began - now),
                cache_salt=cache_salt,
            )
            timings = dataclasses.replace(timings, looking_s=time.monotonic() - began)
        self._lifetime.check_alive()
        if adapter is not None and adapter.changes_vision:
            prepared = [tuple(look.with_adapter(adapter) for look in each) for each in prepared]
        if request.embedding is not None:
            ((whole,),) = prepared
            request, whole = self._to_embed(request, request.embedding, whole)
            prepared = [(whole,)]
        is_tiled = num_looks > 1
        looks = _sequences(prepared, is_tiled)
        bounds = [b for b in (timeout_s, self._config.max_queue_wait_s) if b is not None]
        queue_limited = bool(bounds) and min(bounds) != timeout_s
        seed = self._seeds.draw() if request.seed is None else request.seed
        ids = [next(self._ids) for _ in looks]

        def for_all(command: Callable[[int], None]) -> None:
            for sequence_id in ids:
                command(sequence_id)

        abort = partial(for_all, self._loop.abort)
        stream = EngineStream(request_id, abort, None if presence is None else presence.added_to)
        group, merging = None, request.merging
        if merging is not None and (is_tiled or merging.max_overlap is not None):
            group = LookGroup(len(looks), merging, abort)
        opened: list[OpenRequest] = []
        works: list[Work] = []
        for sequence_id, images_of_look in zip(ids, looks, strict=True):
            seen = _in_region(request, images_of_look)
            control = checked.spec.new_control(seen, checked.max_tokens, self._check.context)
            submission = Submission(
                sequence_id=sequence_id,
                prompt=()
                if request.embedding is not None
                else build_prompt(seen, images_of_look, self._built.model),
                images=images_of_look,
                sampling=dataclasses.replace(request.sampling, seed=seed),
                rule=control.rule(0),
                max_tokens=checked.max_tokens,
                namespace=namespace,
                principal=place.principal,
                weight=place.weight,
                priority=place.priority,
                arrived_at=now,
                deadline_at=now + min(bounds) if bounds else None,
                embedding=request.embedding,
                adapter=adapter,
            )
            output = checked.spec.new_output(seen, self._check.context)
            refines = request.refine and self._check.context.refines and bool(images_of_look)
            works.append(Work(request_id, submission, control, output, queue_limited, refines))
            opened.append(OpenRequest(skill, stream, timings, submission, held.close, group=group))
        if presence is not None and request.presupposed is not None:
            outcome = presence.ending(request.presupposed.max_absence, works[0].output)
            if outcome is not None:
                self._open.end_at_once(opened[0], outcome)
                return stream
        for each in opened:
            self._open.add(each.submission.sequence_id, each)
        place.is_waiting = lambda: all(each.admitted_at is None for each in opened)
        place.displace = lambda error: for_all(lambda i: self._loop.refuse(i, error))
        for work in works:
            self._loop.submit(work)
        return stream

    async def _look(
        self,
        objects: Sequence[str],
        prepared: Sequence[Looks],
        place: Place,
        settings: Mapping[str, Any],
        *,
        request_id: str,
        timeout_s: float | None,
        cache_salt: str,
    ) -> Presence:
        """Whether the images show ``objects``. Each look is a request of its own, with a place in the queue.

        Raises what ``submit`` does, and Displaced if the request loses its place meanwhile.
        """

        async def start(image: PreparedImage, name: str) -> EngineStream:
            own = self._places.take(place.principal, place.weight, place.priority)
            return await self.submit(
                own,
                LOOK,
                image,
                {"object": name},
                settings,
                request_id=request_id,
                timeout_s=timeout_s,
                cache_salt=cache_salt,
            )

        return await self._preparing.run(
            find_absences(objects, prepared, start),
            place,
            timeout_s,
            "before the objects that the question presupposes were looked for",
        )

    async def _leased(self, name: str, timeout_s: float | None, place: Place) -> Lease:
        """The adapter ``name``, loaded. Raises the errors of ``AdapterLibrary.acquire``, and Displaced if the request
        loses its place meanwhile."""
        if self.adapters is None:
            raise AdapterNotFound(
                "adapter", f"there is no adapter {name!r}: this server has none (--adapters-dir)"
            )
        return await self._preparing.run(
            self.adapters.acquire(name), place, timeout_s, "before the adapter was loaded"
        )

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


def _sequences(prepared: Sequence[Looks], is_tiled: bool) -> list[Looks]:
    """The images of each sequence of a request: one look at a tiled image, or all images together."""
    if is_tiled:
        return [(look,) for look in prepared[0]]
    return [tuple(looks[0] for looks in prepared)]


def _in_region(request: SkillRequest, images: Sequence[PreparedImage]) -> SkillRequest:
    """The request with its spatial references in the coordinates of its only image, if that is a region. Raises
    InvalidRequest."""
    region = images[0].region if len(images) == 1 else None
    if region is None:
        return request
    suffix = prompt_in_region(request.prompt_suffix, region)
    return dataclasses.replace(request, prompt_suffix=suffix)
