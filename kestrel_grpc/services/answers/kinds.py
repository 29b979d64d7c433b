"""The kinds of tasks: how the engine's requests are made from a task, and its response from their results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult, FieldPath, Request, Tiles, best_boxes

from ..messages.embeddings import embed_requests, embeddings
from ..messages.named_skill import skill_requests, skill_response
from ..messages.responses import (
    NameResult,
    caption_answer,
    found_outline,
    found_places,
    query_answer,
)
from ..messages.tasks import (
    FACE,
    caption_requests,
    detect_requests,
    edges_of,
    gaze_requests,
    point_requests,
    query_requests,
    read_tiles,
    segment_requests,
)
from .gazes import Part as GazePart
from .gazes import gaze_part, gaze_response, has_more_requests, num_looks, of_gazes
from .masks import add_mask

if TYPE_CHECKING:
    from .run import Run
    from .several import PartResult

Part = TypeVar("Part")
Response = TypeVar("Response")

Event = Mapping[str, Any]
"""The one field of a stream event, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[Part, Response]):
    """One kind of task. A part is what one request adds to the task's response."""

    name: str
    """The name of the task's field in its request and in Task, and of the result's field in TaskResult."""
    requests: Callable[[Any, int], list[Request]]
    """From the task and the number of images. Raises InvalidRequest."""
    part: Callable[[EngineResult, str], Part]
    """From the result of a request and its label."""
    response: Callable[[EngineResult | None, list[Part]], Response]
    """The response without usage, timings and info. It gets one of the results, if there is any, and all parts."""
    last_events: Callable[[Part], Iterable[Event]] = lambda part: ()
    """The events that end the request's events in a stream."""
    complete: Callable[[Any, Part, tuple[int, int]], Awaitable[None]] | None = None
    """Adds to a part what takes time. Gets the task, and the image's size in pixels."""
    merge: Callable[[Any, list[Part]], None] | None = None
    """Changes several parts together, in a thread."""
    tiles: Callable[[Any], Tiles | None] | None = None
    """From the task, how to cut the image; its None: not at all. Raises InvalidRequest."""
    are_samples: bool = False
    """Several requests are samples, with seeds in a row, which fail together; otherwise names, which fail alone."""
    has_more_requests: Callable[[Any], bool] | None = None
    """Whether ``in_rounds`` makes more requests about the images."""
    in_rounds: Callable[..., Awaitable[list[PartResult[Part]]]] | None = None
    """Runs the requests, and those that follow from their results. Gets the Run, the CallTask, requests and images."""
    num_looks: Callable[[Any], int] = lambda task: 1
    """How often ``in_rounds`` runs each request of the task."""
    has_updates: bool = True
    """Streams have the updates of each request."""
    generates: bool = True
    """Tokens are sampled, so that there is a seed."""


class CallTask(NamedTuple, Generic[Part, Response]):
    """One task of a call. ``message``: such as a DetectTask. ``path``: of the task in the call's message."""

    kind: Kind[Part, Response]
    message: Any
    path: FieldPath
    key: str = ""

    @property
    def has_tiles(self) -> bool:
        return "tiles" in self.message.DESCRIPTOR.fields_by_name and self.message.HasField("tiles")


def _query_response(result: EngineResult | None, parts: list[pb.Answer]) -> pb.QueryResponse:
    assert result is not None, "samples fail together"
    return pb.QueryResponse(
        answers=parts,
        presupposed=[pb.ObjectSearch(object=x.object, absence=x.absence) for x in result.absences],
        abstained=result.abstained,
    )


def _finding(
    name: str,
    requests: Callable[[Any, int], list[Request]],
    part: Callable[[EngineResult, str], NameResult],
    response: Callable[..., Response],
    **others: Any,
) -> Kind[NameResult, Response]:
    return Kind(
        name=name,
        requests=requests,
        part=part,
        response=lambda result, parts: response(
            detections=[found for each in parts for found in each.detections],
            searches=[each.search for each in parts],
        ),
        last_events=lambda part: ({"search": part.search},),
        **others,
    )


def _suppress(task: pb.DetectTask, parts: Sequence[NameResult]) -> None:
    """Removes boxes until no two of them overlap by more than ``max_overlap``. Names do not matter."""
    if not task.HasField("max_overlap"):
        return
    found = [each for part in parts for each in part.detections]
    edges = [edges_of(each.box) for each in found]
    stays = iter(best_boxes(edges, [each.score for each in found], task.max_overlap))
    for part in parts:
        part.detections[:] = [each for each in part.detections if next(stays)]


async def _draw(task: pb.SegmentTask, part: NameResult, size: tuple[int, int]) -> None:
    for found in part.detections:
        await add_mask(found, task.mask_format, size)


QUERY = Kind(
    name="query",
    requests=query_requests,
    part=lambda result, label: query_answer(result),
    response=_query_response,
    are_samples=True,
)
CAPTION = Kind(
    name="caption",
    requests=caption_requests,
    part=lambda result, label: caption_answer(result),
    response=lambda result, parts: pb.CaptionResponse(captions=parts),
    are_samples=True,
)
POINT = _finding("point", point_requests, found_places, pb.PointResponse, tiles=read_tiles)
DETECT = _finding(
    *("detect", detect_requests, found_places, pb.DetectResponse), tiles=read_tiles, merge=_suppress
)
SEGMENT = _finding(
    *("segment", segment_requests, found_outline, pb.SegmentResponse), complete=_draw
)


async def _gazes(run: Run, task: CallTask[Any, Any], *others: Any) -> list[PartResult[GazePart]]:
    message = pb.DetectTask(objects=[FACE])
    return await of_gazes(run, task, task._replace(kind=DETECT, message=message), *others)


GAZE = Kind(
    name="gaze",
    requests=gaze_requests,
    part=gaze_part,
    response=gaze_response,
    has_more_requests=has_more_requests,
    in_rounds=_gazes,
    num_looks=num_looks,
    has_updates=False,
)
SKILL = Kind(
    name="skill",
    requests=skill_requests,
    part=lambda result, label: skill_response(result),
    response=lambda result, parts: parts[0],
)
KINDS: dict[str, Kind[Any, Any]] = {
    kind.name: kind for kind in (QUERY, CAPTION, POINT, DETECT, SEGMENT, SKILL, GAZE)
}


def embed_kind(
    max_message_bytes: int | None, *, streamed: bool
) -> Kind[EngineResult, pb.EmbedResponse]:
    """The kind of EmbedTask. A stream sends the embeddings one by one, before the response."""
    return Kind(
        name="embed",
        requests=lambda task, num_images: embed_requests(
            task, max_message_bytes, streamed=streamed
        ),
        part=lambda result, label: result,
        response=lambda result, parts: pb.EmbedResponse(
            embeddings=() if streamed else embeddings(parts[0])
        ),
        last_events=lambda result: ({"embedding": each} for each in embeddings(result)),
        generates=False,
    )
