"""CannedEngine: what the service sees of an engine, and nothing behind it: no scheduler, tokenizer, step thread, skill.

It stands at the engine's public seam - ``submit``, EngineStream, EngineResult, the observer - and says the same words
to everyone at the pace of a device: a step every ``step_s`` gives each request a token. As with the real one, a thread
of its own hands what is new to the event loop, all streams in one call, as often as delivery.py does. So what a server
around it takes is the service's own. Its thread looks for new requests at every step instead of being woken, which the
event loop would pay for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_engine import (
    EngineInfo,
    EngineMetrics,
    EngineResult,
    EngineStream,
    Observer,
    RequestEvent,
    StepEvent,
    StreamUpdate,
)
from kestrel_engine.steps import delivery
from kestrel_engine.types.info import CompileCounts, SchedulerStats

from .cpu_window import Window, WindowKeeper

WORDS = ("the", "red", "bars", "are", "higher", "than", "most", "blue", "ones", "here")
MOST_TOKENS = 4096
IMAGE_SIZE = (64, 64)
_UPDATES = [(n + 1, StreamUpdate(text=f" {WORDS[n % len(WORDS)]}")) for n in range(MOST_TOKENS)]
"""By how many tokens came before: all that is ever said."""
_OUTPUTS = {"query": "answer", "caption": "caption"}
"""The field of a skill's output."""


@dataclass(slots=True, eq=False)
class _Request:
    """``sampled`` and ``told`` tokens and ``ended`` are the thread's, all else is fixed but ``aborted``."""

    skill: str
    stream: EngineStream
    wanted: int
    has_image: bool
    accepted_at: float
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    sampled: int = 0
    told: int = 0
    ended: bool = False
    aborted: bool = False


_Told = tuple[_Request, list[tuple[int, StreamUpdate]], EngineResult | None]
"""A request, its new updates, and its result if it has ended."""


class CannedEngine:
    """Stands in for InferenceEngine where a server uses it. Made on the event loop; ``streams`` make a full step."""

    def __init__(
        self, info: EngineInfo, *, step_s: float, streams: int, observer: Observer | None = None
    ) -> None:
        self.info = info
        self.is_ready = True
        self.stats = SchedulerStats(pages_free=1, pages_total=1)
        self.compiled = CompileCounts()
        self.num_requests = 0
        self._step_s, self._streams, self._observer = step_s, streams, observer
        self._loop = asyncio.get_running_loop()
        self._new: deque[_Request] = deque()
        self._closed = False
        self._kept = WindowKeeper()
        self._thread = threading.Thread(target=self._run, name="kestrel-canned", daemon=True)
        self._thread.start()

    async def submit(
        self,
        skill: str,
        image: Any = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        priority: str = "normal",
        timeout_s: float | None = None,
        cache_salt: str = "",
        principal: str = "",
        weight: float = 1.0,
    ) -> EngineStream:
        """As the real one's; of all that is asked it heeds ``max_tokens``."""
        wanted = min(MOST_TOKENS, (settings or {}).get("max_tokens", 64))
        stream = EngineStream(request_id or "canned", lambda: setattr(request, "aborted", True))
        request = _Request(skill, stream, wanted, image is not None, time.monotonic())
        self.num_requests += 1
        self._new.append(request)
        return stream

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        """There is always room."""

    def window(self) -> Window:
        """Of the latest run of full steps. Raises RuntimeError if there was none for long enough."""
        return self._kept.window()

    async def shutdown(self, *, grace_s: float = 10.0) -> None:
        self._closed = True
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        """The device's pace, and the rest between two calls of the event loop."""
        running: list[_Request] = []
        step_ends = due = 0.0
        step_id = 0
        while not self._closed:
            if not running and not self._new:
                time.sleep(self._step_s)
                step_ends = 0.0
                continue
            if not step_ends:
                self._kept = WindowKeeper()
            now = time.monotonic()
            if now >= step_ends:
                if running and step_ends:
                    step_id += 1
                    urgent = self._step(running, step_id, now)
                    if urgent:
                        self._tell(urgent)
                step_ends = max(step_ends + self._step_s, now)
                while self._new:
                    running.append(self._new.popleft())
                    running[-1].scheduled_at = now
            waiting = [r for r in running if r.sampled > r.told]
            if waiting and now >= due:
                pause_s = delivery.PAUSE_PER_STREAM_S * len(waiting)
                due = now + min(delivery.LONGEST_PAUSE_S, pause_s)
                self._tell(waiting)
            running = [r for r in running if not r.ended]
            until = min(step_ends, due) if waiting and due > now else step_ends
            time.sleep(max(0.0, until - time.monotonic()))

    def _step(self, running: list[_Request], step_id: int, now: float) -> list[_Request]:
        """One token for each; those whose stream should hear at once."""
        for request in running:
            request.sampled += 1
        if self._observer is not None:
            self._observer.on_step(_step_event(running, step_id, now, self._step_s))
        if len(running) == self._streams:
            self._kept.note()
        urgent = []
        for request in running:
            if request.sampled == 1:
                request.first_token_at = now
            if request.sampled in (1, request.wanted) or request.aborted:
                urgent.append(request)
        return urgent

    def _tell(self, requests: list[_Request]) -> None:
        told: list[_Told] = []
        for request in requests:
            updates = _UPDATES[request.told : request.sampled]
            request.told = request.sampled
            request.ended = request.aborted or request.told >= request.wanted
            result = _result(request, self.info.model) if request.ended else None
            told.append((request, updates, result))
        self._loop.call_soon_threadsafe(self._deliver, told)

    def _deliver(self, told: list[_Told]) -> None:
        """On the event loop."""
        for request, updates, result in told:
            request.stream.push(updates)
            if result is not None:
                self.num_requests -= 1
                if self._observer is not None:
                    self._observer.on_request(_request_event(request, result.metrics))
                request.stream.finish(result)


def _result(request: _Request, model: str) -> EngineResult:
    now = time.monotonic()
    accepted, scheduled, first = request.accepted_at, request.scheduled_at, request.first_token_at
    text = " ".join(WORDS[: request.told])
    return EngineResult(
        request_id=request.stream.request_id,
        output={_OUTPUTS[request.skill]: text},
        finish_reason="cancelled" if request.aborted else "length",
        metrics=EngineMetrics(
            input_tokens=20,
            output_tokens=request.told,
            queue_time_ms=1e3 * (scheduled - accepted),
            prefill_time_ms=1e3 * (first - scheduled),
            decode_time_ms=1e3 * (now - first),
            ttft_ms=1e3 * (first - accepted),
            processing_time_ms=1e3 * (now - scheduled),
            total_time_ms=1e3 * (now - accepted),
        ),
        model=model,
        image_size=IMAGE_SIZE if request.has_image else None,
        seed=1,
    )


def _request_event(request: _Request, metrics: EngineMetrics) -> RequestEvent:
    return RequestEvent(
        request_id=request.stream.request_id,
        skill=request.skill,
        finish_reason="length",
        error="",
        metrics=metrics,
        image_size=IMAGE_SIZE if request.has_image else None,
        num_crops=int(request.has_image),
        accepted_at=request.accepted_at,
        prepared_at=request.accepted_at if request.has_image else None,
        scheduled_at=request.scheduled_at,
        first_token_at=request.first_token_at,
        finished_at=time.monotonic(),
    )


def _step_event(running: list[_Request], step_id: int, now: float, step_s: float) -> StepEvent:
    return StepEvent(
        step_id=step_id,
        launched_at=now - step_s,
        collected_at=now,
        vision_s=0.0,
        prefill_s=0.0,
        decode_s=step_s,
        num_crops=0,
        num_prefill_positions=0,
        num_decode=len(running),
        request_ids=tuple([request.stream.request_id for request in running]),
        encoded_request_ids=(),
        failed=False,
        stats=SchedulerStats(running=len(running), pages_free=1, pages_total=1),
        num_tokens=len(running),
        token_gaps=((step_s, len(running)),),
    )
