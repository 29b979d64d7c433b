"""Batches and their results, read from the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from .._pb.kestrel.v1 import batch_service_pb2 as pb
from ..errors import RpcError, from_rpc_status
from ..images.image_forms import ImageInput
from .embeddings import EmbedResult, embed_result
from .plain import Plain
from .reading import read, words_by_value
from .results.base import Result
from .tasks import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    GazeTask,
    PointTask,
    QueryTask,
    SegmentTask,
    SkillTask,
    Task,
    Tasks,
    analyze_result,
    keyed,
    read_result,
)

BatchState: TypeAlias = Literal["in_progress", "completed", "cancelled", "expired", "failed"]
BatchRequests: TypeAlias = Mapping[str, "tuple[ImageInput | None, Task | Tasks]"]
"""Images and what to do with them, by ids of the caller's choice. Several tasks are those of ``analyze``."""

_STATES = words_by_value(pb.BatchState)
_TASKS: dict[str | None, Task] = {
    "query": QueryTask(""),
    "caption": CaptionTask(),
    "point": PointTask(()),
    "detect": DetectTask(()),
    "segment": SegmentTask(()),
    "skill": SkillTask(""),
    "gaze": GazeTask(),
}
"""Stand for the tasks of results whose requests are not known any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Plain):
    """A batch that the server has taken."""

    batch_id: str
    state: BatchState
    done: bool
    """Whether it has ended, so that it has all of its results."""
    total_requests: int
    completed_requests: int
    """Those that have a response."""
    failed_requests: int
    off_peak: bool
    """Whether the server answers it only while nobody else has asked it for a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What became of one request."""

    custom_id: str
    index: int
    """Its place in the batch, from 0."""
    outcome: Result | AnalyzeResult | EmbedResult | RpcError


def read_batch(message: pb.Batch) -> Batch:
    return read(Batch, message, state=_STATES[message.state])


def read_batch_result(
    message: pb.StreamBatchResultsResponse, requests: BatchRequests
) -> BatchResult:
    image, tasks = requests.get(message.custom_id, (None, None))
    kind = message.WhichOneof("outcome")
    response = None if kind is None else getattr(message, kind)
    outcome: Any
    if response is None or kind == "error":
        outcome = from_rpc_status(message.error)
    elif kind == "embed":
        outcome = embed_result(response, "")
    elif kind == "analyze":
        known = {r.key: _TASKS.get(r.WhichOneof("outcome")) for r in response.results}
        outcome = analyze_result(response, known if tasks is None else keyed(tasks), image)  # type: ignore[arg-type]
    else:
        outcome = read_result(tasks if isinstance(tasks, Task) else _TASKS[kind], response, image)
    return BatchResult(custom_id=message.custom_id, index=message.index, outcome=outcome)
