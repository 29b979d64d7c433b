"""StreamFrames: runs the same tasks on every frame of a stream, and drops or simplifies late frames.

edge/request_streams.py reads the stream and makes each frame a call of its own. FrameStream is what the calls of one
stream share: the config, the frames that are computed, and the one that waits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest, clock

from ...edge.calls.call import CallOptions, Metadata
from ...edge.calls.current import current
from ...edge.failures.statuses import Complaint
from ...edge.messages.fields import call_options, in_range, known_value
from ...edge.request_streams import StreamKind
from ...images.request_images import RequestImages, images_of
from ...security.admission.message_room import COPIES
from ...security.identity.principal import Principal
from ...served_model import ServedModels
from ..messages.responses import rounded_ms
from .analysis import read_tasks, run_tasks
from .kinds import CallTask
from .repeats import LastFrames
from .run import Run

MOST_STREAMS = 32
"""Limit on the open streams of one principal."""
_MOST_IN_FLIGHT, _IN_FLIGHT = 16, 2
_MOST_BUDGET_MS = 60_000
_FADING = 0.9
"""A frame that is computed with its overview only shortens the expected time of a whole one by this factor."""

_LATE = {
    pb.LATE_FRAMES_UNSPECIFIED: False,
    pb.LATE_FRAMES_KEEP: False,
    pb.LATE_FRAMES_OVERVIEW: True,
}
_ENDS_THE_STREAM = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Statuses that all further frames would have too."""


@dataclass(frozen=True, slots=True, eq=False)
class _Config:
    """A checked FramesConfig."""

    tasks: list[CallTask[Any, Any]]
    options: CallOptions
    budget_s: float | None
    overview_if_late: bool
    in_flight: int
    has_tiles: bool


class FrameStream:
    """The state of one stream. Its frames begin in the order of their arrival."""

    def __init__(self) -> None:
        self._config: _Config | None = None
        self._last_id = 0
        self._num_running = 0
        self._waiting: asyncio.Future[pb.DropReason.ValueType] | None = None
        """Of the frame that waits. Its result is DROP_REASON_UNSPECIFIED when the frame may begin."""
        self._whole_frame_s = 0.0
        """The time that a frame with all crops is expected to take."""
        self._last_frames: LastFrames | None = None

    @property
    def config(self) -> _Config:
        assert self._config is not None, "take() comes first"
        return self._config

    @property
    def last_frames(self) -> LastFrames:
        assert self._last_frames is not None, "take() comes first"
        return self._last_frames

    @property
    def most_requests(self) -> int:
        """As in StreamState. With a budget, one frame waits beside those that run, and one may replace it."""
        if self._config is None:
            return 1
        return self._config.in_flight + (0 if self._config.budget_s is None else 2)

    def take(self, message: pb.StreamFramesRequest, principal: Principal) -> bool:
        """As in StreamState. Raises InvalidRequest, ScopeMissing."""
        if self._config is None:
            self._config = _checked(message, principal)
            self._last_frames = LastFrames(
                self._config.tasks, self._config.options, self._config.in_flight
            )
            self._last_id = message.config.last_frame_id
            return False
        if message.HasField("config"):
            raise InvalidRequest("config", "must be in the first message only")
        if not message.HasField("frame"):
            raise InvalidRequest("frame", "is required in every message after the first")
        frame_id = message.frame.frame_id
        if frame_id < 1:
            raise InvalidRequest(("frame", "frame_id"), "must be at least 1")
        if frame_id <= self._last_id:
            raise InvalidRequest(
                ("frame", "frame_id"),
                f"is {frame_id}, but must be above {self._last_id}, the id of the frame before it",
            )
        self._last_id = frame_id
        return True

    async def begin(self) -> pb.DropReason.ValueType:
        """Waits until the frame may be computed, and returns DROP_REASON_UNSPECIFIED; ``end`` must follow. Or returns
        why the frame is dropped."""
        config = self.config
        if self._num_running < config.in_flight:
            self._num_running += 1
            return pb.DROP_REASON_UNSPECIFIED
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(pb.DROP_REASON_NEWER_FRAME)
        self._waiting = decision = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({decision}, timeout=config.budget_s)
        except asyncio.CancelledError:
            if decision.done() and decision.result() == pb.DROP_REASON_UNSPECIFIED:
                self._pass_on()
            raise
        finally:
            if self._waiting is decision:
                self._waiting = None
        return decision.result() if decision.done() else pb.DROP_REASON_STALE

    def end(self, took_s: float | None, *, is_whole: bool) -> None:
        """A frame has ended, which took ``took_s``, or None if it failed or was not computed. ``is_whole``: it had all
        of its crops."""
        if took_s is not None:
            self._whole_frame_s = took_s if is_whole else _FADING * self._whole_frame_s
        self._pass_on()

    def is_late(self, waited_s: float) -> bool:
        """Whether a frame would have its results after the budget."""
        budget_s = self.config.budget_s
        return budget_s is not None and waited_s + self._whole_frame_s > budget_s

    def _pass_on(self) -> None:
        """Gives the place of a frame that has ended to the one that waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(pb.DROP_REASON_UNSPECIFIED)
        else:
            self._num_running -= 1


async def answer_frame(
    served: ServedModels, stored: RequestImages, frame: pb.Frame, context: Any
) -> None:
    """Writes the response of one frame. Raises an error that is about the frame, or about the whole stream."""
    stream: FrameStream = context.state
    call, config = current.get(), stream.config
    reason = await stream.begin()
    waited_ms = rounded_ms(call.duration_ms)
    if reason != pb.DROP_REASON_UNSPECIFIED:
        call.frame = "dropped"
        await context.write(_response(frame, {"waited_ms": waited_ms}, dropped=reason))
        return
    took_s: float | None = None
    is_whole, encoded, reused = True, 0, 0
    began = clock.now()
    try:
        call.options = config.options
        run = Run(served, stored, keeps_images=False)
        images = run.images
        await images.find(images_of(frame))
        await run.prepare()
        if config.overview_if_late and stream.is_late(call.duration_ms / 1e3):
            is_whole = images.only.num_distinct == 1 and not config.has_tiles
            images.take_overview()
            run.info().images[0].num_crops = images.num_crops
        async with stream.last_frames.repeating(images.only) as repeat:
            results = repeat.results(run.info())
            is_repeated = results is not None
            if results is None:
                results = await run_tasks(run, config.tasks)
                assert call.result is not None, "run_tasks sets it"
                used = call.result.metrics
                encoded, reused = used.encoded_crops, used.reused_crops
                repeat.keep(results)
                took_s = clock.now() - began
    finally:
        stream.end(took_s, is_whole=is_whole)
    call.frame = "repeated" if is_repeated else "answered" if is_whole else "overview"
    work = {
        "crops": images.num_crops,
        "encoded_crops": encoded,
        "reused_crops": reused,
        "overview_only": not is_whole,
        "repeated": is_repeated,
        "waited_ms": waited_ms,
    }
    await context.write(_response(frame, work, results=results))


def refuse(
    request: pb.StreamFramesRequest, complaint: Complaint, metadata: Metadata
) -> pb.StreamFramesResponse | None:
    """Returns the response of a frame that failed; None if the error must end the stream."""
    if complaint.code in _ENDS_THE_STREAM or complaint.reason == "MODEL_NOT_FOUND":
        return None
    current.get().frame = "failed"
    return _response(request.frame, {}, error=complaint.status)


FRAMES = StreamKind(refuse, FrameStream, COPIES, MOST_STREAMS)
"""The edge of StreamFrames."""


def _response(frame: pb.Frame, work: dict[str, Any], **outcome: Any) -> pb.StreamFramesResponse:
    """``work``: the fields of FrameWork but the last. ``outcome``: the field of the response that holds it."""
    call = current.get()
    return pb.StreamFramesResponse(
        frame_id=frame.frame_id,
        capture_time=frame.capture_time if frame.HasField("capture_time") else None,
        work=pb.FrameWork(**work, total_ms=rounded_ms(call.duration_ms)),
        request_id=call.request_id,
        **outcome,
    )


def _checked(message: pb.StreamFramesRequest, principal: Principal) -> _Config:
    """Raises InvalidRequest, ScopeMissing."""
    if not message.HasField("config"):
        raise InvalidRequest("config", "is required in the first message")
    config = message.config
    # The message is released when it is read.
    kept = pb.StreamFramesRequest()
    kept.CopyFrom(message)
    tasks = read_tasks(kept)
    if config.options.HasField("request_id"):
        raise InvalidRequest(
            ("config", "options", "request_id"), "must not be set: each frame has an id of its own"
        )
    if config.last_frame_id < 0:
        raise InvalidRequest(("config", "last_frame_id"), "must be at least 0")
    options = call_options(config.options, principal, ("config", "options"))
    overview = known_value(("config", "late"), config.late, pb.LateFrames, _LATE)
    budget_ms = in_range(config, "latency_budget_ms", 1, _MOST_BUDGET_MS, 1, ("config",))
    in_flight = in_range(config, "max_in_flight", 1, _MOST_IN_FLIGHT, _IN_FLIGHT, ("config",))
    has_budget = config.HasField("latency_budget_ms")
    if overview and not has_budget:
        raise InvalidRequest(("config", "late"), "needs latency_budget_ms")
    return _Config(
        tasks=tasks,
        options=options,
        budget_s=budget_ms / 1e3 if has_budget else None,
        overview_if_late=overview,
        in_flight=in_flight,
        has_tiles=any(task.has_tiles for task in tasks),
    )
