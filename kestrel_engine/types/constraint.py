"""Constraint: what the text of an answer must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConstraintKind = Literal["choices", "regex", "grammar", "json_schema"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """The whole text must match ``source``.

    ``kind`` "choices": one of several texts. "regex": a regular expression. "grammar": a context-free grammar in Lark's
    notation. "json_schema": the JSON text of a JSON Schema.
    """

    kind: ConstraintKind
    source: str | tuple[str, ...]
