"""CannedEngine: implements the engine's public interface without scheduler, tokenizer, step thread or skills.

It provides ``submit``, EngineStream, EngineResult and the observer. It sends the same words to all requests at the pace
of a device: every ``step_s``, a step gives each request a token. As in the real engine, a separate thread passes new
updates to the event loop, for all streams in one call, as often as delivery.py does. So the cost of a server with this
engine is the cost of the service. The thread polls for new requests at every step, because waking it would cost the
event loop time.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kestrel_engine import (
    EngineInfo,
    EngineMetrics,
    EngineResult,
    EngineStream,
    Observer,
    Request,
    RequestEvent,
    RuntimeConfig,
    StepEvent,
    StreamUpdate,
)
from kestrel_engine.preprocess.prepared_cache import source_digest
from kestrel_engine.steps import delivery
from kestrel_engine.types.events import SeenImage
from kestrel_engine.types.info import CompileCounts, MaskCounts, SchedulerStats
from kestrel_engine.types.model_config import parse_model_config

from .cpu_window import ENGINE_THREAD, Window, WindowKeeper

WORDS = ("the", "red", "bars", "are", "higher", "than", "most", "blue", "ones", "here")
MOST_TOKENS = 4096
PAGE_SIZE = 10
IMAGE_SIZE = (64, 64)
_UPDATES = [(n + 1, StreamUpdate(text=f" {WORDS[n % len(WORDS)]}")) for n in range(MOST_TOKENS)]
"""All updates, by the number of earlier tokens."""
_OUTPUTS = {"query": "answer", "caption": "caption"}
"""The field of a skill's output."""


@dataclass(slots=True, eq=False)
class _Request:
    """Only the engine's thread writes ``sampled``, ``delivered`` and ``ended``. All else but ``aborts`` is
    constant."""

    skill: str
    stream: EngineStream
    wanted: int
    accepted_at: float
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    sampled: int = 0
    delivered: int = 0
    ended: bool = False
    aborts: list[bool] = field(default_factory=list)
    """The stream has this list instead of the request: a cycle of both would wait for the garbage collector."""

    @property
    def aborted(self) -> bool:
        return bool(self.aborts)


_Delivery = tuple[_Request, list[tuple[int, StreamUpdate]], EngineResult | None]
"""A request, its new updates, and its result if it has ended."""


def canned_info(config: RuntimeConfig) -> EngineInfo:
    """Returns what a Moondream 2 on a device that computes nothing would say of itself."""
    model = parse_model_config({"config": {}}, family="moondream2")
    positions = min(model.text.max_context, config.max_seq_length or model.text.max_context)
    return EngineInfo(
        model="canned",
        family=model.family,
        skills=model.skills,
        max_context=positions,
        image_positions=model.image_positions,
        max_crops=model.vision.max_crops,
        vocab_size=model.text.vocab_size,
        num_parameters=0,
        weights_bytes=0,
        weights_fingerprint="",
        device="canned",
        dtype="none",
        max_batch_size=config.max_batch_size,
        num_pages=(config.max_batch_size + 1) * (positions // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_queue=config.max_queue,
        torch_version="",
    )


class CannedEngine:
    """Replaces InferenceEngine in a server. Create it on the event loop. ``streams`` requests make a full step."""

    def __init__(
        self, info: EngineInfo, *, step_s: float, streams: int, observer: Observer | None = None
    ) -> None:
        self.info = info
        self.is_ready = True
        self.stats = SchedulerStats(pages_free=1, pages_total=1)
        self.compiled = CompileCounts()
        self.mask_counts = MaskCounts()
        self.num_requests = 0
        self._step_s, self._streams, self._observer = step_s, streams, observer
        self._loop = asyncio.get_running_loop()
        self._new: deque[_Request] = deque()
        self._closed = False
        self._kept = WindowKeeper()
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._thread.start()

    async def start(self, request: Request) -> EngineStream:
        """As the real engine's, but only ``max_tokens`` has an effect."""
        wanted = min(MOST_TOKENS, request.settings.get("max_tokens", 64))
        image = next(iter(request.images), None)
        digest = source_digest(image)
        seen = (
            ()
            if digest is None
            else (SeenImage(size=IMAGE_SIZE, digest=digest.hex(), num_crops=1),)
        )
        aborts: list[bool] = []
        stream = EngineStream(
            request.request_id, functools.partial(aborts.append, True), images=seen, seed=1
        )
        self.num_requests += 1
        self._new.append(_Request(request.skill, stream, wanted, time.monotonic(), aborts=aborts))
        return stream

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        """Admits every request."""

    def window(self) -> Window:
        """Returns the window of the latest run of full steps. Raises RuntimeError if there was no run long enough."""
        return self._kept.window()

    async def shutdown(self, *, grace_s: float = 10.0) -> None:
        self._closed = True
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        """Runs steps at the device's pace, and waits between two calls of the event loop."""
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
            waiting = [r for r in running if r.sampled > r.delivered]
            if waiting and now >= due:
                pause_s = delivery.PAUSE_PER_STREAM_S * len(waiting)
                due = now + min(delivery.LONGEST_PAUSE_S, pause_s)
                self._tell(waiting)
            running = [r for r in running if not r.ended]
            until = min(step_ends, due) if waiting and due > now else step_ends
            time.sleep(max(0.0, until - time.monotonic()))

    def _step(self, running: list[_Request], step_id: int, now: float) -> list[_Request]:
        """Samples one token for each request. Returns the requests whose streams must be updated at once."""
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
        deliveries: list[_Delivery] = []
        for request in requests:
            updates = _UPDATES[request.delivered : request.sampled]
            request.delivered = request.sampled
            request.ended = request.aborted or request.delivered >= request.wanted
            result = _result(request, self.info.model) if request.ended else None
            deliveries.append((request, updates, result))
        self._loop.call_soon_threadsafe(self._deliver, deliveries)

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        """Runs on the event loop."""
        for request, updates, result in deliveries:
            request.stream.push(updates)
            if result is not None:
                self.num_requests -= 1
                if self._observer is not None:
                    self._observer.on_request(_request_event(request, result.metrics))
                request.stream.finish(result)


def _result(request: _Request, model: str) -> EngineResult:
    now = time.monotonic()
    accepted, scheduled, first = request.accepted_at, request.scheduled_at, request.first_token_at
    text = " ".join(WORDS[: request.delivered])
    return EngineResult(
        request_id=request.stream.request_id,
        output={_OUTPUTS[request.skill]: text},
        finish_reason="cancelled" if request.aborted else "length",
        metrics=EngineMetrics(
            input_tokens=20,
            output_tokens=request.delivered,
            queue_time_ms=1e3 * (scheduled - accepted),
            prefill_time_ms=1e3 * (first - scheduled),
            decode_time_ms=1e3 * (now - first),
            ttft_ms=1e3 * (first - accepted),
            processing_time_ms=1e3 * (now - scheduled),
            total_time_ms=1e3 * (now - accepted),
        ),
        model=model,
        images=request.stream.images,
        seed=request.stream.seed,
    )


def _request_event(request: _Request, metrics: EngineMetrics) -> RequestEvent:
    has_image = bool(request.stream.images)
    return RequestEvent(
        request_id=request.stream.request_id,
        skill=request.skill,
        finish_reason="length",
        error="",
        metrics=metrics,
        image_size=IMAGE_SIZE if has_image else None,
        num_crops=int(has_image),
        accepted_at=request.accepted_at,
        prepared_at=request.accepted_at if has_image else None,
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
