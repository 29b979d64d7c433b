"""The options and the sampling of a request, in the form that the engine expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import InvalidRequest, checked_adapter_name

from ...model_names import MOST_CHARACTERS
from .values import known_value

_MAX_SALT_BYTES = 128
_PRIORITIES = {
    common_pb2.PRIORITY_UNSPECIFIED: "normal",
    common_pb2.PRIORITY_LOW: "low",
    common_pb2.PRIORITY_NORMAL: "normal",
    common_pb2.PRIORITY_HIGH: "high",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """A request's options in the form that the engine expects."""

    model: str | None = None
    priority: str = "normal"
    cache_salt: str = ""
    adapter: str | None = None


NO_OPTIONS = CallOptions()


def call_options(options: common_pb2.RequestOptions) -> CallOptions:
    """Raises InvalidRequest."""
    priority = known_value("priority", options.priority, common_pb2.Priority, _PRIORITIES)
    model = options.model if options.HasField("model") else None
    if model is not None and not 1 <= len(model) <= MOST_CHARACTERS:
        raise InvalidRequest("model", f"must have 1 to {MOST_CHARACTERS} characters")
    salt = options.cache_salt
    if (size := len(salt.encode())) > _MAX_SALT_BYTES:
        raise InvalidRequest(
            "cache_salt", f"has {size} UTF-8 bytes; the limit is {_MAX_SALT_BYTES}"
        )
    adapter = checked_adapter_name(options.adapter) if options.HasField("adapter") else None
    return CallOptions(model=model, priority=priority, cache_salt=salt, adapter=adapter)


def sampling_settings(sampling: common_pb2.Sampling) -> dict[str, Any]:
    """The values of the fields that are set, by name."""
    values = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    if "stop" in values:
        values["stop"] = list(values["stop"])
    if "logit_bias" in values:
        values["logit_bias"] = [(each.id, each.bias) for each in values["logit_bias"]]
    if "constraint" in values:
        constraint = values["constraint"]
        values["constraint"] = {each.name: value for each, value in constraint.ListFields()}
    return values
