"""OpenRequests: the requests that were accepted and whose outcome has not come back.

Owns their streams, on the event loop. Turns deliveries into updates and results, and calls the observer at each end.
Knows no scheduler and no runtime.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from ..errors import KestrelError
from ..steps.delivery import Delivery, RequestEnd
from ..types.events import EngineMetrics, EngineResult, SeenImage
from ..types.observer import Observer, RequestEvent
from ..types.requests import num_positions
from ..types.submission import Submission
from ..types.timings import FrontTimings, StepTimings, metrics_of
from .stream import EngineStream

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """A request as the event loop sees it. ``on_end`` is called when it has ended."""

    skill: str
    stream: EngineStream
    timings: FrontTimings
    submission: Submission
    on_end: Callable[[], None]
    admitted_at: float | None = None
    """When the scheduler first took the request into the batch, as far as reported."""

    @property
    def images(self) -> tuple[SeenImage, ...]:
        return tuple(
            SeenImage(size=(image.width, image.height), digest=(image.source_digest or b"").hex())
            for image in self.submission.images
        )


class OpenRequests:
    """add() on acceptance; each ends by a delivery's outcome or by fail_all(). ``on_end`` is called after any ended."""

    def __init__(self, model: str, observer: Observer | None, on_end: Callable[[], None]) -> None:
        self._model = model
        self._observer = observer
        self._on_end = on_end
        self._open: dict[int, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, sequence_id: int, request: OpenRequest) -> None:
        self._open[sequence_id] = request

    def named(self, request_id: str) -> list[int]:
        """Sequence ids of the requests that carry ``request_id``."""
        return [i for i, r in self._open.items() if r.stream.request_id == request_id]

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Passes deliveries to their requests. A delivery for a request that has ended is dropped."""
        for delivery in deliveries:
            request = self._open.get(delivery.sequence_id)
            if request is None:
                continue
            if delivery.admitted_at is not None:
                request.admitted_at = delivery.admitted_at
            if delivery.updates:
                request.stream.push(delivery.updates)
            if delivery.end is not None:
                del self._open[delivery.sequence_id]
                self._end(request, delivery.end)
        self._on_end()

    def fail_all(self, error: KestrelError) -> None:
        """Ends all open requests without the step thread."""
        requests, self._open = self._open, {}
        now = time.monotonic()
        for request in requests.values():
            timings = StepTimings(scheduled_at=request.admitted_at, finished_at=now)
            self._end(request, RequestEnd(error, timings))
        self._on_end()

    def _end(self, request: OpenRequest, end: RequestEnd) -> None:
        request.on_end()
        outcome = end.outcome
        token_ids = () if isinstance(outcome, KestrelError) else outcome.token_ids
        metrics = metrics_of(
            request.timings,
            end.timings,
            input_tokens=num_positions(request.submission.prompt),
            output_tokens=len(token_ids),
        )
        self._observe(request, end, metrics)
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
            images=request.images,
            seed=request.submission.sampling.seed,
            logprobs=outcome.logprobs,
            absence=outcome.absence,
        )
        request.stream.finish(result)

    def _observe(self, request: OpenRequest, end: RequestEnd, metrics: EngineMetrics) -> None:
        if self._observer is None:
            return
        images, outcome = request.submission.images, end.outcome
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
            image_size=(images[0].width, images[0].height) if images else None,
            num_crops=sum(image.num_crops for image in images),
            accepted_at=request.timings.accepted_at,
            prepared_at=request.timings.prepared_at,
            scheduled_at=end.timings.scheduled_at,
            first_token_at=end.timings.first_token_at,
            finished_at=end.timings.finished_at,
        )
        try:
            self._observer.on_request(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on request %s", event.request_id)
