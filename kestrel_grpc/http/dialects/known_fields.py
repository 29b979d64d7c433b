"""The known fields of the dialects: known_fields.toml has one table for each kind of object (KnownFields)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2

from ..known_fields import KnownFields
from .sampling import SamplingFields

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAME = (*common_pb2.Sampling.DESCRIPTOR.fields_by_name, "stop", *_PENALTIES)
"""Settings of sampling that have the same name in kestrel.v1."""

MOONDREAM_SAMPLING = SamplingFields(
    {name: name for name in (*_SAME, "max_tokens", "max_reasoning_tokens")}
)
OPENAI_SAMPLING = SamplingFields(
    {
        **{name: name for name in (*_SAME, "logit_bias", "max_reasoning_tokens")},
        "max_completion_tokens": "max_tokens",
        "max_tokens": "max_tokens",
        "repeat_penalty": "repetition_penalty",
    },
    hottest=2.0,
    unlimited=range(-1, 0),
)
"""``repetition_penalty`` and ``top_k`` are those of vLLM, ``repeat_penalty`` and -1 for no limit those of LM Studio."""
OLLAMA_SAMPLING = SamplingFields(
    {
        **{name: name for name in _SAME if name != "repetition_penalty"},
        "num_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
    },
    unlimited=range(-(2**63), 1),
    no_seed=-1,
)

_TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("known_fields.toml").read_text("utf-8")
)


def known_fields(name: str, more: Iterable[str] = ()) -> KnownFields:
    """Returns the known fields of a table, and the names ``more`` as honoured fields."""
    table = _TABLES[name]
    base = (
        known_fields(table["like"], more) if "like" in table else KnownFields("", frozenset(more))
    )

    def names(key: str) -> frozenset[str]:
        return frozenset(table.get(key, "").split())

    refused = {
        field: remedy
        for remedy, fields in table.get("refused", {}).items()
        for field in fields.split()
    }
    return KnownFields(
        where=table.get("where", base.where),
        honoured=base.honoured - names("without") | names("honoured"),
        refused={**base.refused, **refused},
        ignored=base.ignored | names("ignored"),
        remedy=table.get("remedy", base.remedy),
        is_strict=table.get("strict", False),
    )


_SKILL_FIELDS = {
    "query": {"question", "reasoning", "spatial_refs", "system", "presupposes"},
    "caption": {"length"},
    "point": {"object", "objects", "spatial_refs"},
    "detect": {"object", "objects"},
    "segment": {"object", "spatial_refs", "refine"},
    "gaze": {"eye", "face", "accurate", "max_faces"},
}
MOONDREAM_SETTINGS = known_fields("moondream_settings", MOONDREAM_SAMPLING.names)
MOONDREAM_TILES = known_fields("moondream_tiles")
MOONDREAM_FACE = known_fields("moondream_face")


def _moondream(skill: str) -> KnownFields:
    known = known_fields("moondream", _SKILL_FIELDS[skill])
    elsewhere = set().union(*_SKILL_FIELDS.values()) - known.honoured - {"length"}
    misplaced = dict.fromkeys(
        MOONDREAM_SETTINGS.honoured - known.honoured, "is a setting; put it into settings"
    )
    refused = {
        **dict.fromkeys(elsewhere, f"is not a field of /v1/{skill}; leave it out"),
        **known.refused,
    }
    return replace(known, where=f"/v1/{skill}", refused=refused, misplaced=misplaced)


MOONDREAM = {skill: _moondream(skill) for skill in _SKILL_FIELDS}
"""By the last part of the path."""
CHAT = known_fields("chat", OPENAI_SAMPLING.names)
COMPLETIONS = known_fields("completions", OPENAI_SAMPLING.names)
RESPONSE_FORMAT = known_fields("response_format")
CHAT_MESSAGE = known_fields("chat_message")
CHAT_PARTS = {
    kind: known_fields("chat_part", {name})
    for kind, name in (
        ("text", "text"),
        ("input_text", "text"),
        ("output_text", "text"),
        ("image_url", "image_url"),
        ("input_image", "image_url"),
    )
}
"""By type. ``input_text``, ``output_text`` and ``input_image`` are those of OpenAI's Responses interface."""
_OPTIONS = dict.fromkeys(OLLAMA_SAMPLING.names, "is an option; put it into options")
GENERATE = replace(known_fields("ollama_generate"), misplaced=_OPTIONS)
OLLAMA_CHAT = replace(known_fields("ollama_chat"), misplaced=_OPTIONS)
OLLAMA_MESSAGE = known_fields("ollama_message")
OLLAMA_OPTIONS = known_fields("ollama_options", OLLAMA_SAMPLING.names)
