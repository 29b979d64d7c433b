"""OpenRequests: the requests that were accepted and whose outcome has not come back.

Owns their streams, on the event loop. Turns deliveries into updates and results, in coordinates of the whole image, and
calls the observer at each end. Knows no scheduler and no runtime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping

from .. import clock
from ..errors import EngineClosed, KestrelError, RuntimeFailure
from ..skills.objects.request import Merging
from ..steps.delivery import Delivery, RequestEnd, RequestOutcome
from ..types.events import EngineMetrics, EngineResult, StreamUpdate
from ..types.observer import Observer, RequestEvent
from ..types.requests import Edges, ImageRegion, image_positions, num_positions
from ..types.stream import EngineStream
from ..types.submission import Submission
from ..types.timings import FrontTimings, StepTimings, metrics_of, together
from .merging import merged
from .request import Reservation
from .whole_image import output_in_image, update_in_image

logger = logging.getLogger(__name__)

_WHOLE: Edges = (0.0, 0.0, 1.0, 1.0)


@dataclasses.dataclass(slots=True, eq=False)
class OpenRequest:
    """A request as the event loop sees it.

    ``submissions``: by sequence id, one for each look at a tiled image, else a single one. They have one outcome. The
    objects of all looks become one list as ``merging`` says; None: those of the only look stay as they are.
    ``abort``: ends its sequences as "cancelled". ``refuse``: ends one of them with an error. ``on_end``: is called when
    the request has ended. As the occupant of its place in the queue it may be displaced.
    """

    skill: str
    stream: EngineStream
    timings: FrontTimings
    submissions: Mapping[int, Submission]
    merging: Merging | None
    abort: Callable[[], None]
    refuse: Callable[[int, KestrelError], None]
    on_end: Callable[[], None]
    reservation: Reservation | None = None
    admitted_at: float | None = None
    """When the scheduler first took the request into the batch, as far as reported."""
    ends: dict[int, RequestEnd] = dataclasses.field(default_factory=dict)
    num_sampled: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tokens of each sequence so far."""

    @property
    def is_waiting(self) -> bool:
        return self.admitted_at is None

    def displace(self, error: KestrelError) -> None:
        for sequence_id in self.submissions:
            self.refuse(sequence_id, error)

    @property
    def ended(self) -> list[tuple[Submission, RequestEnd]]:
        """The sequences that have ended, in the order of the looks."""
        return [(each, self.ends[i]) for i, each in self.submissions.items() if i in self.ends]

    @property
    def error(self) -> KestrelError | None:
        """The first failure."""
        outcomes = (end.outcome for end in self.ends.values())
        return next((each for each in outcomes if isinstance(each, KestrelError)), None)

    def in_image(self, delivery: Delivery) -> list[tuple[int, StreamUpdate]]:
        """The updates of a delivery, in coordinates of the whole image, with the tokens of all looks together."""
        updates, region = delivery.updates, region_of(self.submissions[delivery.sequence_id])
        if region is not None:
            updates = [(count, update_in_image(update, region)) for count, update in updates]
        if len(self.submissions) > 1:
            updates = [(self._total(delivery.sequence_id, n), update) for n, update in updates]
        return updates

    def _total(self, sequence_id: int, count: int) -> int:
        """The tokens of all sequences, now that this one has ``count``."""
        self.num_sampled[sequence_id] = count
        return sum(self.num_sampled.values())


class OpenRequests:
    """add() on acceptance; each ends by a delivery's outcome or by fail_all(). ``on_end`` is called after any ended."""

    def __init__(
        self,
        model: str,
        observer: Observer | None,
        on_end: Callable[[], None],
        image_positions: int = 0,
    ) -> None:
        """``image_positions``: of one image in a prompt."""
        self._model, self._image_positions = model, image_positions
        self._observer = observer
        self._on_end = on_end
        self._open: dict[int, OpenRequest] = {}
        """By the ids of the sequences that have not ended."""
        self._streams: set[EngineStream] = set()
        self._merging: set[asyncio.Task[None]] = set()
        """Requests whose looks have all ended. Merging takes time, so a thread does it."""

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: OpenRequest) -> None:
        self._open |= dict.fromkeys(request.submissions, request)
        self._streams.add(request.stream)

    def end_at_once(self, request: OpenRequest, outcome: RequestOutcome) -> None:
        """Ends a request that was not added, because nothing is computed for it."""
        self._conclude(request, outcome, StepTimings(finished_at=clock.now()))
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
                request.stream.push(request.in_image(delivery))
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
        """Takes the end of one sequence. A failure ends the others."""
        request = self._open.pop(sequence_id)
        region = region_of(request.submissions[sequence_id])
        if isinstance(end.outcome, RequestOutcome) and region is not None:
            output = output_in_image(end.outcome.output, region)
            end = dataclasses.replace(end, outcome=dataclasses.replace(end.outcome, output=output))
        had_failed = request.error is not None
        request.ends[sequence_id] = end
        error = request.error
        if len(request.ends) < len(request.submissions):
            if error is not None and not had_failed:
                request.abort()
            return
        if error is None and request.merging is not None:
            task = asyncio.get_running_loop().create_task(self._merge(request, request.merging))
            self._merging.add(task)
            task.add_done_callback(self._merging.discard)
        else:
            timings = together([each.timings for _, each in request.ended])
            self._conclude(request, error or end.outcome, timings)

    async def _merge(self, request: OpenRequest, merging: Merging) -> None:
        """Ends a request, all of whose looks have ended well."""
        outcome: RequestOutcome | KestrelError = EngineClosed("the engine was shut down")
        looks = []
        for submission, end in request.ended:
            assert isinstance(end.outcome, RequestOutcome)
            region = region_of(submission)
            looks.append((end.outcome, _WHOLE if region is None else region.edges))
        try:
            outcome = await asyncio.to_thread(merged, looks, merging)
        except Exception:  # A fault ends its own request only.
            logger.exception("the objects of request %s can't be merged", request.stream.request_id)
            outcome = RuntimeFailure("the objects of all looks could not be merged")
        finally:
            timings = together([end.timings for _, end in request.ended])
            self._conclude(request, outcome, dataclasses.replace(timings, finished_at=clock.now()))
            self._on_end()

    def _conclude(
        self, request: OpenRequest, outcome: RequestOutcome | KestrelError, timings: StepTimings
    ) -> None:
        self._streams.discard(request.stream)
        finished = outcome if isinstance(outcome, RequestOutcome) else None
        ended = request.ended
        # An image that is read in place of tokens counts what it takes in a prompt.
        images = sum(len(each.images) for each, _ in ended if each.reads is not None)
        read = images * self._image_positions
        metrics = metrics_of(
            request.timings,
            timings,
            input_tokens=read + sum(num_positions(each.prompt) for each, _ in ended),
            image_tokens=read + sum(image_positions(each.prompt) for each, _ in ended),
            cached_image_tokens=sum(
                image_positions(each.prompt, end.timings.cached_tokens) for each, end in ended
            ),
            output_tokens=0 if finished is None else len(finished.token_ids),
            reasoning_tokens=0 if finished is None else finished.reasoning_tokens,
        )
        if request.reservation is not None and timings.scheduled_at is not None:
            request.reservation.settle(metrics)
        request.on_end()
        self._observe(request, outcome, timings, metrics)
        if isinstance(outcome, KestrelError):
            request.stream.fail(outcome)
            return
        result = EngineResult(
            request_id=request.stream.request_id,
            output=outcome.output,
            finish_reason=outcome.reason,
            token_ids=outcome.token_ids,
            metrics=metrics,
            model=self._model,
            images=request.stream.images,
            num_looks=len(request.ends),
            seed=request.stream.seed,
            logprobs=outcome.logprobs,
            absence=outcome.absence,
            abstained=outcome.abstained,
        )
        request.stream.finish(result)

    def _observe(
        self,
        request: OpenRequest,
        outcome: RequestOutcome | KestrelError,
        timings: StepTimings,
        metrics: EngineMetrics,
    ) -> None:
        if self._observer is None:
            return
        first = next(iter(request.submissions.values()))
        event = RequestEvent(
            request_id=request.stream.request_id,
            skill=request.skill,
            finish_reason="" if isinstance(outcome, KestrelError) else outcome.reason,
            error=type(outcome).__name__ if isinstance(outcome, KestrelError) else "",
            metrics=metrics,
            image_size=first.images[0].image_size if first.images else None,
            num_crops=sum(image.num_crops for each, _ in request.ended for image in each.images),
            accepted_at=request.timings.accepted_at,
            prepared_at=request.timings.prepared_at,
            scheduled_at=timings.scheduled_at,
            first_token_at=timings.first_token_at,
            finished_at=timings.finished_at,
            adapter="" if first.adapter is None else first.adapter.name,
            principal=first.principal,
        )
        try:
            self._observer.on_request(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on request %s", event.request_id)


def region_of(submission: Submission) -> ImageRegion | None:
    """The region that the only image of a sequence is; None for another image, and for several."""
    images = submission.images
    return images[0].region if len(images) == 1 else None
