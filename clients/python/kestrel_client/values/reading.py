"""Reads messages into dataclasses whose fields have the names of the message's, and enums into words."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")


def read(kind: type[T], message: Message, **others: Any) -> T:
    """A ``kind`` with the fields of ``message`` that have the same names, but ``others`` as given."""
    fields: dict[str, Any] = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{n: getattr(message, n) for n in fields if n not in others}, **others)


def words(enum: Any) -> dict[str, Any]:
    """The values of an enum by their words: of PRIORITY_LOW it is "low". Without the unspecified value."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix).lower(): value for name, value in enum.items() if value}


def words_by_value(enum: Any) -> dict[int, Any]:
    return {value: word for word, value in words(enum).items()}
