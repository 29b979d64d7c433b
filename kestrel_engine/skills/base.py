"""The interface of a skill: checked arguments, a prompt, rules for sampling, and an output made from sampled tokens.

A skill sees typed tokens and gives typed tokens, rules and events. It sees no runtime, scheduler or tensor.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..errors import FieldPath, InvalidRequest
from ..types.calibration import UNCALIBRATED, Calibration
from ..types.constraint import Constraint
from ..types.events import EngineResult, FinishReason, StreamUpdate, TokenLogprob
from ..types.model_config import ModelConfig
from ..types.reading import ReadSpec
from ..types.requests import (
    ImagePlace,
    PreparedImage,
    PreparedTiles,
    SamplingParams,
    Token,
    check_bytes,
)
from ..types.step import RuleWait, StepToken, TokenRule
from ..types.stream import EngineStream
from .constraints.grammars import Grammar


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
    draw_seed: Callable[[], int] = lambda: 0
    """Returns the seed of a request that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillContext:
    """The model, tokenizer and defaults that a skill may read."""

    model: ModelConfig
    codec: TextCodec
    defaults: SkillDefaults = field(default_factory=SkillDefaults)
    refines: bool = False
    """The engine has a segmentation refiner."""
    calibration: Calibration = UNCALIBRATED


_Result = TypeVar("_Result")
_Request = TypeVar("_Request", bound="SkillRequest")


class EngineServices(Protocol):
    """What the engine does for a request before its submission, if its kind of work asks for it. All of it ends by the
    request's deadline, or when the request loses its place in the queue."""

    async def compiled(self, constraint: Constraint) -> Grammar: ...

    async def ask(
        self,
        skill: str,
        image: PreparedImage,
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> EngineStream:
        """Starts a request of its own, with a place in the queue, and what else the caller chose."""
        ...

    async def wait(self, awaited: Awaitable[_Result], what: str) -> _Result:
        """The result of ``awaited``. Raises DeadlineExceeded, if the deadline passes ``what``, and Displaced."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRequest:
    """A request in the skill's own terms, checked. ``prompt_suffix`` follows BOS and the request's images. It may hold
    IMAGE_PLACE for images that come later: the last images of the request go there, in order.

    ``max_tokens``: what the caller asked for; None means the default, shrunk to the room left in the context.
    ``options``: the skill's own fields, for its state. ``prompt_field``: the argument that makes the prompt long; the
    error names it if the prompt exceeds the context.

    Work that needs further fields is a subclass (TextRequest, ObjectsRequest). The engine knows it by what is defined
    here.
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
    token_budget: int | None = None
    """Most tokens that may be sampled, if that differs from max_tokens: 3 a box, or a reasoning phase and an answer.
    Shrinks to the room left in the context."""
    token_limit: int | None = None
    """The budget after that. The engine sets it before it asks for a control and an output."""
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_field: str = "arguments"

    @property
    def reads(self) -> ReadSpec | None:
        """What to read of the encoded image in place of tokens; None: tokens are generated."""
        return None

    @property
    def pixels_field(self) -> str | None:
        """The argument for which the image's pixels are needed; None: its embedding is enough."""
        return None

    @property
    def tokens_ahead(self) -> int:
        """Tokens that may be sampled in addition to ``max_tokens``, by a limit of their own."""
        return 0

    @property
    def token_limits(self) -> Iterable[tuple[str, int, str]]:
        """The caller's limits: the field, the tokens that it needs, and how an error shows them."""
        return (("max_tokens", self.max_tokens or 0, f"{self.max_tokens}"),)

    def place_path(self, number: int) -> FieldPath:
        """The argument that has a place of the prompt, which are numbered from 0."""
        return ("spatial_refs", number)

    async def before_images(self, engine: EngineServices) -> SkillRequest:
        """The request with what it needs beside images. Comes before the images are prepared."""
        return self

    async def after_images(
        self, engine: EngineServices, images: Sequence[PreparedImage | PreparedTiles]
    ) -> SkillRequest:
        """The request with what it needs to know of its prepared images."""
        return self

    def about(
        self, images: tuple[PreparedImage, ...], model: ModelConfig
    ) -> tuple[SkillRequest, tuple[PreparedImage, ...]]:
        """The request for these images, and the images as the runtime gets them. Raises InvalidRequest."""
        return self, images

    @property
    def ends_at_once(self) -> FinishReason | None:
        """Why nothing is generated: "cancelled", or "stop" because the request abstains. None: it is generated."""
        return None

    def added_to(self, result: EngineResult) -> EngineResult:
        """``result`` with what the request found before its submission."""
        return result


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


class SkillOutput(abc.ABC):
    """Turns tokens into text, points and paths. Runs on the delivery thread; gets every token but the stop token."""

    @abc.abstractmethod
    def push(self, token: StepToken) -> list[StreamUpdate]:
        """Takes the next token; returns the updates that it completed."""

    @abc.abstractmethod
    def finish(self) -> list[StreamUpdate]:
        """No token follows; returns the updates that were held back."""

    @abc.abstractmethod
    def output(self) -> dict[str, Any]:
        """The final dict (moondream.md section 12). Called once, after ``finish``."""

    @property
    @abc.abstractmethod
    def token_ids(self) -> tuple[int, ...]:
        """Generated ids, stop ids left out."""

    def note_stop(self, token: StepToken) -> None:  # noqa: B027  # Few outputs need it.
        """Takes the stop token, which ``push`` does not get."""

    def take(self, reading: object) -> None:
        """Takes what the device read of the image for ``SkillRequest.reads``."""
        raise AssertionError("this output reads no images")

    @property
    def is_complete(self) -> bool:
        """Whether the output needs no further token, because a stop string has ended it. Once it is True, the request
        ends by "stop", and the output gets no further token."""
        return False

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The tokens of the text with their log-probabilities; None if they were not asked for."""
        return None

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the generated ids are reasoning."""
        return 0

    @property
    def absence(self) -> float | None:
        """The probability that the image has no such object; None if it is unknown."""
        return None


class SkillSpec(Protocol[_Request]):
    """A skill: register an instance through SkillRegistry. It must not keep state of a request."""

    @property
    def name(self) -> str: ...

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> _Request:
        """Checks the caller's arguments and settings and builds the prompt; raises RequestError naming the field. Runs
        on the event loop, or in a thread if a text is long."""
        ...

    def new_control(
        self, request: _Request, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        """The control of one request that may sample ``max_tokens`` tokens."""
        ...

    def new_output(self, request: _Request, context: SkillContext) -> SkillOutput:
        """The output of the same request."""
        ...


@runtime_checkable
class NeedsModel(Protocol):
    """A skill that not every model can do."""

    def can_run(self, model: ModelConfig) -> bool: ...


def checked_text(field: str | FieldPath, value: object, context: SkillContext) -> str:
    """Checks a question or object name, and returns it without white space at its ends. The limit applies to the text
    with this white space. Raises InvalidRequest naming field and limit."""
    text = any_text(field, value, context).strip()
    if not text:
        raise InvalidRequest(field, "must not be empty")
    return text


def any_text(field: str | FieldPath, value: object, context: SkillContext) -> str:
    """Checks a text, which may be empty. Raises InvalidRequest naming field and limit."""
    if not isinstance(value, str):
        raise InvalidRequest(field, "must be text")
    check_bytes(field, value, context.defaults.max_text_bytes)
    return value
