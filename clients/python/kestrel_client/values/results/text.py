"""The results of query and caption: texts, their log-probabilities, and reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..._pb.kestrel.v1 import common_pb2, vision_service_pb2
from ...drawing.marks import Marks
from ...geometry import ImageSize, Point, from_point
from ...images.images import ImageInput
from .base import FinishReason, Result, clipped, common_fields, read_finish_reason


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
class QueryResult(Result):
    """The answer to a question."""

    question: str = ""
    """The question of the call."""
    answer: str
    reasoning: Reasoning | None = None
    """None if reasoning was not requested."""
    logprobs: Logprobs | None = None
    """The log-probabilities of the answer; None if they were not requested."""
    samples: tuple[QueryResult, ...] = ()
    """With ``num_samples`` above 1, the result of each sample, the first included. The other fields are then those of
    the first sample, but ``usage`` (the sum) and ``timings``, which are about all together."""
    images: tuple[SeenImage, ...] = ()
    """With several images, all of them in the order of the prompt: that of the conversation, those of the turns, those
    of the question. ``image_size`` and ``image_id`` are those of the first. Otherwise empty."""
    absences: tuple[ObjectAbsence, ...] = ()
    """With ``presupposes``, how likely it is that the image does not show each of these objects, in order."""
    abstained: bool = False
    """One of these objects is absent, so there is no answer."""
    more_sources: tuple[ImageInput, ...] = field(default=(), repr=False, compare=False)
    """The further images that were given to the call (``images``), for the turns of a conversation."""

    @property
    def grounding(self) -> tuple[GroundingSpan, ...]:
        """Spans of the reasoning that refer to points of the image; empty without reasoning."""
        return () if self.reasoning is None else self.reasoning.grounding

    @property
    def marks(self) -> Marks:
        """The points of the grounding, with question and answer as text."""
        points = tuple(point for span in self.grounding for point in span.points)
        return Marks(points=points, text=tuple(filter(None, (self.question, self.answer))))

    def __str__(self) -> str:
        return self.answer

    def __repr__(self) -> str:
        return self._short("abstained" if self.abstained else clipped(self.answer))


@dataclass(frozen=True, slots=True)
class ObjectAbsence:
    """The probability, in [0, 1], that no image of a question shows an object."""

    object: str
    absence: float


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image of a request with several images. ``image_size``: of the upright image. ``image_id``: of the stored
    image, for ImageHandle; empty if the server does not store it."""

    image_size: ImageSize
    image_id: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaptionResult(Result):
    """A caption of the image."""

    caption: str
    logprobs: Logprobs | None = None
    """The log-probabilities of the caption; None if they were not requested."""
    samples: tuple[CaptionResult, ...] = ()
    """With ``num_samples`` above 1, the result of each sample: as for QueryResult."""

    @property
    def marks(self) -> Marks:
        """The caption as text."""
        return Marks(text=(self.caption,))

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
    reasoning = None
    if response.HasField("reasoning"):
        reasoning = Reasoning(
            response.reasoning.text,
            tuple(
                GroundingSpan(span.start, span.end, tuple(map(from_point, span.points)))
                for span in response.reasoning.grounding
            ),
            read_finish_reason(response.reasoning.finish_reason),
        )
    return QueryResult(
        question=question,
        answer=response.answer,
        reasoning=reasoning,
        logprobs=read_logprobs(response),
        samples=tuple(
            query_result(each, source, question, more_sources) for each in response.samples
        ),
        images=tuple(
            SeenImage(ImageSize(seen.image_size.width, seen.image_size.height), seen.image_id)
            for seen in response.images
        ),
        absences=tuple(ObjectAbsence(each.object, each.absence) for each in response.absences),
        abstained=response.abstained,
        more_sources=more_sources,
        **common_fields(response, source),
    )


def caption_result(
    response: vision_service_pb2.CaptionResponse, source: ImageInput | None
) -> CaptionResult:
    return CaptionResult(
        caption=response.caption,
        logprobs=read_logprobs(response),
        samples=tuple(caption_result(each, source) for each in response.samples),
        **common_fields(response, source),
    )


def read_token(message: common_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(map(read_token, message.top))
    return TokenLogprob(message.text, message.utf8, message.id, message.logprob, top)


def read_logprobs(
    response: vision_service_pb2.QueryResponse
    | vision_service_pb2.CaptionResponse
    | vision_service_pb2.RunSkillResponse,
) -> Logprobs | None:
    if not response.HasField("logprobs"):
        return None
    message = response.logprobs
    return Logprobs(tuple(map(read_token, message.tokens)), message.sum, message.mean)
