"""The interface of a skill: checked arguments, a prompt, rules for sampling, and an output made from sampled tokens.

A skill sees typed tokens and gives typed tokens, rules and events. It never sees the runtime, the scheduler or a
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..errors import FieldPath, InvalidRequest
from ..types.calibration import UNCALIBRATED, Calibration
from ..types.constraint import Constraint
from ..types.embedding import EmbeddingSpec
from ..types.events import EngineMetrics, EngineResult, FinishReason, StreamUpdate, TokenLogprob
from ..types.model_config import ModelConfig
from ..types.requests import ImagePlace, SamplingParams, Token, check_bytes
from ..types.step import RuleWait, StepToken, TokenRule
from ..types.stream import EngineStream
from .constraints.grammars import Grammar

__all__ = [
    "EngineMetrics",
    "EngineResult",
    "EngineStream",
    "SkillContext",
    "SkillControl",
    "SkillOutput",
    "SkillRequest",
    "SkillSpec",
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

    def token_bytes(self, token_id: int, /) -> bytes:
        """UTF-8 bytes of one id, which may be a part of a character; empty for a special token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillDefaults:
    """The engine's defaults, from RuntimeConfig."""

    max_tokens: int = 768
    temperature: float = 0.2
    top_p: float = 0.9
    max_objects: int = 150
    min_score: float = 0.0
    """The least score of an object that is returned."""
    max_absence: float = 0.5
    """The largest probability of an object's absence with which a question about it is answered."""
    max_text_bytes: int = 32 * 1024 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillContext:
    """The model, tokenizer and defaults that a skill may read."""

    model: ModelConfig
    codec: TextCodec
    defaults: SkillDefaults = field(default_factory=SkillDefaults)
    refines: bool = False
    """The engine has a segmentation refiner."""
    calibration: Calibration = UNCALIBRATED


@dataclass(frozen=True, slots=True)
class Merging:
    """How to merge the outputs of several looks at an image: ``key`` names the list of points or boxes in an output, of
    which the merged one has at most ``max_objects``. ``max_overlap``: of two boxes that overlap more (intersection over
    union), also of one look, the result has the better one; None: both."""

    key: str
    max_objects: int
    max_overlap: float | None = None


@dataclass(frozen=True, slots=True)
class Presupposed:
    """The request is about ``objects``. If one of them is absent from its images with a probability above
    ``max_absence``, nothing is generated."""

    objects: tuple[str, ...]
    max_absence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRequest:
    """A request in the skill's own terms, checked. ``prompt_suffix`` follows BOS and the request's images. It may hold
    IMAGE_PLACE for images that come later: the last images of the request go there, in order.

    ``max_tokens``: what the caller asked for; None means the default, shrunk to the room left in the context.
    ``seed``: the caller's, else None and the engine draws one. ``options``: the skill's own fields, for its state.
    ``prompt_field``: the argument that makes the prompt long; the error names it if the prompt exceeds the context.
    """

    skill: str
    prompt_suffix: tuple[Token | ImagePlace, ...]
    sampling: SamplingParams
    needs_image: bool = True
    max_images: int | None = 1
    """None: as many as the engine takes in a request (RuntimeConfig.max_images)."""
    num_images: int | None = None
    """The number of images that ``prompt_suffix`` is made for; None: any."""
    max_tokens: int | None = None
    max_reasoning_tokens: int | None = None
    """The caller's limit on the reasoning. Then ``max_tokens`` bounds the answer alone."""
    seed: int | None = None
    token_budget: int | None = None
    """Most tokens that may be sampled, if that differs from max_tokens: 3 a box, or a reasoning phase and an answer.
    Shrinks to the room left in the context."""
    token_limit: int | None = None
    """The budget after that. The engine sets it before it asks for a control and an output."""
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_field: str = "arguments"
    embedding: EmbeddingSpec | None = None
    """The request asks for embeddings in place of tokens."""
    refine: bool = False
    """Whether the engine's refiner, if it has one, sharpens the outline. The output then has ``outline`` and
    ``set_outline``, and its ``finish`` is called twice."""
    constraint: Constraint | None = None
    """What the text must match."""
    merging: Merging | None = None
    """None: the skill looks at an image once, and refuses tiles."""
    presupposed: Presupposed | None = None
    """The objects without which the request is not answered. It needs an image then."""
    grammar: Grammar | None = None
    """The compiled ``constraint``. The engine sets it before it asks for a control."""


Outline: TypeAlias = tuple[str, tuple[float, float, float, float]]
"""An SVG path relative to a box, and the box: x_min, y_min, x_max, y_max as fractions of the image."""


class SkillControl(Protocol):
    """The rules for sampling, and when to stop. Runs on the step thread, so it must be quick: no text, no output.

    Steps are launched ahead of results: rule(n + 1) may be called before accept() has seen token n.
    """

    def rule(self, index: int) -> TokenRule | RuleWait | None:
        """The constraint on the ``index``-th sampled token, counted from 0. Equal calls return equal rules.

        None: the rule depends on a token that accept() has not seen yet. The engine then asks again after that token,
        which costs the request one step. Never None once every earlier token was accepted.

        RuleWait: another thread computes the rule. The engine asks again when it is there, and other requests go on
        meanwhile. Never for the first token.
        """
        ...

    def accept(self, token: StepToken) -> FinishReason | None:
        """Takes the sampled tokens in order. "stop": ``token`` is the stop token and no part of the output; "length":
        ``token`` is the last one. The engine itself checks the limit of tokens."""
        ...


class SkillOutput(Protocol):
    """Turns tokens into text, points and paths. Runs on the delivery thread; gets every token but the stop token."""

    def push(self, token: StepToken) -> list[StreamUpdate]:
        """Takes the next token; returns the updates that it completed."""
        ...

    def finish(self) -> list[StreamUpdate]:
        """No token follows; returns the updates that were held back."""
        ...

    def output(self) -> dict[str, Any]:
        """The final dict (moondream.md section 13). Called once, after ``finish``."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated ids, stop ids left out."""
        ...


def is_complete(output: SkillOutput) -> bool:
    """Whether ``output`` needs no further token, because a stop string has ended it.

    An output that can end its request has an attribute ``is_complete``; others need none. Once it is True, the request
    ends by "stop", and the output gets no further token.
    """
    return bool(getattr(output, "is_complete", False))


def logprobs_of(output: SkillOutput) -> tuple[TokenLogprob, ...] | None:
    """The tokens of the text with their log-probabilities; None if they were not asked for.

    An output that gives them has an attribute ``logprobs``; others need none.
    """
    logprobs: tuple[TokenLogprob, ...] | None = getattr(output, "logprobs", None)
    return logprobs


def num_reasoning_tokens(output: SkillOutput) -> int:
    """How many of the generated ids are reasoning. An output with reasoning has an attribute ``num_reasoning_tokens``;
    others need none."""
    return int(getattr(output, "num_reasoning_tokens", 0))


def outline_of(output: SkillOutput) -> Outline | None:
    """The SVG path and the box of a finished output's outline; None if it has none. An output with an outline has an
    attribute ``outline``."""
    outline: Outline | None = getattr(output, "outline", None)
    return outline


def set_outline(output: SkillOutput, path: str, box: tuple[float, float, float, float]) -> None:
    """Replaces the outline of an output that has one. ``path`` is relative to ``box``."""
    output.set_outline(path, box)  # type: ignore[attr-defined]


def note_stop(output: SkillOutput, token: StepToken) -> None:
    """Passes the stop token, which ``push`` does not get, to an output that has a method ``note_stop``."""
    note = getattr(output, "note_stop", None)
    if note is not None:
        note(token)


def absence_of(output: SkillOutput) -> float | None:
    """The probability that the image has no such object; None if it is unknown.

    An output that gives it has an attribute ``absence``; others need none.
    """
    absence: float | None = getattr(output, "absence", None)
    return absence


class SkillSpec(Protocol):
    """A skill: register an instance through SkillRegistry. It must not keep state of a request."""

    @property
    def name(self) -> str: ...

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SkillRequest:
        """Checks the caller's arguments and settings and builds the prompt; raises RequestError naming the field. Runs
        on the event loop, or in a thread if a text is long."""
        ...

    def new_control(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        """The control of one request that may sample ``max_tokens`` tokens."""
        ...

    def new_output(self, request: SkillRequest, context: SkillContext) -> SkillOutput:
        """The output of the same request."""
        ...


@runtime_checkable
class NeedsModel(Protocol):
    """A skill that not every model can do."""

    def can_run(self, model: ModelConfig) -> bool: ...


def checked_text(field: str | FieldPath, value: object, context: SkillContext) -> str:
    """Checks a question or object name, and returns it without white space at its ends. The limit applies to the text
    with this white space. Raises InvalidRequest naming field and limit."""
    if not isinstance(value, str):
        raise InvalidRequest(field, "must be text")
    check_size(field, value, context)
    text = value.strip()
    if not text:
        raise InvalidRequest(field, "must not be empty")
    return text


def check_size(field: str | FieldPath, text: str, context: SkillContext) -> None:
    """Raises InvalidRequest if ``text`` is too long or is not valid Unicode."""
    check_bytes(field, text, context.defaults.max_text_bytes)
