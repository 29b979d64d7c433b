"""FrameResult: the outcome of a frame of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, overload

from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..errors import KestrelError, RpcError, from_rpc_status
from ..images.image_forms import ImageInput
from .reading import read, words_by_value
from .results.base import Result
from .tasks import AnalyzeResult, Task, TaskOf, analyze_result

R = TypeVar("R", bound=Result)

Dropped: TypeAlias = Literal["newer_frame", "stale", "lost"]
"""A newer frame arrived while it waited, it waited longer than the latency budget, or the connection broke."""

_DROPPED: dict[int, Dropped] = words_by_value(pb.DropReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameResult:
    """One frame of a stream: exactly one of ``analysis``, ``dropped`` and ``error`` is set.

    ``frame[task]`` is the result of a task, as that of an AnalyzeResult.
    """

    frame_id: int
    """1 for the first frame of the source, 2 for the next."""
    analysis: AnalyzeResult | None = None
    """The results of all tasks, with ``draw()`` and ``save()``."""
    dropped: Dropped | None = None
    error: RpcError | None = None
    source: ImageInput | None = None
    """The image."""
    num_crops: int = 0
    """Crops of the frame that were computed. The contract has it as ``work.crops``."""
    encoded_crops: int = 0
    """Crops that passed through the vision tower."""
    reused_crops: int = 0
    """Crops that were equal to crops of earlier images. If both are 0, the frame was equal to an earlier image."""
    overview_only: bool = False
    """Whether the frame was computed with its overview only, because it was late."""
    repeated: bool = False
    """Whether the frame has the results of the frame before, which has the same pixels; then nothing was computed."""
    waited_ms: float = 0.0
    total_ms: float = 0.0
    """From the frame's arrival at the server to its response."""
    request_id: str = ""

    @overload
    def __getitem__(self, key: TaskOf[R]) -> R: ...
    @overload
    def __getitem__(self, key: str | int) -> Any: ...
    def __getitem__(self, key: TaskOf[Any] | str | int) -> Any:
        """Returns a task's result by task, key or position. Raises the error of the frame or the task, and KestrelError
        for a frame that was dropped."""
        if self.error is not None:
            raise self.error
        if self.analysis is None:
            raise KestrelError(f"frame {self.frame_id} was dropped ({self.dropped})")
        return self.analysis[key]


def frame_result(
    response: pb.StreamFramesResponse, tasks: Mapping[str, Task], source: ImageInput
) -> FrameResult:
    """``tasks``: those of the stream, by key."""
    outcome: dict[str, Any]
    match response.WhichOneof("outcome"):
        case "results":
            outcome = {"analysis": analyze_result(response.results, tasks, source)}
        case "dropped":
            outcome = {"dropped": _DROPPED.get(response.dropped, "stale")}
        case _:
            outcome = {"error": from_rpc_status(response.error)}
    return read(
        FrameResult,
        response.work,
        num_crops=response.work.crops,
        frame_id=response.frame_id,
        request_id=response.request_id,
        source=source,
        **{"analysis": None, "dropped": None, "error": None, **outcome},
    )
