"""What skills take, as JSON Schemas: of arguments, of settings, and of both together.

A skill may declare itself by the attributes of `SkillDeclaration`. The checks stay where they are, in ``build``; a
schema only tells callers of a skill that they do not know what to send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..errors import ConfigError
from ..types.info import SkillDescription
from ..types.requests import SAMPLING_SETTINGS
from .base import SkillSpec

Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema."""


@runtime_checkable
class SkillDeclaration(Protocol):
    """A skill that says what it takes. ``description``: one sentence. ``arguments``, ``settings``: schemas of objects
    (`object_schema`)."""

    description: str
    arguments: Schema
    settings: Schema


def object_schema(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """The schema of an object with these properties and no others."""
    schema: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    return {**schema, "additionalProperties": False}


def names_of(schema: Schema) -> Set[str]:
    names: Set[str] = schema["properties"].keys()
    return names


def describe(skill: SkillSpec[Any]) -> SkillDescription:
    """The description of a skill. Of a skill that declares nothing, arguments and settings are any objects. Raises
    ConfigError for a declaration that is not JSON."""
    declared = isinstance(skill, SkillDeclaration)
    parts = {
        name: getattr(skill, name) if declared else {"type": "object"}
        for name in ("arguments", "settings")
    }
    try:
        schema = json.dumps({"type": "object", "properties": parts})
    except (TypeError, ValueError) as error:
        raise ConfigError("skills", skill.name, f"declares what is not JSON: {error}") from None
    return SkillDescription(skill.name, skill.description if declared else "", schema)  # type: ignore[attr-defined]


TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}

POINT: Schema = {"type": "array", "items": _SHARE, "minItems": 2, "maxItems": 2}
"""[x, y]."""
SPATIAL_REFS: Schema = {
    "type": "array",
    "items": {
        "type": "array",
        "items": _SHARE,
        "anyOf": [{"minItems": n, "maxItems": n} for n in (2, 4)],
    },
}
"""Points, [x, y], and boxes, [x_min, y_min, x_max, y_max]."""

LENGTH_SETTINGS: Mapping[str, Schema] = {"max_tokens": _COUNT}
TEXT_SETTINGS: Mapping[str, Schema] = {
    **LENGTH_SETTINGS,
    "stop": {"type": "array", "items": TEXT, "maxItems": 16},
    "logprobs": FLAG,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "constraint": {
        "type": "object",
        "properties": {
            "choices": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 256},
            "regex": TEXT,
            "grammar": TEXT,
            "json_schema": {"type": ["string", "object"]},
        },
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    },
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": 300,
    },
}
"""Further settings of skills that write text."""
REASONING_SETTINGS: Mapping[str, Schema] = {
    "max_reasoning_tokens": _COUNT,
    "max_absence": _SHARE,
}
SCORE_SETTINGS: Mapping[str, Schema] = {**LENGTH_SETTINGS, "min_score": _SHARE}
OBJECT_SETTINGS: Mapping[str, Schema] = {**SCORE_SETTINGS, "max_objects": _COUNT}
"""Further settings of skills that find objects."""
BOX_SETTINGS: Mapping[str, Schema] = {
    **OBJECT_SETTINGS,
    "max_overlap": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
}
"""Further settings of skills that find boxes."""


def settings_schema(*groups: Mapping[str, Schema]) -> Schema:
    """The schema of the settings of sampling and of ``groups``."""
    properties = dict(SAMPLING_SETTINGS)
    for group in groups:
        properties |= group
    return object_schema(properties)
