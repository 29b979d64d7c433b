"""Events that an engine reports to its observer: one for each step, request, and image prepared ahead. Plain values;
without an observer nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .events import EngineMetrics
from .info import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step that has come back. Instants: seconds of the monotonic clock; ``…_s``: seconds of the device's work."""

    step_id: int
    launched_at: float
    collected_at: float
    vision_s: float
    prefill_s: float
    decode_s: float
    num_crops: int
    num_prefill_positions: int
    num_decode: int
    request_ids: tuple[str, ...]
    """Requests with a row or a mask in the step, or with embeddings from it."""
    encoded_request_ids: tuple[str, ...]
    """Requests with images of which the step encoded crops."""
    failed: bool
    stats: SchedulerStats
    """The scheduler's counts when the step came back."""
    num_reused_crops: int = 0
    """Crops that skipped the tower, because an equal crop of another image had been encoded."""
    shared_groups: tuple[int, ...] = ()
    """For each group of rows whose common positions were read once for all of them, its number of rows."""
    num_masked: int = 0
    """Rows with a mask of the tokens that a constraint permits."""
    num_tokens: int = 0
    """Tokens that the step gave to requests."""
    token_gaps: tuple[tuple[float, int], ...] = ()
    """Pairs (seconds since the request's previous token, number of tokens with this gap); first tokens have none."""


class RequestEvent(NamedTuple):
    """One request that has ended. Instants: seconds of the monotonic clock, None where a phase never began. A tuple is
    made in a third of the time of a frozen dataclass."""

    request_id: str
    skill: str
    finish_reason: str
    """"stop", "length" or "cancelled"; "" if it failed."""
    error: str
    """Class name of the error, "" if it ended well."""
    metrics: EngineMetrics
    image_size: tuple[int, int] | None
    """Width and height in pixels of the first image, upright, if there was one."""
    num_crops: int
    """Crops of all images."""
    accepted_at: float
    prepared_at: float | None
    scheduled_at: float | None
    first_token_at: float | None
    finished_at: float
    adapter: str = ""
    """The name of the adapter that was applied, "" for none."""
    principal: str = ""
    """The principal that made the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEvent:
    """One image that was prepared ahead of requests. Instants: seconds of the monotonic clock."""

    request_id: str
    """The caller's id for it; may be ""."""
    error: str
    """Class name of the error, "" if it ended well."""
    size: tuple[int, int] | None
    """Width and height in pixels of the upright image."""
    num_crops: int
    seconds: float
    """Of work; the rest was waiting for a thread."""
    accepted_at: float
    ended_at: float


class Observer(Protocol):
    """Must be quick and must not raise. ``on_step`` is called on the step thread, the others on the event loop."""

    def on_step(self, event: StepEvent) -> None: ...

    def on_request(self, event: RequestEvent) -> None: ...

    def on_image(self, event: ImageEvent) -> None: ...
