"""The known fields of the dialects: one table for each kind of object (KnownFields)."""

from __future__ import annotations

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

NO_TOOLS = "the models call no tools; leave it out"
_TO_SETTINGS = "is a setting; put it into settings"
_IN_MOONDREAM = "send the image as image_url, and name a fine-tune in settings.adapter"
_SKILL_FIELDS = {
    "query": {"question", "reasoning", "spatial_refs", "system", "presupposes"},
    "caption": {"length"},
    "point": {"object", "objects", "spatial_refs"},
    "detect": {"object", "objects"},
    "segment": {"object", "spatial_refs", "refine"},
    "gaze": {"eye", "face", "accurate", "max_faces"},
}
_OBJECT_SETTINGS = {"max_objects", "min_score", "max_absence", "max_overlap", "tiles"}
_IMAGE_SETTINGS = {"region", "max_crops"}
MOONDREAM_SETTINGS = KnownFields(
    "settings",
    frozenset(
        {*MOONDREAM_SAMPLING.names, *_OBJECT_SETTINGS, *_IMAGE_SETTINGS, "adapter", "variant"}
    ),
    is_strict=True,
)
MOONDREAM_TILES = KnownFields(
    "settings.tiles", frozenset({"rows", "columns", "overlap", "whole_image"}), is_strict=True
)

MOONDREAM_FACE = KnownFields(
    "face", frozenset({"x_min", "y_min", "x_max", "y_max", "score"}), is_strict=True
)


def _moondream(skill: str) -> KnownFields:
    honoured = {"image_url", "model", "settings", "stream", "adapter", "variant"}
    honoured |= _SKILL_FIELDS[skill]
    elsewhere = set().union(*_SKILL_FIELDS.values()) - honoured - {"length"}
    return KnownFields(
        f"/v1/{skill}",
        frozenset(honoured),
        refused={
            **dict.fromkeys(MOONDREAM_SETTINGS.honoured - honoured, _TO_SETTINGS),
            **dict.fromkeys(elsewhere, f"is not a field of /v1/{skill}; leave it out"),
            "options": "the settings belong into settings",
            "messages": "use /v1/chat/completions",
            "prompt": "put the text into question or object",
        },
        remedy=_IN_MOONDREAM,
    )


MOONDREAM = {skill: _moondream(skill) for skill in _SKILL_FIELDS}
"""By the last part of the path."""

_IN_OPENAI = (
    "send images as parts of a message, like "
    '{"type": "image_url", "image_url": {"url": "data:…"}}, and name a fine-tune in model, as MODEL/ADAPTER'
)
_BESIDE = "its fields belong beside model"
_FORM = "ask for a form with response_format"
_EITHER = KnownFields(
    "completions",
    frozenset({"model", "stream", "stream_options", "n", "logprobs", *OPENAI_SAMPLING.names}),
    refused={
        "tools": NO_TOOLS,
        "functions": NO_TOOLS,
        "settings": _BESIDE,
        "options": _BESIDE,
        "extra_body": _BESIDE,
        "num_predict": "use max_tokens",
        "audio": "the models write text",
        **dict.fromkeys(
            (
                *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
                *("structured_outputs", "grammar", "json_schema", "format"),
            ),
            _FORM,
        ),
    },
    ignored=frozenset(
        {
            *("user", "store", "metadata", "service_tier", "safety_identifier", "verbosity"),
            *("prompt_cache_key", "prediction", "modalities", "tool_choice", "function_call"),
            *("parallel_tool_calls", "keep_alive", "cache_prompt"),
        }
    ),
    remedy=_IN_OPENAI,
)
"""What chat completions and completions have in common."""
CHAT = KnownFields(
    _EITHER.where,
    _EITHER.honoured
    | {"messages", "top_logprobs", "response_format", "reasoning", "reasoning_effort", "max_crops"},
    refused={
        **_EITHER.refused,
        "prompt": "use messages",
        "question": "use messages",
        "input": "use messages",
        "system": "send a message with the role system",
    },
    ignored=_EITHER.ignored,
    remedy=_IN_OPENAI,
)
COMPLETIONS = KnownFields(
    _EITHER.where,
    _EITHER.honoured - {"max_reasoning_tokens"} | {"prompt", "best_of"},
    refused={
        **_EITHER.refused,
        "suffix": "is not supported here; leave it out",
        "echo": "must be false: the model scores and repeats no prompts",
        "response_format": "is not supported here; use /v1/chat/completions",
        "messages": "use /v1/chat/completions",
        "reasoning": "use /v1/chat/completions",
        "max_reasoning_tokens": "use /v1/chat/completions",
    },
    ignored=_EITHER.ignored,
    remedy="for images and reasoning use /v1/chat/completions, and name a fine-tune in model",
)
RESPONSE_FORMAT = KnownFields(
    "response_format",
    frozenset({"type", "json_schema", "schema"}),
    ignored=frozenset({"strict", "name", "description"}),
    remedy=_IN_OPENAI,
)
"""``schema`` beside the type json_object is llama.cpp's."""
CHAT_MESSAGE = KnownFields(
    "messages of completions",
    frozenset({"role", "content"}),
    ignored=frozenset(
        {
            *("name", "id", "refusal", "annotations", "audio", "tool_calls", "function_call"),
            *("reasoning", "reasoning_content", "tool_call_id", "cache_control"),
        }
    ),
    remedy=_IN_OPENAI,
)
CHAT_PARTS = {
    kind: KnownFields(
        "parts of messages",
        frozenset({"type", name, "detail"}),
        ignored=frozenset({"cache_control", "annotations", "logprobs"}),
        remedy=_IN_OPENAI,
    )
    for kind, name in (
        ("text", "text"),
        ("input_text", "text"),
        ("output_text", "text"),
        ("image_url", "image_url"),
        ("input_image", "image_url"),
    )
}
"""By type. ``input_text``, ``output_text`` and ``input_image`` are those of OpenAI's Responses interface."""

_IN_OLLAMA = "send images as images, in /api/chat within a message, and name a fine-tune in model, as MODEL/ADAPTER"
_OLLAMA_BOTH = frozenset({"model", "options", "format", "stream", "think"})
_OLLAMA_REFUSED = {
    "tools": NO_TOOLS,
    "settings": "the settings belong into options",
    "template": "the models have one form of prompt; leave it out",
    "raw": "the models have one form of prompt; leave it out",
}
_OLLAMA_IGNORED = frozenset({"keep_alive", "context", "truncate", "shift"})
GENERATE = KnownFields(
    "/api/generate",
    _OLLAMA_BOTH | {"prompt", "system", "images"},
    refused={
        **_OLLAMA_REFUSED,
        "messages": "use /api/chat",
        "suffix": "the models fill no gaps in a text; leave it out",
    },
    ignored=_OLLAMA_IGNORED,
    remedy=_IN_OLLAMA,
)
OLLAMA_CHAT = KnownFields(
    "/api/chat",
    _OLLAMA_BOTH | {"messages"},
    refused={
        **_OLLAMA_REFUSED,
        "prompt": "use messages",
        "system": "send a message with the role system",
    },
    ignored=_OLLAMA_IGNORED,
    remedy=_IN_OLLAMA,
)
OLLAMA_MESSAGE = KnownFields(
    "messages of /api/chat",
    frozenset({"role", "content", "images"}),
    ignored=frozenset({"thinking", "tool_calls", "tool_name", "name"}),
    remedy=_IN_OLLAMA,
)
OLLAMA_OPTIONS = KnownFields(
    "options",
    frozenset({*OLLAMA_SAMPLING.names, "max_crops"}),
    ignored=frozenset(
        {
            *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
            *("low_vram", "vocab_only", "use_mmap", "use_mlock", "f16_kv", "logits_all"),
            *("penalize_newline", "repeat_last_n", "tfs_z", "typical_p"),
            *("mirostat", "mirostat_eta", "mirostat_tau"),
        }
    ),
    remedy=_IN_OLLAMA,
)
