"""The results of query and caption: texts, their log-probabilities, and reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..._pb.kestrel.v1 import common_pb2, vision_service_pb2
from ...drawing.marks import Marks
from ...geometry import ImageSize, Point, from_point, read_size
from ...images.image_forms import ImageInput
from .base import (
    FinishReason,
    ImageResult,
    Result,
    clipped,
    common_fields,
    read_finish_reason,
    read_finish_reasons,
)
from .searches import ObjectSearch, read_search


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token with its natural log-probability, at temperature 1 and before top_k and top_p.

    ``text``: the token alone, with U+FFFD in place of a part of a character. ``utf8``: its bytes; joined, the bytes of
    all tokens are the text.

    ``top``: with ``top_logprobs``, the likeliest tokens at this place, the likeliest first. The chosen token is among
    them only if it is that likely.
    """

    text: str
    utf8: bytes
    id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of an answer or a caption. Iteration gives the tokens.

    ``sum``: of all tokens. ``mean``: the same divided by their number, a score that does not depend on the length of
    the text. Both are at most 0, and 0 if there is no token. The tokens of reasoning and the end token are left out.
    """

    tokens: tuple[TokenLogprob, ...]
    sum: float
    mean: float

    def __iter__(self) -> Iterator[TokenLogprob]:
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class GroundingSpan:
    """A span of the reasoning that refers to points of the image. The span is ``text[start:end]``."""

    start: int
    end: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of the model before its answer."""

    text: str
    grounding: tuple[GroundingSpan, ...] = ()
    finish_reason: FinishReason = "unknown"
    """Why the reasoning ended. An older server gives "unknown"."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Answer:
    """One answer or caption."""

    text: str
    """As the model wrote it; may be empty."""
    reasoning: Reasoning | None = None
    """None if reasoning was not requested."""
    logprobs: Logprobs | None = None
    """The log-probabilities of the text; None if they were not requested."""
    finish_reason: FinishReason
    seed: int
    """The seed of the sampling. The same request with this seed and one sample gives the same text."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Answer({clipped(self.text)}, {self.finish_reason})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QueryResult(Result):
    """The answers to a question."""

    question: str = ""
    """The question of the call."""
    answers: tuple[Answer, ...]
    """``num_samples`` answers, in the order of their seeds. ``usage`` and ``timings`` are about all together."""
    images: tuple[SeenImage, ...] = ()
    """The images in the order of the prompt: that of the conversation, those of the turns, those of the question.
    ``image_size`` and ``image_id`` are those of the first."""
    presupposed: tuple[ObjectSearch, ...] = ()
    """With ``presupposes``, how likely it is that the image does not show each of these objects, in order."""
    abstained: bool = False
    """One of these objects is absent, so there is no answer: the text of all answers is empty."""
    more_sources: tuple[ImageInput, ...] = field(default=(), repr=False, compare=False)
    """The further images that were given to the call (``images``), for the turns of a conversation."""

    @property
    def answer(self) -> str:
        """The text of the first answer."""
        return self.answers[0].text

    @property
    def reasoning(self) -> Reasoning | None:
        """The reasoning of the first answer; None if it was not requested."""
        return self.answers[0].reasoning

    @property
    def logprobs(self) -> Logprobs | None:
        """The log-probabilities of the first answer; None if they were not requested."""
        return self.answers[0].logprobs

    @property
    def grounding(self) -> tuple[GroundingSpan, ...]:
        """Spans of the reasoning that refer to points of the image; empty without reasoning."""
        return () if self.reasoning is None else self.reasoning.grounding

    @property
    def marks(self) -> Marks:
        """The points of the grounding, with question and answer as text."""
        points = tuple(point for span in self.grounding for point in span.points)
        return Marks(points=points, text=tuple(filter(None, (self.question, self.answer))))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``, the first answer first."""
        return {"answer": self.answer, **Result.to_dict(self)}

    def __str__(self) -> str:
        return self.answer

    def __repr__(self) -> str:
        return self._short("abstained" if self.abstained else clipped(self.answer))


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image of a request. ``size``: of the upright image, in pixels. ``image_id``: of the stored image, for
    ImageHandle; empty if the server does not store it. ``num_crops``: those in which the model sees it."""

    size: ImageSize
    image_id: str
    num_crops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaptionResult(ImageResult):
    """The captions of an image."""

    captions: tuple[Answer, ...]
    """``num_samples`` captions, in the order of their seeds. ``usage`` and ``timings`` are about all together."""

    @property
    def caption(self) -> str:
        """The text of the first caption."""
        return self.captions[0].text

    @property
    def logprobs(self) -> Logprobs | None:
        """The log-probabilities of the first caption; None if they were not requested."""
        return self.captions[0].logprobs

    @property
    def marks(self) -> Marks:
        """The caption as text."""
        return Marks(text=(self.caption,))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``, the first caption first."""
        return {"caption": self.caption, **Result.to_dict(self)}

    def __str__(self) -> str:
        return self.caption

    def __repr__(self) -> str:
        return self._short(clipped(self.caption))


def query_result(
    response: vision_service_pb2.QueryResponse,
    source: ImageInput | None,
    question: str,
    more_sources: tuple[ImageInput, ...] = (),
) -> QueryResult:
    return QueryResult(
        question=question,
        answers=tuple(map(_answer, response.answers)),
        finish_reason=read_finish_reasons(each.finish_reason for each in response.answers),
        images=tuple(map(read_seen_image, response.info.images)),
        presupposed=tuple(map(read_search, response.presupposed)),
        abstained=response.abstained,
        more_sources=more_sources,
        **common_fields(response, source),
    )


def caption_result(
    response: vision_service_pb2.CaptionResponse, source: ImageInput | None
) -> CaptionResult:
    return CaptionResult(
        captions=tuple(map(_answer, response.captions)),
        finish_reason=read_finish_reasons(each.finish_reason for each in response.captions),
        **common_fields(response, source),
    )


def read_seen_image(message: common_pb2.SeenImage) -> SeenImage:
    return SeenImage(read_size(message.size), message.image_id, message.num_crops)


def _answer(message: vision_service_pb2.Answer) -> Answer:
    return Answer(
        text=message.text,
        reasoning=_reasoning(message.reasoning) if message.HasField("reasoning") else None,
        logprobs=read_logprobs(message),
        finish_reason=read_finish_reason(message.finish_reason),
        seed=message.seed,
    )


def _reasoning(message: vision_service_pb2.Reasoning) -> Reasoning:
    grounding = tuple(
        GroundingSpan(span.start, span.end, tuple(map(from_point, span.points)))
        for span in message.grounding
    )
    return Reasoning(message.text, grounding, read_finish_reason(message.finish_reason))


def read_token(message: common_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(map(read_token, message.top))
    return TokenLogprob(message.text, message.utf8, message.id, message.logprob, top)


def read_logprobs(
    response: vision_service_pb2.Answer | vision_service_pb2.RunSkillResponse,
) -> Logprobs | None:
    if not response.HasField("logprobs"):
        return None
    message = response.logprobs
    return Logprobs(tuple(map(read_token, message.tokens)), message.sum, message.mean)
