"""Conversions of RunSkill's messages: arguments, settings and output are google.protobuf.Struct.

This module turns a Struct into plain Python values. It also finds the path of an argument that a skill refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf import struct_pb2

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    ContextLengthError,
    EngineResult,
    InvalidRequest,
    RequestError,
    StreamUpdate,
)

from ...edge.failures.errors import LocatedError, SkillNotFound
from ...edge.failures.statuses import field_path
from .calls import SkillCall
from .images import image_source
from .options import call_options, sampling_settings
from .responses import event_fields, logprobs_message, shared_fields

_MAX_NAME = 128


def skill_call(request: pb.RunSkillRequest) -> SkillCall:
    """Raises InvalidRequest."""
    if not 1 <= len(request.skill) <= _MAX_NAME:
        raise LocatedError(
            InvalidRequest("skill", f"must have 1 to {_MAX_NAME} characters"), "skill"
        )
    sampling = sampling_settings(request.sampling)
    settings = plain(request.settings)
    for name in settings:
        if name in sampling:
            error = InvalidRequest(name, "is set in sampling too; set it only once")
            raise LocatedError(error, f"settings.{name}")
    return SkillCall(
        skill=request.skill,
        image=image_source(request.image) if request.HasField("image") else None,
        arguments=plain(request.arguments),
        settings={**settings, **sampling},
        options=call_options(request.options),
    )


@contextmanager
def located(request: pb.RunSkillRequest) -> Iterator[None]:
    """Raises a skill's RequestError as a LocatedError with the path of the argument or setting in ``request``."""
    try:
        yield
    except RequestError as error:
        raise LocatedError(error, _path(error, request)) from error


def _path(error: RequestError, request: pb.RunSkillRequest) -> str:
    name = error.field.partition("[")[0].partition(".")[0]
    if isinstance(error, SkillNotFound) or not name:
        return error.field
    if name in request.settings.fields:
        return f"settings.{error.field}"
    if name in request.arguments.fields:
        return f"arguments.{error.field}"
    if isinstance(error, ContextLengthError) and name != "max_tokens":
        # The prompt is too long. Only the skill knows which arguments it is made of.
        return "arguments"
    path = field_path(error.field)
    # The field is not set in the request. It is one of RunSkillRequest's own fields, or a missing argument.
    is_own_field = path != error.field or name in ("image", "options", "sampling")
    return path if is_own_field else f"arguments.{error.field}"


def check_skill(name: str, available: tuple[str, ...]) -> None:
    """Raises SkillNotFound, which names the available skills."""
    if name not in available:
        shown = ", ".join(available)
        raise SkillNotFound("skill", f"the model has no skill {name!r}; its skills are {shown}")


def skill_response(result: EngineResult, image_positions: int) -> pb.RunSkillResponse:
    response = pb.RunSkillResponse(
        logprobs=logprobs_message(result), **shared_fields(result, image_positions)
    )
    response.output.update(result.output)
    return response


def skill_event(update: StreamUpdate) -> dict[str, Any]:
    """Like event_fields, for streams that have separate fields for points and boxes."""
    fields = event_fields(update)
    found = fields.pop("object", None)
    if found is not None:
        fields["box" if found.DESCRIPTOR.name == "Box" else "point"] = found
    return fields


def plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Plain Python values. A number without a fraction becomes an int, because a Struct has no integers."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    return None if kind in (None, "null_value") else getattr(value, kind)
