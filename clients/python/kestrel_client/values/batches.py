"""Batches and their results, read from the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

from .._pb.kestrel.v1 import batch_service_pb2 as pb
from ..errors import InvalidRequestError, RpcError, from_rpc_status
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

_MOST_REQUESTS, _LONGEST_ID = 50_000, 512
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


def check_requests(requests: BatchRequests) -> None:
    """Raises InvalidRequestError."""
    if not isinstance(requests, Mapping) or not 1 <= len(requests) <= _MOST_REQUESTS:
        told = (
            f"{len(requests)} requests" if isinstance(requests, Mapping) else repr(requests)[:100]
        )
        raise InvalidRequestError(
            f"requests: must be a mapping of ids to 1 to {_MOST_REQUESTS} requests, not {told}"
        )
    for custom_id, request in requests.items():
        where = f"requests[{custom_id!r:.100}]"
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _LONGEST_ID:
            raise InvalidRequestError(f"{where}: the id must have 1 to {_LONGEST_ID} characters")
        if not isinstance(request, tuple) or len(request) != 2:
            raise InvalidRequestError(
                f"{where}: must be a tuple of an image and what to do with it"
            )


def read_batch_result(
    message: pb.StreamBatchResultsResponse, requests: BatchRequests | None
) -> BatchResult:
    """Raises InvalidRequestError if ``requests`` are not those of the batch."""
    kind = message.WhichOneof("outcome")
    image, tasks = _asked(message, kind, requests)
    response: Any = message.error if kind is None else getattr(message, kind)
    outcome: Any
    if kind is None or kind == "error":
        outcome = from_rpc_status(response)
    elif kind == "embed":
        outcome = embed_result(response, "")
    elif isinstance(tasks, dict):
        outcome = analyze_result(response, tasks, image)  # type: ignore[arg-type]
    else:
        outcome = read_result(tasks, response, image)
    return BatchResult(custom_id=message.custom_id, index=message.index, outcome=outcome)


def _asked(
    message: pb.StreamBatchResultsResponse, kind: str | None, requests: BatchRequests | None
) -> tuple[ImageInput | None, Any]:
    """The image and the tasks, by key if there are several, of a result of a kind."""
    own: Any = _TASKS.get(kind)
    if kind == "analyze":
        own = {r.key: _TASKS.get(r.WhichOneof("outcome")) for r in message.analyze.results}
    if requests is None:
        return None, own
    image, given = requests.get(message.custom_id, (None, None))
    tasks = given if given is None or isinstance(given, Task) else keyed(given)
    is_same = isinstance(tasks, type(own)) and (
        not isinstance(tasks, dict) or own.keys() == tasks.keys()
    )
    if tasks is None or not (own is None or is_same):
        ids = ", ".join(map(repr, islice(requests, 3)))
        raise InvalidRequestError(
            f"requests: are not those of the batch, whose request {message.index} is {message.custom_id!r} with "
            f"{kind}; given were {len(requests)} like {ids}"[:1000]
        )
    return image, tasks
