"""Asking: what a conversation asks of the model, whatever the dialect. It is one Query, or a search for boxes or points
(grounding.py), whose result then has the form of a Query's.

Owns the paths of chat completions for what all dialects share: ``messages`` and ``response_format``. A dialect with
other names renames these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

from ...edge.calls.call import Context
from ...service_names import VISION_METHODS
from ...services.messages.json_values import finish_reason
from ...services.messages.task_fields import short_path
from ..edge import Endpoint, ServiceCall
from ..fields import ANY_OBJECT, Fields, json_text, positive
from ..forms import SSE, Form
from ..known_fields import KnownFields
from ..refusals import Rename, renamed
from ..services import HttpServices
from .conversation import FIELDS, Conversation
from .grounding import Wanted, wanted_places
from .known_fields import OPENAI_SAMPLING, RESPONSE_FORMAT
from .models import set_model
from .sampling import SamplingFields

_NAMES: dict[FieldPath, FieldPath] = {
    ("num_samples",): ("n",),
    ("options", "model"): ("model",),
    ("options", "adapter"): ("model",),
    ("constraint", "json_schema"): ("response_format", "json_schema", "schema"),
}
_EFFORTS = {
    "none": False,
    "minimal": False,
    **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), True),
}
"""The values of ``reasoning_effort``, and whether the model then reasons: it does so in one way only."""
_Behaviour = Callable[[Any, Context], Awaitable[Any]]


class Asked(NamedTuple):
    """A request of kestrel.v1. ``task``: what it asks for. ``query`` and ``stream_query`` answer it, with a
    QueryResponse and as StreamQuery does. ``places``: None if the request is a Query."""

    request: Any
    task: Any
    query: _Behaviour
    stream_query: _Behaviour
    rename: Rename
    places: Wanted | None

    def call(
        self,
        fields: Fields,
        whole: Callable[[Any], Any],
        events: Callable[[Any], Iterable[bytes]],
        rename: Rename = lambda path: path,
        failed: Callable[[bytes], bytes] | None = None,
    ) -> ServiceCall:
        """As a stream, if ``fields`` ask for one. ``rename``: of the paths of chat completions. The others: as of
        ServiceCall."""

        def path_of(path: FieldPath) -> FieldPath:
            return rename(self.rename(path))

        if not fields.flag("stream"):
            return ServiceCall(self.request, self.query, whole, rename=path_of)
        return ServiceCall(self.request, self.stream_query, whole, events, path_of, failed)


def query_endpoint(
    read: Callable[[Fields], ServiceCall], known: KnownFields, form: Form = SSE
) -> Endpoint:
    """An endpoint whose requests ask the model a question. ``known``: the fields that ``read`` knows."""
    return Endpoint(f"{VISION_METHODS}Query", read, fields=known, form=form, caps_max_tokens=True)


def ask(
    fields: Fields,
    talk: Conversation,
    form: Fields,
    services: HttpServices,
    *,
    reasoning: bool,
    sampling: SamplingFields = OPENAI_SAMPLING,
) -> Asked:
    """``form``: of the answer, as ``response_format`` has it. Raises InvalidRequest."""
    vision = services.vision
    max_crops = positive(fields, "max_crops")
    wanted = wanted_places(talk.last.text, form) if talk.images else None
    if wanted is not None:
        return _ask_for_places(fields, talk, wanted, services, max_crops, sampling)
    request = talk.request(reasoning=reasoning, max_crops=max_crops)
    usual = fill(request.query, request.options, fields, services.names, sampling)
    schema = _schema(form)
    if schema is not None:
        request.query.text.constraint.json_schema = schema

    def rename(path: FieldPath) -> FieldPath:
        return talk.image_path(short_path(path)) or usual(path)

    return Asked(request, request.query, vision.Query, vision.StreamQuery, rename, None)


def _ask_for_places(
    fields: Fields,
    talk: Conversation,
    wanted: Wanted,
    services: HttpServices,
    max_crops: int | None,
    sampling: SamplingFields,
) -> Asked:
    if len(talk.images) > 1:
        raise InvalidRequest(
            "messages", f"hold {len(talk.images)} images; boxes and points are found in one"
        )
    if talk.begun:
        raise InvalidRequest("messages", "must end with a user message for boxes and points")
    request = wanted.request()
    image = talk.images[0]
    request.image.encoded = image.encoded
    if budget := image.max_crops or max_crops:
        request.image.max_crops = budget
    task = getattr(request, wanted.skill)
    usual = fill(task, request.options, fields, services.names, sampling)

    def rename(path: FieldPath) -> FieldPath:
        is_message = len(wanted.names) == 1 and short_path(path)[:1] == ("objects",)
        if is_message:
            return ("messages",)
        return talk.image_path(path) or usual(path)

    find = getattr(services.vision, wanted.skill.title())

    async def query(message: Any, context: Context) -> pb.QueryResponse:
        found = await find(message, context)
        is_cut = finish_reason(found) == "length"
        reason = common_pb2.FINISH_REASON_LENGTH if is_cut else common_pb2.FINISH_REASON_STOP
        answer = pb.Answer(text=wanted.text(found), finish_reason=reason)
        return pb.QueryResponse(
            answers=[answer], usage=found.usage, timings=found.timings, info=found.info
        )

    async def stream_query(message: Any, context: Context) -> None:
        response = await query(message, context)
        delta = pb.TextDelta(text=response.answers[0].text)
        await context.write(pb.StreamQueryResponse(started=response.info))
        await context.write(pb.StreamQueryResponse(text_delta=delta))
        await context.write(pb.StreamQueryResponse(final=response))

    return Asked(request, task, query, stream_query, rename, wanted)


def count(
    asked: Asked,
    services: HttpServices,
    answer: Callable[[dict[str, int]], dict[str, Any]],
    rename: Rename,
) -> ServiceCall:
    """Counts what the request would take. ``rename``: of the paths of chat completions."""
    given, places = asked.request, asked.places
    images = given.images if places is None else [given.image]
    task = pb.Task(**{"query" if places is None else places.skill: asked.task})
    request = pb.CountTokensRequest(images=images, tasks=[task], options=given.options)
    return ServiceCall(
        request,
        services.vision.CountTokens,
        lambda response: answer({"input_tokens": response.input_tokens}),
        rename=lambda path: rename(asked.rename(path[2:] if path[:1] == ("tasks",) else path)),
    )


def fill(
    task: Any,
    options: common_pb2.RequestOptions,
    fields: Fields,
    names: Sequence[str],
    sampling: SamplingFields = OPENAI_SAMPLING,
) -> Rename:
    """Fills in what all requests share. ``names``: those of the served models, the default first. Raises
    InvalidRequest."""
    known: Mapping[FieldPath, FieldPath] = _NAMES | sampling.fill(task, fields)
    if fields.values.get("model") is not None:
        set_model(options, fields.text("model"), names)

    def rename(path: FieldPath) -> FieldPath:
        short = short_path(path)
        if short[-1] == "max_crops":
            return ("max_crops",)
        return ("messages",) if short[0] in FIELDS else renamed(short, known)

    return rename


def reasons(fields: Fields, key: str = "reasoning_effort") -> bool:
    """Whether the model reasons before it answers. Raises InvalidRequest."""
    effort = fields.text(key, "")
    if effort and effort not in _EFFORTS:
        raise InvalidRequest(fields.at(key), f"must be one of {', '.join(_EFFORTS)}")
    if fields.values.get("reasoning") is not None:
        return fields.flag("reasoning")
    return _EFFORTS.get(effort, False)


def _schema(form: Fields) -> str | None:
    """The JSON Schema that ``response_format`` asks for. Raises InvalidRequest."""
    RESPONSE_FORMAT.check(form)
    kind = form.text("type", "text")
    if kind == "json_object":
        return json_text(form.inner("schema")) if form.values.get("schema") else ANY_OBJECT
    if form.values.get("schema"):
        raise InvalidRequest(form.at("schema"), "belongs into json_schema")
    if kind == "text":
        return None
    if kind == "json_schema":
        if form.values.get("json_schema") is None:
            raise InvalidRequest(form.at("json_schema"), "is required")
        return json_text(form.inner("json_schema").inner("schema"))
    raise InvalidRequest(form.at("type"), f"must be text, json_object or json_schema, got {kind!r}")
