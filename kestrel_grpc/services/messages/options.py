"""The options of a request and the settings of its sampling and texts, in the form that the engine expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import FieldPath, InvalidRequest, checked_adapter_name

from ...edge.failures.errors import inside
from .values import known_value

_MAX_SALT_BYTES = 128
_MOST_NAME = 512
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
    path: FieldPath = ("options",)
    """Of the options in the call's message."""


NO_OPTIONS = CallOptions()


def checked_model_name(name: str) -> str:
    """Returns a name that a model may have. Raises InvalidRequest."""
    if not 1 <= len(name) <= _MOST_NAME:
        raise InvalidRequest("model", f"must have 1 to {_MOST_NAME} characters")
    return name


def call_options(
    options: common_pb2.RequestOptions, path: FieldPath = NO_OPTIONS.path
) -> CallOptions:
    """``path``: as in CallOptions. Raises InvalidRequest."""
    with inside(*path):
        return _read(options, path)


def _read(options: common_pb2.RequestOptions, path: FieldPath) -> CallOptions:
    priority = known_value("priority", options.priority, common_pb2.Priority, _PRIORITIES)
    model = checked_model_name(options.model) if options.HasField("model") else None
    salt = options.cache_salt
    if (size := len(salt.encode())) > _MAX_SALT_BYTES:
        raise InvalidRequest(
            "cache_salt", f"has {size} UTF-8 bytes; the limit is {_MAX_SALT_BYTES}"
        )
    adapter = checked_adapter_name(options.adapter) if options.HasField("adapter") else None
    return CallOptions(model=model, priority=priority, cache_salt=salt, adapter=adapter, path=path)


def sampling_settings(sampling: common_pb2.Sampling) -> dict[str, Any]:
    """The values of the fields that are set, by name."""
    return {descriptor.name: value for descriptor, value in sampling.ListFields()}


def text_settings(text: common_pb2.TextOptions) -> dict[str, Any]:
    """As ``sampling_settings``."""
    values = {descriptor.name: value for descriptor, value in text.ListFields()}
    if "stop" in values:
        values["stop"] = list(values["stop"])
    if "logit_bias" in values:
        values["logit_bias"] = [(each.id, each.bias) for each in values["logit_bias"]]
    if "constraint" in values:
        rules = {each.name: rule for each, rule in values["constraint"].ListFields()}
        if "choices" in rules:
            rules["choices"] = list(rules["choices"].texts)
        values["constraint"] = rules
    return values
