"""What must hold at every moment, and what must be left when all requests have ended."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kestrel_engine import (
    DeadlineExceeded,
    Displaced,
    EngineClosed,
    EngineOverloaded,
    EngineResult,
    ImageDecodeError,
    ImageError,
    ImageEvent,
    ImageTooSlowError,
    InferenceEngine,
    QueueTimeout,
    RequestEvent,
    RuntimeFailure,
    StepEvent,
)
from kestrel_engine.steps.delivery import Delivery
from tests.engine.inside import inside

from .questions import Question

PATIENCE_S = 300.0
"""No request of a world takes longer, whatever happens to it and to others."""
_STEP_S = 15.0
"""No step takes longer, but for those that hang."""
_DECODING_S = 5.0
"""No image is decoded for longer."""


@dataclass(slots=True)
class CallerRequest:
    """A request as its caller sees it. ``text``: of the updates that were read."""

    request_id: str
    question: Question
    began_at: float
    timeout_s: float | None = None
    text: str = ""
    has_read_all: bool = False
    left: bool = False
    """The caller cancelled it, or left."""
    is_accepted: bool = False
    """The engine returned its stream."""
    ended_at: float | None = None


@dataclass
class Faults:
    """What was injected, and when."""

    at: list[tuple[float, str]] = field(default_factory=list)

    def since(self, began_at: float, *names: str) -> bool:
        return any(at >= began_at and name in names for at, name in self.at)


class Watch:
    """Hears all that happens to requests. It is the engine's observer, too."""

    def __init__(self, faults: Faults, patience_s: float) -> None:
        """``patience_s``: the most seconds that a request may take, whatever happens to it."""
        self._faults, self.patience_s = faults, patience_s
        self.open: dict[str, CallerRequest] = {}
        self.events: Counter[str] = Counter()
        """Ends that the observer heard of, by request."""
        self.tokens: Counter[str] = Counter()
        """Tokens of requests that have ended, by caller."""
        self.longest: dict[str, float] = {}
        """Seconds of the longest request, by caller."""
        self._ended_sequences: set[int] = set()
        self.ends: Counter[str] = Counter()
        """How requests ended."""

    def on_step(self, event: StepEvent) -> None: ...

    def on_image(self, event: ImageEvent) -> None: ...

    def on_request(self, event: RequestEvent) -> None:
        self.events[event.request_id] += 1
        caller, metrics = event.request_id.partition("-")[0], event.metrics
        self.tokens[caller] += metrics.output_tokens
        self.longest[caller] = max(self.longest.get(caller, 0.0), metrics.total_time_ms / 1e3)

    def delivered(self, deliveries: list[Delivery]) -> None:
        for each in deliveries:
            assert each.sequence_id not in self._ended_sequences, (
                f"sequence {each.sequence_id} had ended, and more comes: {each}"
            )
            if each.end is not None:
                self._ended_sequences.add(each.sequence_id)

    def began(self, asked: CallerRequest) -> None:
        assert asked.request_id not in self.open
        self.open[asked.request_id] = asked

    def closed(self, asked: CallerRequest, now: float, how: str) -> None:
        """A request has ended, and ``how``."""
        assert asked.ended_at is None, f"{asked.request_id} ended twice"
        asked.ended_at = now
        del self.open[asked.request_id]
        self.ends[how] += 1

    def ended(
        self, asked: CallerRequest, now: float, outcome: Any, alone: EngineResult | Exception
    ) -> None:
        """``outcome``: a result or an error. ``alone``: that of the same question when nothing else happens."""
        how = outcome.finish_reason if isinstance(outcome, EngineResult) else type(outcome).__name__
        if outcome is None:
            assert asked.left, asked
            how = "dropped"
        self.closed(asked, now, how)
        if isinstance(outcome, EngineResult):
            self._check_result(asked, outcome, alone)
        elif outcome is not None:
            self._check_error(asked, outcome)
        heard = self.events.pop(asked.request_id, 0)
        if asked.question.num_sequences is not None:
            assert heard == asked.is_accepted, f"{asked}: {heard} ends for the observer"

    def overdue(self, now: float) -> None:
        """Raises AssertionError if a request starves."""
        for asked in self.open.values():
            assert now - asked.began_at < self.patience_s, (
                f"{asked} did not end within {self.patience_s:.0f} s"
            )

    def _check_result(self, asked: CallerRequest, result: EngineResult, alone: Any) -> None:
        assert isinstance(alone, EngineResult), f"{asked} alone: {alone!r}"
        if result.finish_reason == "cancelled":
            assert asked.left, f"{asked} was not cancelled"
            if asked.question.num_sequences == 1:
                assert result.token_ids == alone.token_ids[: len(result.token_ids)], asked
            return
        assert result.finish_reason == alone.finish_reason, (asked, result, alone)
        assert result.token_ids == alone.token_ids, (asked, result.token_ids, alone.token_ids)
        assert _plain(result.output) == _plain(alone.output), (asked, result.output, alone.output)
        assert result.logprobs == alone.logprobs, asked
        if asked.has_read_all and "answer" in result.output:
            assert asked.text == result.output["answer"], (asked, result.output)

    def _check_error(self, asked: CallerRequest, error: BaseException) -> None:
        injected = self._faults.since
        began = asked.began_at
        earlier = (
            began - _DECODING_S
        )  # Requests for an image that is being decoded wait for it, too.
        expected = {
            EngineOverloaded: True,
            Displaced: True,
            DeadlineExceeded: asked.timeout_s is not None,
            QueueTimeout: True,
            EngineClosed: injected(0.0, "shutdown", "hang") or injected(earlier, "lost decoder"),
            ImageDecodeError: asked.question.is_broken,
            ImageTooSlowError: injected(earlier, "stuck decoder"),
        }
        if isinstance(error, RuntimeFailure):
            assert any(injected(*known) for known in _causes(error, began)), f"{asked}: {error!r}"
        elif isinstance(error, ImageError) and injected(earlier, "lost decoder"):
            pass
        else:
            assert expected.get(type(error), False), f"{asked}: {error!r}"


def _causes(error: RuntimeFailure, began: float) -> list[tuple[Any, ...]]:
    """What may have caused the error of a request that began then: from when on, and the names of the faults."""
    text = str(error)
    if "no step ended" in text:
        return [(0.0, "hang")]
    if "not finite" in text:
        # An image stays bad until it is encoded.
        return [(began - PATIENCE_S, "not finite"), (0.0, "bad image")]
    if "follow the constraint" in text:
        return [(began, "lost mask")]
    if "decod" in text:
        return [(began - _DECODING_S, "lost decoder")]
    return [(began - _STEP_S, "refused", "failing", "out of memory")]


def _plain(output: Any) -> Any:
    if isinstance(output, dict):
        return {name: _plain(value) for name, value in output.items()}
    return output.tolist() if isinstance(output, np.ndarray) else output


def check_now(engine: InferenceEngine) -> None:
    """What holds after every turn of the step loop."""
    parts = inside(engine)
    parts.loop._scheduler.check()
    places = parts.submitter.places
    shares = places.shares
    holders = shares.members.values()
    assert places.held == sum(holder.held for holder in holders)
    assert places.held <= places.bound + places.reserved, "more places than there are"
    assert shares._weights == sum(holder.weight for holder in holders)


def check_idle(engine: InferenceEngine) -> None:
    """What holds when all requests have ended and the engine runs."""
    assert engine.num_requests == 0 and engine.places.held == 0, engine.places
    parts = inside(engine)
    loop, load = parts.loop, parts.submitter.images.pool.load
    scheduler = loop._scheduler
    scheduler.check()
    stats = engine.stats
    assert stats.running == stats.waiting == 0, stats
    assert stats.pages_free + stats.pages_cached == stats.pages_total, f"pages are lost: {stats}"
    assert stats.pages_evictable == stats.pages_cached, f"cached pages have users: {stats}"
    assert not loop._requests._active and not any(loop._out.values())
    assert not scheduler._batch.images.users(), "an image has users"
    assert not parts.delivery._over and not parts.delivery._pending
    assert load == (0, 0, 0, 0, 0, 0, 0, 0, load.idle)


def check_flushed(engine: InferenceEngine) -> None:
    """What holds when the caches were dropped, too."""
    stats = engine.stats
    assert stats.pages_free == stats.pages_total, f"pages are lost: {stats}"
