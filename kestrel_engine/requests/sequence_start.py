"""SequenceStart: from a request with all that it needs to its sequences on the step thread. Owns the sequences' ids.

Nothing waits here, so a request is either being prepared or has its sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import cast

from ..building.factory import Built
from ..config.runtime import RuntimeConfig
from ..errors import SkillFault
from ..preprocess.features import check_features
from ..skills.base import SkillOutput, SkillRequest
from ..skills.objects.request import ObjectsRequest
from ..skills.prompts import build_prompt
from ..steps.active import SkillSubmission
from ..steps.delivery import RequestOutcome
from ..steps.loop import EngineLoop
from ..types.events import FinishReason, SeenImage
from ..types.requests import PreparedImage, PreparedTiles
from ..types.step import TokenRule
from ..types.stream import EngineStream
from ..types.submission import Submission
from .open_requests import OpenRequest, OpenRequests
from .queue_places import QueuePlace
from .request import Request
from .request_check import RequestCheck
from .whole_image import prompt_in_region


class SequenceStart:
    """``start`` for each request. For one event loop."""

    def __init__(
        self,
        config: RuntimeConfig,
        built: Built,
        loop: EngineLoop,
        opened: OpenRequests,
        check: RequestCheck,
    ) -> None:
        self._max_wait_s = config.max_queue_wait_s
        self._model = built.model
        self._loop = loop
        self._open = opened
        self._check = check
        self._ids = itertools.count(1)

    def start(
        self, request: Request, place: QueuePlace, on_end: Callable[[], None]
    ) -> EngineStream:
        """``on_end``: is called when the request has ended. Raises RequestError, SkillFault."""
        checked, timings = request.checked, request.timings
        assert checked is not None and timings is not None, "the request has all that it needs"
        _check_features(request, checked)
        looks = _sequences(request)
        sequences = [self._sequence(next(self._ids), images, request, place) for images in looks]
        submissions = {each.submission.sequence_id: each.submission for each in sequences}
        abort = partial(self._abort, tuple(submissions))
        stream = EngineStream(
            request.request_id,
            abort,
            checked.added_to,
            images=tuple(SeenImage.of(same) for same in zip(*looks, strict=True)),
            seed=checked.sampling.seed,
        )
        merging = checked.merging if isinstance(checked, ObjectsRequest) else None
        if merging is not None and merging.max_overlap is None and len(looks) == 1:
            merging = None
        refuse = self._loop.refuse
        opened = OpenRequest(
            *(request.skill, stream, timings, submissions, merging, abort, refuse, on_end),
            reservation=request.reservation,
        )
        if (reason := checked.ends_at_once) is not None:
            self._open.end_at_once(opened, _abstained(reason, sequences[0].output))
            return stream
        self._open.add(opened)
        place.pass_to(opened)
        for sequence in sequences:
            self._loop.submit(sequence)
        return stream

    def _abort(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._loop.abort(sequence_id)

    def _sequence(
        self,
        sequence_id: int,
        images: tuple[PreparedImage, ...],
        request: Request,
        place: QueuePlace,
    ) -> SkillSubmission:
        """One sequence of a request. ``images``: those of its prompt."""
        assert request.checked is not None and request.timings is not None
        adapter, arrived_at = request.loaded, request.timings.accepted_at
        namespace: Hashable = request.cache_salt
        if adapter is not None:
            namespace = (request.cache_salt, adapter.key)
        deadline_at, longest_s = request.deadline_at, self._max_wait_s
        queue_limited = longest_s is not None and (
            deadline_at is None or arrived_at + longest_s < deadline_at
        )
        if longest_s is not None and queue_limited:
            deadline_at = arrived_at + longest_s
        checked, images = request.checked.about(images, self._model)
        checked = _in_region(checked, images)
        spec, context, limit = self._check.skill(request), self._check.context, checked.token_limit
        assert limit is not None
        control, output = (
            spec.new_control(checked, limit, context),
            spec.new_output(checked, context),
        )
        if not isinstance(output, SkillOutput):
            raise SkillFault(
                f"the output of {checked.skill} is no kestrel_engine.skills.SkillOutput"
            )
        submission = Submission(
            sequence_id=sequence_id,
            prompt=() if checked.reads is not None else build_prompt(checked, images, self._model),
            images=images,
            sampling=checked.sampling,
            # The loop checks it: a skill may be a plug-in.
            rule=cast("TokenRule | None", control.rule(0)),
            max_tokens=limit,
            namespace=namespace,
            principal=place.principal,
            weight=place.weight,
            priority=place.priority,
            arrived_at=arrived_at,
            deadline_at=deadline_at,
            reads=checked.reads,
            adapter=adapter,
        )
        return SkillSubmission(request.request_id, submission, control, output, queue_limited)


def _check_features(request: Request, checked: SkillRequest) -> None:
    """Raises InvalidRequest."""
    images = request.images
    for index, image in enumerate(images):
        if isinstance(image, PreparedImage):
            at = ("image",) if len(images) == 1 else ("images", index)
            check_features(image, checked, request.loaded, at)


def _sequences(request: Request) -> list[tuple[PreparedImage, ...]]:
    """The images of each sequence of a request: one look at a tiled image, or all images together."""
    images, looks = request.images, list[tuple[PreparedImage, ...]]()
    if len(images) == 1 and isinstance(images[0], PreparedTiles):
        looks += [(look,) for look in images[0].looks]
    else:
        looks.append(images)
    adapter = request.loaded
    if adapter is not None and adapter.changes_vision:
        looks = [tuple(image.with_adapter(adapter) for image in each) for each in looks]
    return looks


def _abstained(reason: FinishReason, output: SkillOutput) -> RequestOutcome:
    """The outcome of a request for which nothing is generated."""
    output.finish()
    return RequestOutcome(output.output(), reason, (), output.logprobs, abstained=reason == "stop")


def _in_region(checked: SkillRequest, images: Sequence[PreparedImage]) -> SkillRequest:
    """The request with its spatial references in the coordinates of its only image, if that is a region. Raises
    InvalidRequest."""
    region = images[0].region if len(images) == 1 else None
    if region is None:
        return checked
    return dataclasses.replace(
        checked, prompt_suffix=prompt_in_region(checked.prompt_suffix, region, checked.place_path)
    )
