"""SequenceStart: from a request with all that it needs to its sequences on the step thread. Owns the sequences' ids.

Nothing waits here, so a request is either being prepared or has its sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import cast

from ...building.factory import Built
from ...config.runtime import RuntimeConfig
from ...errors import InvalidRequest
from ...preprocess.crops import crop_boxes
from ...preprocess.prepared_cache import Looks
from ...skills.base import SkillContext, SkillRequest
from ...skills.prompts import build_prompt
from ...steps.active import Work
from ...steps.loop import EngineLoop
from ...types.adapter import Adapter
from ...types.embedding import EmbeddingSpec
from ...types.events import SeenImage
from ...types.requests import PreparedImage
from ...types.step import TokenRule
from ...types.stream import EngineStream
from ...types.submission import Submission
from ...types.timings import FrontTimings
from ..looks import LookGroup
from ..open_requests import OpenRequest, OpenRequests
from ..whole_image import prompt_in_region
from .checked import Asked, CheckedRequest
from .presence import Presence
from .queue_places import Place
from .seeds import Seeds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A request with all that it needs. ``images``: the looks at each."""

    asked: Asked
    checked: CheckedRequest
    request: SkillRequest
    images: list[Looks]
    adapter: Adapter | None
    timings: FrontTimings
    presence: Presence | None
    """What was found of the objects that the request presupposes; None if it presupposes none."""


class SequenceStart:
    """``start`` for each request. For one event loop."""

    def __init__(
        self,
        config: RuntimeConfig,
        built: Built,
        loop: EngineLoop,
        opened: OpenRequests,
        context: SkillContext,
        seeds: Seeds,
    ) -> None:
        self._max_wait_s = config.max_queue_wait_s
        self._model = built.model
        self._loop = loop
        self._open = opened
        self._context = context
        self._seeds = seeds
        self._ids = itertools.count(1)

    def start(self, ready: Ready, place: Place, on_end: Callable[[], None]) -> EngineStream:
        """``on_end``: is called when the request has ended. Raises RequestError."""
        asked, checked, request = ready.asked, ready.checked, ready.request
        adapter, prepared = ready.adapter, ready.images
        namespace: Hashable = asked.cache_salt
        if adapter is not None:
            namespace = (asked.cache_salt, adapter.key)
            if adapter.changes_vision:
                prepared = [tuple(look.with_adapter(adapter) for look in each) for each in prepared]
        if request.embedding is not None:
            ((whole,),) = prepared
            request, whole = self._to_embed(request, request.embedding, whole)
            prepared = [(whole,)]
        is_tiled = checked.num_looks > 1
        looks = _sequences(prepared, is_tiled)
        arrived_at = ready.timings.accepted_at
        deadline_at, longest_s = asked.deadline_at, self._max_wait_s
        queue_limited = longest_s is not None and (
            deadline_at is None or arrived_at + longest_s < deadline_at
        )
        if longest_s is not None and queue_limited:
            deadline_at = arrived_at + longest_s
        seed = self._seeds.draw() if request.seed is None else request.seed
        ids = [next(self._ids) for _ in looks]

        def for_all(command: Callable[[int], None]) -> None:
            for sequence_id in ids:
                command(sequence_id)

        abort = partial(for_all, self._loop.abort)
        presence = ready.presence
        adds = None if presence is None else presence.added_to
        seen_images = tuple(
            SeenImage(size=image.image_size, digest=(image.source_digest or b"").hex())
            for image in looks[0]
        )
        stream = EngineStream(asked.request_id, abort, adds, images=seen_images, seed=seed)
        group, merging = None, request.merging
        if merging is not None and (is_tiled or merging.max_overlap is not None):
            group = LookGroup(len(looks), merging, abort)
        opened: list[OpenRequest] = []
        works: list[Work] = []
        for sequence_id, images_of_look in zip(ids, looks, strict=True):
            seen = _in_region(request, images_of_look)
            control = checked.spec.new_control(seen, checked.max_tokens, self._context)
            # The loop checks it: a skill may be a plug-in.
            rule = cast("TokenRule | None", control.rule(0))
            submission = Submission(
                sequence_id=sequence_id,
                prompt=()
                if request.embedding is not None
                else build_prompt(seen, images_of_look, self._model),
                images=images_of_look,
                sampling=dataclasses.replace(request.sampling, seed=seed),
                rule=rule,
                max_tokens=checked.max_tokens,
                namespace=namespace,
                principal=place.principal,
                weight=place.weight,
                priority=place.priority,
                arrived_at=arrived_at,
                deadline_at=deadline_at,
                embedding=request.embedding,
                adapter=adapter,
            )
            output = checked.spec.new_output(seen, self._context)
            refines = request.refine and self._context.refines and bool(images_of_look)
            works.append(
                Work(asked.request_id, submission, control, output, queue_limited, refines)
            )
            opened.append(
                OpenRequest(asked.skill, stream, ready.timings, submission, on_end, group=group)
            )
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

    def _to_embed(
        self, request: SkillRequest, spec: EmbeddingSpec, image: PreparedImage
    ) -> tuple[SkillRequest, PreparedImage]:
        """The request with the boxes of the crops, and the image as the runtime gets it. Raises InvalidRequest if the
        embeddings are larger than the caller takes."""
        vision = self._model.vision
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
                value=num_bytes,
                limit=limit,
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
