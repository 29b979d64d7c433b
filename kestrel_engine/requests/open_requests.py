"""OpenRequests: the requests that were accepted and whose outcome has not come back.

Owns their streams, on the event loop. Turns deliveries into updates and results, in coordinates of the whole image, and
calls the observer at each end. Knows no scheduler and no runtime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

from .. import clock
from ..errors import EngineClosed, KestrelError, RuntimeFailure
from ..steps.delivery import Delivery, Finished, RequestEnd
from ..types.events import EngineMetrics, EngineResult, StreamUpdate
from ..types.observer import Observer, RequestEvent
from ..types.requests import ImageRegion, num_positions
from ..types.stream import EngineStream
from ..types.submission import Submission
from ..types.timings import FrontTimings, StepTimings, metrics_of
from .looks import LookGroup
from .whole_image import output_in_image, update_in_image

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """A request, or one look of a tiled request, as the event loop sees it. ``on_end`` is called when it has ended."""

    skill: str
    stream: EngineStream
    timings: FrontTimings
    submission: Submission
    on_end: Callable[[], None]
    admitted_at: float | None = None
    """When the scheduler first took the request into the batch, as far as reported."""
    group: LookGroup | None = None
    """The looks of a request whose objects are merged. They share stream, timings and outcome."""

    @property
    def region(self) -> ImageRegion | None:
        """The region that the request's only image is; None for another image, and for several."""
        images = self.submission.images
        return images[0].region if len(images) == 1 else None


class OpenRequests:
    """add() on acceptance; each ends by a delivery's outcome or by fail_all(). ``on_end`` is called after any ended.

    A tiled request is added once for each look, and ends with the last of them.
    """

    def __init__(self, model: str, observer: Observer | None, on_end: Callable[[], None]) -> None:
        self._model = model
        self._observer = observer
        self._on_end = on_end
        self._open: dict[int, OpenRequest] = {}
        self._streams: set[EngineStream] = set()
        self._merging: set[asyncio.Task[None]] = set()
        """Requests whose looks have all ended. Merging takes time, so a thread does it."""

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._streams)

    def add(self, sequence_id: int, request: OpenRequest) -> None:
        self._open[sequence_id] = request
        self._streams.add(request.stream)

    def end_at_once(self, request: OpenRequest, outcome: Finished) -> None:
        """Ends a request that was not added, because nothing is computed for it."""
        ended = StepTimings(finished_at=clock.now())
        self._conclude(request, [], RequestEnd(outcome, ended))
        self._on_end()

    def named(self, request_id: str) -> set[EngineStream]:
        """The streams of the requests that carry ``request_id``."""
        return {stream for stream in self._streams if stream.request_id == request_id}

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Passes deliveries to their requests. A delivery for a request that has ended is dropped."""
        for delivery in deliveries:
            request = self._open.get(delivery.sequence_id)
            if request is None:
                continue
            if delivery.admitted_at is not None:
                request.admitted_at = delivery.admitted_at
            if delivery.updates:
                request.stream.push(_in_image(request, delivery))
            if delivery.end is not None:
                self._end(delivery.sequence_id, delivery.end)
        self._on_end()

    def fail_all(self, error: KestrelError) -> None:
        """Ends all open requests without the step thread."""
        now = clock.now()
        for sequence_id, request in list(self._open.items()):
            timings = StepTimings(scheduled_at=request.admitted_at, finished_at=now)
            self._end(sequence_id, RequestEnd(error, timings))
        self._on_end()

    def _end(self, sequence_id: int, end: RequestEnd) -> None:
        request = self._open.pop(sequence_id)
        region, group = request.region, request.group
        if isinstance(end.outcome, Finished) and region is not None:
            output = output_in_image(end.outcome.output, region)
            end = dataclasses.replace(end, outcome=dataclasses.replace(end.outcome, output=output))
        if group is None:
            self._conclude(request, [request.submission], end)
        elif group.end(sequence_id, request.submission, end):
            if group.error is not None:
                failed = RequestEnd(group.error, group.timings)
                self._conclude(request, group.submissions, failed)
            else:
                task = asyncio.get_running_loop().create_task(self._merge(request, group))
                self._merging.add(task)
                task.add_done_callback(self._merging.discard)

    async def _merge(self, request: OpenRequest, group: LookGroup) -> None:
        """Ends a request, all of whose looks have ended well."""
        outcome: Finished | KestrelError = EngineClosed("the engine was shut down")
        try:
            outcome = await asyncio.to_thread(group.merged)
        except Exception:  # A fault ends its own request only.
            logger.exception("the objects of request %s can't be merged", request.stream.request_id)
            outcome = RuntimeFailure("the objects of all looks could not be merged")
        finally:
            timings = dataclasses.replace(group.timings, finished_at=clock.now())
            self._conclude(request, group.submissions, RequestEnd(outcome, timings))
            self._on_end()

    def _conclude(
        self, request: OpenRequest, submissions: Sequence[Submission], end: RequestEnd
    ) -> None:
        """Ends a request. ``submissions``: one, or those of all looks."""
        self._streams.discard(request.stream)
        request.on_end()
        outcome = end.outcome
        token_ids: tuple[int, ...] = ()
        reasoning_tokens = 0
        if isinstance(outcome, Finished):
            token_ids, reasoning_tokens = outcome.token_ids, outcome.reasoning_tokens
        metrics = metrics_of(
            request.timings,
            end.timings,
            input_tokens=sum(num_positions(each.prompt) for each in submissions),
            output_tokens=len(token_ids),
            reasoning_tokens=reasoning_tokens,
        )
        self._observe(request, submissions, end, metrics)
        if isinstance(outcome, KestrelError):
            request.stream.fail(outcome)
            return
        result = EngineResult(
            request_id=request.stream.request_id,
            output=outcome.output,
            finish_reason=outcome.reason,
            token_ids=token_ids,
            metrics=metrics,
            model=self._model,
            images=request.stream.images,
            num_looks=len(submissions),
            seed=request.stream.seed,
            logprobs=outcome.logprobs,
            absence=outcome.absence,
            abstained=outcome.abstained,
        )
        request.stream.finish(result)

    def _observe(
        self,
        request: OpenRequest,
        submissions: Sequence[Submission],
        end: RequestEnd,
        metrics: EngineMetrics,
    ) -> None:
        if self._observer is None:
            return
        images, adapter = request.submission.images, request.submission.adapter
        outcome = end.outcome
        if isinstance(outcome, KestrelError):
            reason, error = "", type(outcome).__name__
        else:
            reason, error = outcome.reason, ""
        event = RequestEvent(
            request_id=request.stream.request_id,
            skill=request.skill,
            finish_reason=reason,
            error=error,
            metrics=metrics,
            image_size=images[0].image_size if images else None,
            num_crops=sum(image.num_crops for each in submissions for image in each.images),
            accepted_at=request.timings.accepted_at,
            prepared_at=request.timings.prepared_at,
            scheduled_at=end.timings.scheduled_at,
            first_token_at=end.timings.first_token_at,
            finished_at=end.timings.finished_at,
            adapter="" if adapter is None else adapter.name,
        )
        try:
            self._observer.on_request(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on request %s", event.request_id)


def _in_image(request: OpenRequest, delivery: Delivery) -> list[tuple[int, StreamUpdate]]:
    """The updates of a delivery, in coordinates of the whole image, with the tokens of all looks together."""
    updates, region, group = delivery.updates, request.region, request.group
    if region is not None:
        updates = [(count, update_in_image(update, region)) for count, update in updates]
    if group is not None:
        updates = [
            (group.total_sampled(delivery.sequence_id, count), update) for count, update in updates
        ]
    return updates
