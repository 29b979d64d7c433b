"""OpenRequests: the requests that were accepted and whose outcome has not come back.

Owns their streams, on the event loop; turns deliveries into updates and results, and tells the observer of each end.
Knows no scheduler and no runtime.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from ..errors import KestrelError
from ..scheduler.sequence import Sequence
from ..steps.delivery import Delivery, Finished
from ..types.events import EngineMetrics, EngineResult
from ..types.observer import Observer, RequestEvent
from ..types.timings import RequestTimings
from .stream import EngineStream

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """One of them; ``input_tokens`` counts prompt positions."""

    skill: str
    stream: EngineStream
    timings: RequestTimings
    sequence: Sequence
    input_tokens: int
    on_end: Callable[[], None]

    def metrics(self, output_tokens: int) -> EngineMetrics:
        return self.timings.metrics(
            input_tokens=self.input_tokens,
            output_tokens=output_tokens,
            cached_tokens=self.sequence.num_cached,
        )

    @property
    def image_size(self) -> tuple[int, int] | None:
        image = self.sequence.image
        return None if image is None else (image.width, image.height)


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
        """Hands out what steps did. What is said of a request that has ended is dropped."""
        for delivery in deliveries:
            request = self._open.get(delivery.sequence_id)
            if request is None:
                continue
            if delivery.updates:
                request.stream.push(delivery.updates)
            if delivery.outcome is not None:
                del self._open[delivery.sequence_id]
                self._end(request, delivery.outcome)
        self._on_end()

    def fail_all(self, error: KestrelError) -> None:
        requests, self._open = self._open, {}
        for request in requests.values():
            self._end(request, error)
        self._on_end()

    def _end(self, request: OpenRequest, outcome: Finished | KestrelError) -> None:
        request.on_end()
        timings = request.timings
        if timings.finished_at is None:  # The step thread never got to its end.
            timings.scheduled_at = request.sequence.admitted_at
            timings.finished_at = time.monotonic()
        if isinstance(outcome, KestrelError):
            self._observe(request, request.metrics(0), error=type(outcome).__name__)
            request.stream.fail(outcome)
            return
        result = EngineResult(
            request_id=request.stream.request_id,
            output=outcome.output,
            finish_reason=outcome.reason,
            token_ids=outcome.token_ids,
            metrics=request.metrics(len(outcome.token_ids)),
            model=self._model,
            image_size=request.image_size,
            seed=request.sequence.sampling.seed,
        )
        self._observe(request, result.metrics, reason=result.finish_reason)
        request.stream.finish(result)

    def _observe(
        self, request: OpenRequest, metrics: EngineMetrics, *, reason: str = "", error: str = ""
    ) -> None:
        if self._observer is None:
            return
        timings, image = request.timings, request.sequence.image
        event = RequestEvent(
            request_id=request.stream.request_id,
            skill=request.skill,
            finish_reason=reason,
            error=error,
            metrics=metrics,
            image_size=request.image_size,
            num_crops=0 if image is None else image.num_crops,
            accepted_at=timings.accepted_at,
            prepared_at=timings.prepared_at,
            scheduled_at=timings.scheduled_at,
            first_token_at=timings.first_token_at,
            finished_at=timings.finished_at or time.monotonic(),
        )
        try:
            self._observer.on_request(event)
        except Exception:  # What measures must not disturb what it measures.
            logger.exception("the observer failed on request %s", event.request_id)
