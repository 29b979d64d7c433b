"""Constraint: what the text of an answer must match."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._pb.kestrel.v1 import common_pb2
from ..errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What a text must match. Exactly one field is set."""

    choices: Sequence[str] | None = None
    """One of these texts: at most 256, each of at most 1,024 bytes of UTF-8."""
    regex: str | None = None
    """A regular expression in the notation of Rust's regex crate, without look-around and back references."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, whose start rule is ``start``."""
    json_schema: str | Mapping[str, Any] | None = None
    """A JSON Schema: JSON text, or a mapping such as Pydantic's ``model_json_schema()``."""


def to_constraint(constraint: object) -> common_pb2.Constraint:
    """Raises InvalidRequestError."""
    if not isinstance(constraint, Constraint):
        raise InvalidRequestError(f"constraint: {constraint!r} is not a Constraint")
    names = ("choices", "regex", "grammar", "json_schema")
    values = {name: getattr(constraint, name) for name in names}
    rules: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if len(rules) != 1:
        raise InvalidRequestError(f"constraint: must have exactly one of {', '.join(names)}")
    ((name, value),) = rules.items()
    if name == "choices" and isinstance(value, str):
        raise InvalidRequestError("constraint: choices is one text, not several")
    try:
        if name == "choices":
            return common_pb2.Constraint(choices=common_pb2.Choices(texts=value))
        if isinstance(value, Mapping):
            rules[name] = json.dumps(value, ensure_ascii=False)
        return common_pb2.Constraint(**rules)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"constraint: {error}") from error
