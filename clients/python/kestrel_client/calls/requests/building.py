"""Builds messages from values. An error names the field and its valid values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...errors import InvalidRequestError

_Q = TypeVar("_Q", bound=Message)
_E = TypeVar("_E")


def choice(name: str, value: object, choices: Mapping[str, _E]) -> _E:
    """Raises InvalidRequestError."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name}: {value!r} is not one of {', '.join(choices)}")
    return choices[value]


def build(kind: Callable[..., _Q], **values: Any) -> _Q:
    """Builds a message. Raises InvalidRequestError, naming the field whose type or range protobuf refuses."""
    inner = {name: value for name, value in values.items() if _has_messages(value)}
    try:
        built = kind(**{name: value for name, value in values.items() if name not in inner})
        for name, value in inner.items():
            # The constructor encodes and decodes a message to copy it, which takes twenty times as long for pixels.
            field = getattr(built, name)
            if isinstance(value, Message):
                field.CopyFrom(value)
                continue
            for each in value:
                field.add().CopyFrom(each)
        return built
    except (TypeError, ValueError) as error:
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                limit = _limit(kind, name, value)
                raise InvalidRequestError(f"{name}: {limit or error}") from error
        raise InvalidRequestError(str(error)) from error


def _has_messages(value: object) -> bool:
    return isinstance(value[0] if isinstance(value, list) and value else value, Message)


def _limit(kind: Any, name: str, value: object) -> str:
    """What a whole number in a field of the message ``kind`` must be; empty if ``value`` is no whole number."""
    field = kind.DESCRIPTOR.fields_by_name[name]
    highest = {field.CPPTYPE_INT32: 2**31 - 1, field.CPPTYPE_INT64: 2**63 - 1}.get(field.cpp_type)
    if highest is None or not isinstance(value, int):
        return ""
    return f"{value} is not a whole number from 0 to {highest}"


def whole(name: str, number: int | None, least: int = 1) -> int | None:
    """Refuses numbers that the field can't hold, with a clearer message than protobuf's."""
    if number is not None and not least <= number < 2**31:
        raise InvalidRequestError(f"{name}={number}: must be a whole number from {least} on")
    return number


def milliseconds(seconds: float | None) -> int | None:
    """Raises InvalidRequestError."""
    if seconds is not None and not 0 <= seconds < 2**31 / 1e3:
        raise InvalidRequestError(f"{seconds} s: is too long, or below 0")
    return None if seconds is None else round(seconds * 1e3)
