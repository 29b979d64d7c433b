"""Conversions of RunSkill's messages: arguments, settings and output are google.protobuf.Struct.

This module turns a Struct into plain Python values.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult, InvalidRequest, Request

from ...edge.failures.errors import SkillNotFound
from .responses import FINISH_REASONS, logprobs_message
from .tasks import field_values, text_settings

_MAX_NAME = 128


def skill_requests(task: pb.SkillTask, num_images: int) -> list[Request]:
    """Raises InvalidRequest."""
    if not 1 <= len(task.name) <= _MAX_NAME:
        raise InvalidRequest("name", f"must have 1 to {_MAX_NAME} characters")
    typed = field_values(task.sampling) | text_settings(task.text)
    if task.HasField("max_tokens"):
        typed["max_tokens"] = task.max_tokens
    settings, arguments = plain(task.settings), plain(task.arguments)
    for name in settings:
        if name in typed:
            raise InvalidRequest(
                ("settings", name), "is set in a field of its own too; set it only once"
            )
    return [Request(skill=task.name, arguments=arguments, settings={**settings, **typed})]


def check_skill(name: str, available: tuple[str, ...]) -> None:
    """Raises SkillNotFound, which names the available skills."""
    if name not in available:
        shown = ", ".join(available)
        raise SkillNotFound(
            "name",
            f"the model has no skill {name!r}; its skills are {shown}",
            value=name,
            known=available,
        )


def skill_response(result: EngineResult) -> pb.RunSkillResponse:
    """The response without what all responses have."""
    response = pb.RunSkillResponse(
        finish_reason=FINISH_REASONS[result.finish_reason], logprobs=logprobs_message(result)
    )
    response.output.update(result.output)
    return response


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
