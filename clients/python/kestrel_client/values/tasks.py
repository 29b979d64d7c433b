"""Tasks of ``analyze``: what is asked of one picture at once, and what became of each task."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..drawing.marks import Marks, MaskFormat
from ..errors import InvalidRequestError, RpcError, from_task_error
from ..images.images import ImageInput
from .events import Event, read_event
from .geometry import ImageSize, SpatialRef
from .results import (
    CaptionResult,
    DetectResult,
    PointResult,
    QueryResult,
    Result,
    SegmentResult,
    Usage,
    caption_result,
    detect_result,
    draw_marks,
    notebook_png,
    plain_value,
    point_result,
    query_result,
    read_image_size,
    read_usage,
    segment_result,
)

if TYPE_CHECKING:
    import PIL.Image

R = TypeVar("R", bound=Result)
R_co = TypeVar("R_co", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOf(Generic[R_co]):
    """A task that gives an R_co, and how its tokens are chosen; None is the server's to decide. See CallOptions."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class QueryTask(TaskOf[QueryResult]):
    """As ``query``."""

    question: str
    reasoning: bool | None = None
    spatial_refs: Iterable[SpatialRef] = ()


@dataclass(frozen=True, slots=True)
class CaptionTask(TaskOf[CaptionResult]):
    """As ``caption``."""

    length: Literal["short", "normal", "long"] = "normal"


@dataclass(frozen=True, slots=True)
class PointTask(TaskOf[PointResult]):
    """As ``point``."""

    object: str
    max_objects: int | None = None
    spatial_refs: Iterable[SpatialRef] = ()


@dataclass(frozen=True, slots=True)
class DetectTask(TaskOf[DetectResult]):
    """As ``detect``."""

    object: str
    max_objects: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentTask(TaskOf[SegmentResult]):
    """As ``segment``."""

    object: str
    spatial_refs: Iterable[SpatialRef] = ()
    mask: MaskFormat = "none"


Task: TypeAlias = QueryTask | CaptionTask | PointTask | DetectTask | SegmentTask
Tasks: TypeAlias = Sequence[Task] | Mapping[str, Task]
"""Tasks by their position, or by names of yours: 1 to 128 visible ASCII characters."""
Outcome: TypeAlias = Result | RpcError
"""A task's result, or why it failed."""


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Something a task gave: see ``stream_query`` and the others for what there is."""

    key: str
    event: Event


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A task's end."""

    key: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AnalyzeResult:
    """What became of all tasks: iterates over their keys.

    ``analysis[task]``, with one of the tasks that were asked for, is its result, of the task's own type for type
    checkers; ``analysis["name"]`` and ``analysis[0]`` find it by key. If the task failed, its error is raised.
    """

    outcomes: Mapping[str, Outcome]
    """By key, in the order of the tasks."""
    usage: Usage
    """Of all tasks together."""
    total_time_ms: float
    model: str
    request_id: str
    image_size: ImageSize | None
    image_id: str
    """Id by which later calls may name the picture; empty if the server doesn't keep it."""
    source: ImageInput | None = field(default=None, repr=False, compare=False)
    tasks: Mapping[str, Task] = field(default_factory=dict, repr=False, compare=False)
    """What was asked for, by key."""

    @overload
    def __getitem__(self, key: TaskOf[R]) -> R: ...
    @overload
    def __getitem__(self, key: str | int) -> Any: ...
    def __getitem__(self, key: TaskOf[Any] | str | int) -> Any:
        """A task's result, by the task, by key, or by position: a QueryResult for a QueryTask, and so on.

        Raises the task's RpcError, or KeyError.
        """
        if isinstance(key, TaskOf):
            return self.result(
                next((k for k, task in self.tasks.items() if task is key), repr(key))
            )
        return self.result(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    def __repr__(self) -> str:
        return f"AnalyzeResult({', '.join(f'{k}: {o!r}' for k, o in self.outcomes.items())})"

    @property
    def marks(self) -> Marks:
        """Those of all tasks that succeeded."""
        results = (o for o in self.outcomes.values() if isinstance(o, Result))
        return sum((result.marks for result in results), Marks())

    def draw(self, image: ImageInput | None = None) -> PIL.Image.Image:
        """As Result.draw, with the marks of all tasks."""
        return draw_marks(self.marks, image, self.source)

    def save(self, path: str | os.PathLike[str], image: ImageInput | None = None) -> None:
        """As Result.save."""
        self.draw(image).save(path)

    def _repr_png_(self) -> bytes | None:
        return notebook_png(self.marks, self.source)

    def result(self, key: str | int, kind: type[R] = Result) -> R:  # type: ignore[assignment]
        """As ``[key]``, for type checkers: ``result("about", CaptionResult)``. Raises TypeError for another kind."""
        outcome = self.outcomes[str(key)]
        if isinstance(outcome, RpcError):
            raise outcome
        if not isinstance(outcome, kind):
            raise TypeError(f"task {key!r} gave a {type(outcome).__name__}, not a {kind.__name__}")
        return outcome

    @property
    def errors(self) -> dict[str, RpcError]:
        """Why tasks failed, by key; empty if none did."""
        return {key: o for key, o in self.outcomes.items() if isinstance(o, RpcError)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps`` takes. A failed task is {"error": {"code", "message", "reason"}}."""
        shared = {f.name: getattr(self, f.name) for f in fields(self)}
        del shared["outcomes"], shared["source"], shared["tasks"]
        tasks = {key: outcome_dict(outcome) for key, outcome in self.outcomes.items()}
        return {"tasks": tasks, **{name: plain_value(value) for name, value in shared.items()}}


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """Plain values that ``json.dumps`` takes."""
    if isinstance(outcome, RpcError):
        told = {"code": outcome.code.name, "message": outcome.message, "reason": outcome.reason}
        return {"error": told}
    return outcome.to_dict()


def keyed(tasks: Tasks) -> dict[str, Task]:
    """The tasks by key. Raises InvalidRequestError."""
    if not isinstance(tasks, (Mapping, Sequence)) or isinstance(tasks, (str, bytes)):
        raise InvalidRequestError(
            "tasks: must be a sequence of tasks, or a mapping of names to tasks"
        )
    pairs = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    read = {str(key): task for key, task in pairs}
    for key, task in read.items():
        if not isinstance(task, Task):
            raise InvalidRequestError(f"tasks[{key!r}]: {task!r} is no task, like QueryTask")
    return read


def read_result(task: Task, response: Any, source: ImageInput | None) -> Result:
    """``response``: the response of the task's method."""
    match task:
        case QueryTask():
            return query_result(response, source, task.question)
        case CaptionTask():
            return caption_result(response, source)
        case PointTask():
            return point_result(response, source, task.object)
        case DetectTask():
            return detect_result(response, source, task.object)
        case SegmentTask():
            return segment_result(response, source, task.object)


def read_outcome(message: pb.TaskResult, tasks: Mapping[str, Task], source: ImageInput) -> Outcome:
    """``tasks``: those of the request, by key."""
    outcome = message.WhichOneof("outcome")
    if outcome is None or outcome == "error":
        return from_task_error(message.error)
    return read_result(tasks[message.key], getattr(message, outcome), source)


def analyze_result(
    response: pb.AnalyzeResponse, tasks: Mapping[str, Task], source: ImageInput
) -> AnalyzeResult:
    return AnalyzeResult(
        outcomes={r.key: read_outcome(r, tasks, source) for r in response.results},
        usage=read_usage(response.usage),
        total_time_ms=response.total_time_ms,
        model=response.model,
        request_id=response.request_id,
        image_size=read_image_size(response),
        image_id=response.image_id,
        source=source,
        tasks=tasks,
    )


def read_task_event(
    message: pb.StreamAnalyzeResponse,
    payload: object,
    tasks: Mapping[str, Task],
    source: ImageInput,
) -> TaskEvent | TaskDone | None:
    """What is shown of a message; None for the start, the end and the unknown."""
    if isinstance(payload, pb.TaskResult):
        return TaskDone(message.key, read_outcome(payload, tasks, source))
    event = read_event(payload)
    return None if event is None else TaskEvent(message.key, event)
