"""What a skill is: checked arguments, a prompt, and a state machine from sampled tokens to events.

A skill sees typed tokens and gives typed tokens, rules and events. It never sees the runtime, the scheduler or a
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import InvalidRequest
from ..events import EngineMetrics, EngineResult, FinishReason, StreamUpdate
from ..model_config import ModelConfig
from ..requests import Prompt, SamplingParams
from ..step import StepToken, TokenRule
from ..stream import EngineStream

__all__ = [
    "Advance",
    "EngineMetrics",
    "EngineResult",
    "EngineStream",
    "SkillContext",
    "SkillRequest",
    "SkillSpec",
    "SkillState",
    "StreamUpdate",
    "TextCodec",
]


class TextCodec(Protocol):
    """The tokenizer, as far as skills need it."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, no BOS added."""
        ...

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Text of ``ids``, special tokens left out; incomplete UTF-8 shows as U+FFFD."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillDefaults:
    """The engine's defaults, from RuntimeConfig."""

    max_tokens: int = 768
    temperature: float = 0.2
    top_p: float = 0.9
    max_objects: int = 150
    max_text_bytes: int = 32 * 1024 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillContext:
    """What a skill may look at."""

    model: ModelConfig
    codec: TextCodec
    defaults: SkillDefaults = field(default_factory=SkillDefaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRequest:
    """A request in the skill's own terms, checked. ``prompt_suffix`` follows BOS and, if any, the picture.

    ``max_tokens``: what the caller asked for; None means the default, shrunk to the room left in the context.
    ``seed``: the caller's, else None and the engine draws one. ``options``: the skill's own fields, for its state.
    """

    skill: str
    prompt_suffix: Prompt
    sampling: SamplingParams
    needs_image: bool = True
    max_tokens: int | None = None
    seed: int | None = None
    token_budget: int | None = None
    """Most tokens that may be sampled, if that differs from max_tokens: 3 a box, or a reasoning phase and an answer
    of max_tokens each. Shrinks to the room left in the context."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Advance:
    """What one token did: updates to send, and the finish reason if it was the last."""

    updates: list[StreamUpdate] = field(default_factory=list)
    finish: FinishReason | None = None


class SkillState(Protocol):
    """One request's progress. Calls alternate: rule(), then consume() of the token sampled under it."""

    def rule(self) -> TokenRule:
        """The constraint on the next token."""
        ...

    def consume(self, token: StepToken) -> Advance:
        """Takes the sampled token. After ``finish`` is set no further call but ``output`` and ``token_ids`` is made."""
        ...

    def stop_at_limit(self) -> Advance:
        """Called when the token limit is reached and no finish was set: flushes what is held back."""
        ...

    def output(self) -> dict[str, Any]:
        """The final dict (moondream.md section 13)."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated ids, stop ids left out."""
        ...


class SkillSpec(Protocol):
    """A skill: register an instance through SkillRegistry."""

    @property
    def name(self) -> str: ...

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SkillRequest:
        """Checks the caller's arguments and settings and builds the prompt; raises RequestError naming the field."""
        ...

    def new_state(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> SkillState:
        """The state machine of one request that may generate ``max_tokens`` tokens."""
        ...


def checked_text(field_name: str, value: object, context: SkillContext) -> str:
    """Strips and checks a question or object name. Raises InvalidRequest naming field and limit."""
    if not isinstance(value, str):
        raise InvalidRequest(field_name, "must be text")
    text = value.strip()
    if not text:
        raise InvalidRequest(field_name, "must not be empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field_name, "holds a lone surrogate and is not valid Unicode"
        ) from error
    if size > context.defaults.max_text_bytes:
        raise InvalidRequest(
            field_name, f"has {size} UTF-8 bytes, the limit is {context.defaults.max_text_bytes}"
        )
    return text
