"""The tasks of ``analyze`` and ``map``, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..drawing.marks import Marks, MaskFormat
from ..errors import InvalidRequestError, RpcError, from_rpc_status
from ..geometry import BoxInput, ImageSize, PointInput, SpatialRef, TilesInput
from ..images.image_forms import ImageInput
from .constraint import Constraint
from .events import Event, read_event
from .plain import plain_fields, plain_value
from .reading import read
from .results.base import Result, Timings, Usage, info_fields
from .results.gazes import GazeResult, gaze_result
from .results.named_skill import SkillResult, skill_result
from .results.objects import DetectResult, PointResult, detect_result, point_result
from .results.outline import SegmentResult, segment_result
from .results.showing import Drawable
from .results.text import CaptionResult, QueryResult, caption_result, query_result

R = TypeVar("R", bound=Result)
R_co = TypeVar("R_co", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOf(Generic[R_co]):
    """A task whose result is an R_co, with its sampling options. The server has a default for None. See CallOptions."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTaskOf(TaskOf[R_co]):
    """A task that writes a text. See TextOptions."""

    num_samples: int | None = None
    """How many texts to generate: as for ``query``."""
    stop: str | Sequence[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None


ObjectNames: TypeAlias = str | Sequence[str]
"""The name of an object in any words, like "red circle", or up to 256 names."""

Turn: TypeAlias = QueryResult | tuple[str, str] | tuple[str, str, Sequence[ImageInput]]
"""An earlier question with its answer: the result of ``query``, or the two texts, with the images of the question if it
showed some besides that of the conversation."""


@dataclass(frozen=True, slots=True)
class QueryTask(TextTaskOf[QueryResult]):
    """As ``query``."""

    question: str
    reasoning: bool = False
    spatial_refs: Iterable[SpatialRef] = ()
    history: Iterable[Turn] = ()
    images: Sequence[ImageInput] = ()
    """Not in ``analyze``."""
    system: str = ""
    presupposes: Sequence[str] = ()
    max_absence: float | None = None
    answer_start: str = ""
    max_reasoning_tokens: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class CaptionTask(TextTaskOf[CaptionResult]):
    """As ``caption``."""

    length: Literal["short", "normal", "long"] = "normal"


@dataclass(frozen=True, slots=True)
class PointTask(TaskOf[PointResult]):
    """As ``point``."""

    objects: ObjectNames
    max_objects: int | None = None
    spatial_refs: Iterable[SpatialRef] = ()
    min_score: float | None = None
    tiles: TilesInput | None = None


@dataclass(frozen=True, slots=True)
class DetectTask(TaskOf[DetectResult]):
    """As ``detect``."""

    objects: ObjectNames
    max_objects: int | None = None
    min_score: float | None = None
    max_overlap: float | None = None
    tiles: TilesInput | None = None


@dataclass(frozen=True, slots=True)
class SegmentTask(TaskOf[SegmentResult]):
    """As ``segment``."""

    objects: ObjectNames
    spatial_refs: Iterable[SpatialRef] = ()
    mask: MaskFormat = "none"
    min_score: float | None = None
    refine: bool | None = None


@dataclass(frozen=True, slots=True)
class GazeTask(TaskOf[GazeResult]):
    """As ``gaze``."""

    eyes: PointInput | Sequence[PointInput] = ()
    faces: BoxInput | Sequence[BoxInput] = ()
    max_faces: int | None = None
    accurate: bool = False


@dataclass(frozen=True, slots=True)
class SkillTask(TextTaskOf[SkillResult]):
    """As ``run_skill``."""

    name: str
    arguments: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None


Task: TypeAlias = (
    QueryTask | CaptionTask | PointTask | DetectTask | SegmentTask | GazeTask | SkillTask
)
Tasks: TypeAlias = Sequence[Task] | Mapping[str, Task]
"""Tasks by position, or by your names for them: 1 to 128 visible ASCII characters."""
Outcome: TypeAlias = Result | RpcError
"""A task's result, or its error."""


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """An event of a task. ``stream_query`` and the other streams have the same events."""

    key: str
    event: Event


@dataclass(frozen=True, slots=True)
class TaskDone:
    """The end of a task."""

    key: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AnalyzeResult(Drawable):
    """The results of all tasks. Iteration gives their keys.

    ``analysis[task]`` is the result of a task of the call; type checkers know its type. ``analysis["name"]`` and
    ``analysis[0]`` find a result by key. If the task failed, these raise its error.
    """

    outcomes: Mapping[str, Outcome]
    """By key, in the order of the tasks."""
    usage: Usage
    """The usage of all tasks together."""
    timings: Timings
    """``total_ms`` is that of the call, ``queue_ms`` the longest and ``ttft_ms`` the shortest of all tasks."""
    model: str
    """Name of the model that answered."""
    request_id: str
    image_size: ImageSize
    """Width and height of the upright image in pixels; coordinates refer to it."""
    image_id: str
    """The id of the stored image, for ImageHandle; empty if the server does not store it."""
    num_crops: int = 0
    """Crops in which the model saw the image (``max_crops``)."""
    source: ImageInput | None = field(default=None, repr=False, compare=False)
    tasks: Mapping[str, Task] = field(default_factory=dict, repr=False, compare=False)
    """The tasks of the call, by key."""

    @overload
    def __getitem__(self, key: TaskOf[R]) -> R: ...
    @overload
    def __getitem__(self, key: str | int) -> Any: ...
    def __getitem__(self, key: TaskOf[Any] | str | int) -> Any:
        """Returns a task's result by task, key or position: a QueryResult for a QueryTask, and so on.

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
        """The marks of all tasks that succeeded."""
        results = (o for o in self.outcomes.values() if isinstance(o, Result))
        return sum((result.marks for result in results), Marks())

    def result(self, key: str | int, kind: type[R] = Result) -> R:  # type: ignore[assignment]
        """Like ``[key]``, with a type: ``result("about", CaptionResult)``. Raises TypeError for another type."""
        outcome = self.outcomes[str(key)]
        if isinstance(outcome, RpcError):
            raise outcome
        if not isinstance(outcome, kind):
            raise TypeError(f"task {key!r} gave a {type(outcome).__name__}, not a {kind.__name__}")
        return outcome

    @property
    def errors(self) -> dict[str, RpcError]:
        """The errors of the tasks that failed, by key."""
        return {key: o for key, o in self.outcomes.items() if isinstance(o, RpcError)}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``. A failed task is {"error": {"code", "message", "reason"}}."""
        tasks = {key: outcome_dict(outcome) for key, outcome in self.outcomes.items()}
        return {"tasks": tasks, **plain_fields(self, "outcomes", "source", "tasks")}


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """Returns plain values for ``json.dumps``."""
    if isinstance(outcome, RpcError):
        return {"error": plain_value(outcome)}
    return outcome.to_dict()


def keyed(tasks: Tasks) -> dict[str, Task]:
    """Returns the tasks by key. Raises InvalidRequestError."""
    if not isinstance(tasks, (Mapping, Sequence)) or isinstance(tasks, (str, bytes)):
        raise InvalidRequestError(
            "tasks: must be a sequence of tasks, or a mapping of names to tasks"
        )
    pairs = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    read = {str(key): task for key, task in pairs}
    for key, task in read.items():
        if not isinstance(task, Task):
            raise InvalidRequestError(f"tasks[{key!r}]: {task!r} is not a task, like QueryTask")
    return read


def names_of(objects: ObjectNames) -> list[str]:
    """Raises InvalidRequestError."""
    names = [objects] if isinstance(objects, str) else objects
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f"objects: {objects!r} is neither a name nor a sequence of names")
    return list(names)


class ShownTurn(NamedTuple):
    """A turn as a message, and the images that its question shows besides that of the conversation."""

    message: pb.Turn
    images: Sequence[ImageInput]


def to_turns(history: Iterable[Turn]) -> list[ShownTurn]:
    """Raises InvalidRequestError for a turn that is no result and no pair of texts. The server checks the rest."""
    turns = []
    for index, turn in enumerate(history):
        if isinstance(turn, QueryResult):
            turn = (turn.question, turn.answer, turn.more_sources)
        try:
            if isinstance(turn, str):
                raise TypeError("is one text, needs a question and its answer")
            question, answer, *rest = turn
            (images,) = rest or ((),)
            turns.append(ShownTurn(pb.Turn(question=question, answer=answer), tuple(images)))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"history[{index}]: {error}") from error
    return turns


_READERS: dict[type[Any], Callable[[Any, ImageInput | None], Result]] = {
    CaptionTask: caption_result,
    PointTask: point_result,
    DetectTask: detect_result,
    SegmentTask: segment_result,
    GazeTask: gaze_result,
}


def read_result(task: Task, response: Any, source: ImageInput | None) -> Result:
    """``response``: the response of the task's method."""
    if isinstance(task, QueryTask):
        return query_result(response, source, task.question, tuple(task.images))
    if isinstance(task, SkillTask):
        return skill_result(response, source, task.name)
    return _READERS[type(task)](response, source)


def read_outcome(message: pb.TaskResult, tasks: Mapping[str, Task], source: ImageInput) -> Outcome:
    """``tasks``: those of the request, by key."""
    outcome = message.WhichOneof("outcome")
    if outcome is None or outcome == "error":
        return from_rpc_status(message.error)
    return read_result(tasks[message.key], getattr(message, outcome), source)


def analyze_result(
    response: pb.AnalyzeResponse, tasks: Mapping[str, Task], source: ImageInput
) -> AnalyzeResult:
    return AnalyzeResult(
        outcomes={r.key: read_outcome(r, tasks, source) for r in response.results},
        usage=read(Usage, response.usage),
        timings=read(Timings, response.timings),
        source=source,
        tasks=tasks,
        **info_fields(response.info),
    )


def read_task_event(
    message: pb.StreamAnalyzeResponse,
    payload: object,
    tasks: Mapping[str, Task],
    source: ImageInput,
) -> TaskEvent | TaskDone | None:
    """Returns the event of a message; None for the start, the end and unknown messages."""
    if isinstance(payload, pb.TaskResult):
        return TaskDone(message.key, read_outcome(payload, tasks, source))
    event = read_event(payload)
    return None if event is None else TaskEvent(message.key, event)
