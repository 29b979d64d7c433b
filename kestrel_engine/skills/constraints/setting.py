"""The ``constraint`` setting of a call, checked as far as this is possible without compiling it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...errors import FieldPath, InvalidRequest
from ...types.constraint import Constraint, ConstraintKind
from ...types.requests import check_bytes, checked_list

MAX_SOURCE_BYTES = 32 * 1024 - 1
"""UTF-8 bytes of a regular expression, grammar or schema."""
MAX_CHOICES = 256
MAX_CHOICE_BYTES = 1024
"""UTF-8 bytes of one choice."""

_TEXT_KINDS: tuple[ConstraintKind, ...] = ("regex", "grammar", "json_schema")


def read_constraint(value: object) -> Constraint | None:
    """Reads a mapping with one of the keys ``choices`` (a list of texts), ``regex``, ``grammar`` and ``json_schema``
    (texts; a schema may also be a mapping). None stays None. Raises InvalidRequest naming the part."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest("constraint", "must be an object with one of its fields set")
    parts = {key: part for key, part in value.items() if part is not None}
    unknown = parts.keys() - {"choices", *_TEXT_KINDS}
    if unknown:
        raise InvalidRequest(
            ("constraint", min(map(str, unknown))),
            f"is not a kind of constraint; known: choices, {', '.join(_TEXT_KINDS)}",
        )
    if len(parts) != 1:
        raise InvalidRequest(
            "constraint",
            f"needs exactly one of choices, {', '.join(_TEXT_KINDS)}; {len(parts)} are set",
        )
    if "choices" in parts:
        return Constraint("choices", _choices(parts["choices"]))
    [(kind, part)] = parts.items()
    if kind == "json_schema" and isinstance(part, Mapping):
        part = _dumped(part)
    _check_text(("constraint", kind), part, MAX_SOURCE_BYTES)
    return Constraint(kind, part)


def _choices(value: object) -> tuple[str, ...]:
    field = ("constraint", "choices")
    choices = checked_list(field, value, "a list of texts")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(choices)} texts; it must have 1 to {MAX_CHOICES}")
    for index, choice in enumerate(choices):
        _check_text((*field, index), choice, MAX_CHOICE_BYTES)
    return tuple(choices)


def _check_text(field: FieldPath, text: object, limit: int) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(field, "must be text")
    if not text:
        raise InvalidRequest(field, "must not be empty")
    check_bytes(field, text, limit)


def _dumped(schema: Mapping[object, object]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(("constraint", "json_schema"), f"is not JSON: {error}") from error
