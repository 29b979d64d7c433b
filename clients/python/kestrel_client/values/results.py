"""The results of the skills: frozen dataclasses, read from the messages.

``to_dict()`` returns plain values for JSON. ``draw()`` and ``save()`` draw the result on the image (this needs Pillow).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .._pb.kestrel.v1 import common_pb2, vision_service_pb2
from ..drawing.marks import Marks, Mask, Outline, labelled
from ..errors import InvalidImageError, KestrelError
from ..images.images import ImageInput
from .geometry import Box, ImageSize, Point, from_box, from_point, read_score
from .struct_values import from_struct

if TYPE_CHECKING:
    import pandas
    import PIL.Image
    import supervision

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "unknown"]
"""Why generation ended: at its natural end ("stop"), at a limit, or cancelled. A newer server may give "unknown"."""

_NOTEBOOK_PIXELS = 800
"""Longer side of an image in a notebook, in pixels."""
_SHOWN_CHARACTERS = 120

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Positions of the model's context that a request used."""

    input_tokens: int = 0
    """Positions of the prompt: text, image and spatial references."""
    output_tokens: int = 0
    """Generated tokens, including reasoning and spatial tokens."""
    cached_tokens: int = 0
    """The part of input_tokens that was reused from a cache."""
    image_tokens: int = 0
    """The part of input_tokens that the image takes."""
    reasoning_tokens: int = 0
    """The part of output_tokens that is reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The phases of a request on the server, in milliseconds."""

    queue_time_ms: float = 0.0
    preprocess_time_ms: float = 0.0
    prefill_time_ms: float = 0.0
    """From the start of the computation to the first token, including vision."""
    decode_time_ms: float = 0.0
    """From the first token to the last."""
    ttft_ms: float = 0.0
    """From the acceptance of the request to the first token."""
    processing_time_ms: float = 0.0
    """Total time without queue time."""
    total_time_ms: float = 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The fields and methods of all results."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    model: str
    """Name of the model that answered."""
    request_id: str
    image_size: ImageSize | None
    """Width and height of the upright image in pixels; coordinates refer to it. None without an image."""
    seed: int
    """The seed of the sampling. The same seed and request give the same result."""
    image_id: str = ""
    """The id of the stored image, for ImageHandle; empty without an image, or if the server does not store it."""
    source: ImageInput | None = field(default=None, repr=False, compare=False)
    """The image that was given to the call: ``draw()`` draws on it."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``, the skill's own first. ``source`` and ``more_sources`` are
        omitted."""
        common = {f.name for f in fields(Result)}
        names = [f.name for f in fields(self) if f.name not in common]
        names += [f.name for f in fields(Result)]
        omitted = ("source", "more_sources")
        return {name: plain_value(getattr(self, name)) for name in names if name not in omitted}

    @property
    def marks(self) -> Marks:
        """The marks that ``draw()`` draws."""
        return Marks()

    def draw(self, image: ImageInput | None = None) -> PIL.Image.Image:
        """Returns the image with the result drawn on it, as a new Pillow image. Texts are written below the image.

        ``image``: the image to draw on; default: the image that was sent. Raises MissingDependencyError without Pillow,
        and InvalidImageError if there is no image or Pillow can't read it.
        """
        return draw_marks(self.marks, image, self.source)

    def save(self, path: str | os.PathLike[str], image: ImageInput | None = None) -> None:
        """Writes ``draw(image)`` to a file. The file extension determines the format."""
        self.draw(image).save(path)

    def _repr_png_(self) -> bytes | None:
        """A notebook shows this. It shows text if there is no image, or no Pillow."""
        return notebook_png(self.marks, self.source)

    def _short(self, shown: str) -> str:
        return f"{type(self).__name__}({shown}, {self.model}, {self.finish_reason})"


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
        return self._short(_clipped(self.answer))


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
        return self._short(_clipped(self.caption))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PointResult(Result):
    """The centres of objects. Iteration gives the points. ``object``: the kind of object of the call."""

    object: str
    points: tuple[Point, ...]
    absence: float | None = None
    """The probability that the image has no such object, in [0, 1]; None from a server that does not give it."""

    @property
    def marks(self) -> Marks:
        return Marks(points=self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return self._short(f"{len(self.points)} x {self.object!r}{_scores(self.points)}")

    def to_frame(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row per point: object, x, y, score, and x_px, y_px if the image's size is
        known.

        Raises MissingDependencyError without pandas.
        """
        from . import exports

        return exports.points_frame(self.object, self.points, self.image_size)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DetectResult(Result):
    """The bounding boxes of objects. Iteration gives the boxes. ``object``: the kind of object of the call."""

    object: str
    objects: tuple[Box, ...]
    absence: float | None = None
    """The probability that the image has no such object, in [0, 1]; None from a server that does not give it."""

    @property
    def marks(self) -> Marks:
        return Marks(boxes=labelled(self.objects, self.object))

    def __iter__(self) -> Iterator[Box]:
        return iter(self.objects)

    def __len__(self) -> int:
        return len(self.objects)

    def __repr__(self) -> str:
        return self._short(f"{len(self.objects)} x {self.object!r}{_scores(self.objects)}")

    def to_supervision(self) -> supervision.Detections:
        """Returns the boxes in pixels for the package ``supervision``. ``confidence`` has the scores, and
        ``data["class_name"]`` the object.

        Raises MissingDependencyError without supervision.
        """
        from . import exports

        return exports.to_supervision(self.object, self.objects, exports.size_of(self.image_size))

    def to_coco(self, image_id: int = 1, category_id: int = 1) -> list[dict[str, Any]]:
        """Returns a COCO annotation for each box, with ids from 1, ``bbox`` [x, y, width, height] in pixels, and
        ``score``, as COCO's tools read it in results."""
        from . import exports

        size = exports.size_of(self.image_size)
        return exports.to_coco(self.objects, size, image_id, category_id)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row per box: object, edges, score, and the edges in pixels if the image's
        size is known.

        Raises MissingDependencyError without pandas.
        """
        from . import exports

        return exports.boxes_frame(self.object, self.objects, self.image_size)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SkillResult(Result):
    """The result of a skill that was run by its name. ``output``: plain values, defined by the skill."""

    skill: str
    output: dict[str, Any]
    logprobs: Logprobs | None = None
    """The log-probabilities of the text; None if they were not requested, or the skill gives none."""

    @property
    def marks(self) -> Marks:
        """Points and boxes, if the output has ``points`` or ``objects`` in the form of the model's own skills."""
        places = [place for name in ("points", "objects") for place in _listed(self.output, name)]
        points = tuple(Point(**_only(p, "x", "y", "score")) for p in places if _has(p, "x", "y"))
        edges = ("x_min", "y_min", "x_max", "y_max")
        boxes = tuple(Box(**_only(p, *edges, "score")) for p in places if _has(p, *edges))
        texts = (self.output.get(name) for name in ("answer", "caption"))
        text = tuple(each for each in texts if isinstance(each, str))
        return Marks(points=points, boxes=labelled(boxes, self.skill), text=text)

    def __repr__(self) -> str:
        return self._short(f"{self.skill!r}, {_clipped(self.output)}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SegmentResult(Result):
    """The outline of an object. ``object``: the object of the call."""

    object: str
    svg_path: str
    """SVG path data in coordinates relative to ``box``, from 0 to 1; empty if the model found no object."""
    box: Box | None
    mask: Mask | None = None
    """Set if a mask was requested and there is an outline."""
    score: float | None = None
    """How sure the model is of the object, in [0, 1]; None if it gave no box. Set for an outline below ``min_score``
    too, which has neither box nor path."""
    parse_error: str | None = None
    """Why the model's path is unreadable; None if it is readable."""
    coarse_path: str | None = None
    """The model's own path, relative to ``coarse_box``, if the server has refined the outline; else None."""
    coarse_box: Box | None = None

    @property
    def outline(self) -> Outline:
        """Path, box and mask together."""
        return Outline(self.svg_path, self.box, self.mask)

    @property
    def marks(self) -> Marks:
        boxes = () if self.box is None else labelled((self.box,), self.object)
        return Marks(outline=self.outline, boxes=boxes)

    def __repr__(self) -> str:
        found = f"{self.object!r}{_scores((self.box,))}" if self.svg_path else f"no {self.object!r}"
        return self._short(found)

    def to_supervision(self) -> supervision.Detections:
        """Returns box and mask for the package ``supervision``.

        Raises MissingDependencyError without supervision or Pillow.
        """
        from . import exports

        size = exports.size_of(self.image_size)
        boxes = () if self.box is None else (self.box,)
        return exports.to_supervision(self.object, boxes, size, self.to_mask(size))

    def to_coco(self, image_id: int = 1, category_id: int = 1) -> list[dict[str, Any]]:
        """Returns the outline as a COCO annotation with polygons in pixels, or an empty list if there is no outline.

        Raises MissingDependencyError without Pillow.
        """
        from . import exports

        size = exports.size_of(self.image_size)
        return exports.outline_to_coco(self.outline, size, image_id, category_id)

    def to_mask(self, size: tuple[int, int] | None = None) -> PIL.Image.Image:
        """Returns the outline as a Pillow image of mode "L": 255 inside, 0 outside.

        ``size``: width and height in pixels; default: those of the image. Raises MissingDependencyError without Pillow.
        """
        from ..drawing import paint

        return paint.mask_image(self.outline, size or self.image_size or (0, 0))


def draw_marks(
    marks: Marks, image: ImageInput | None, source: ImageInput | None
) -> PIL.Image.Image:
    """Draws the marks on ``image``, or on ``source``. Raises InvalidImageError and MissingDependencyError."""
    from ..drawing import paint  # Needs Pillow, unlike sending.

    image = source if image is None else image
    if image is None:
        raise InvalidImageError("there is no image to draw on: pass one")
    return paint.draw(marks, image)


def notebook_png(marks: Marks, source: ImageInput | None) -> bytes | None:
    """None if there is nothing to draw, no image to draw on, or no Pillow."""
    if marks == Marks() or source is None:
        return None
    try:
        from ..drawing import paint

        return paint.png(draw_marks(marks, None, source), _NOTEBOOK_PIXELS)
    except KestrelError:
        return None


def _scores(found: Sequence[Point | Box | None]) -> str:
    """The lowest and the highest score, for a repr; empty if nothing has a score."""
    scores = [each.score for each in found if each is not None and each.score is not None]
    if not scores:
        return ""
    low, high = min(scores), max(scores)
    return f" {low:.2f}" if len(scores) == 1 else f" {low:.2f} to {high:.2f}"


def _clipped(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _listed(output: dict[str, Any], name: str) -> list[Any]:
    found = output.get(name)
    return found if isinstance(found, list) else []


def _has(place: Any, *names: str) -> bool:
    return isinstance(place, dict) and all(
        isinstance(place.get(name), (int, float)) for name in names
    )


def _only(place: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: place[name] for name in names if name in place}


def plain_value(value: Any) -> Any:
    """Converts ``value`` to types of JSON."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, ImageSize):
        return {"width": value.width, "height": value.height}
    if isinstance(value, Mask):
        data = {
            "svg": value.svg,
            "png": _base64(value.png),
            "rle": list(value.rle),
            "polygons": [list(polygon) for polygon in value.polygons],
        }
        return {
            "format": value.format,
            "width": value.width,
            "height": value.height,
            value.format: data[value.format],
        }
    if isinstance(value, (tuple, list, bytes)):
        return [plain_value(item) for item in value]
    if isinstance(value, (Point, Box)):
        plain = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return (
            plain if value.score is not None else {n: v for n, v in plain.items() if n != "score"}
        )
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain_value(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_Response: TypeAlias = (
    vision_service_pb2.QueryResponse
    | vision_service_pb2.CaptionResponse
    | vision_service_pb2.PointResponse
    | vision_service_pb2.DetectResponse
    | vision_service_pb2.SegmentResponse
    | vision_service_pb2.RunSkillResponse
)


def read_usage(usage: common_pb2.Usage) -> Usage:
    return Usage(**{f.name: getattr(usage, f.name) for f in fields(Usage)})


def read_timings(timings: common_pb2.Timings) -> Timings:
    return Timings(**{f.name: getattr(timings, f.name) for f in fields(Timings)})


def read_image_size(
    response: _Response | vision_service_pb2.AnalyzeResponse | vision_service_pb2.FrameResults,
) -> ImageSize | None:
    size = response.image_size
    return ImageSize(size.width, size.height) if response.HasField("image_size") else None


def _common(response: _Response, source: ImageInput | None) -> dict[str, Any]:
    return {
        "finish_reason": _FINISH_REASONS.get(response.finish_reason, "unknown"),
        "usage": read_usage(response.usage),
        "timings": read_timings(response.timings),
        "model": response.model,
        "request_id": response.request_id,
        "image_size": read_image_size(response),
        "seed": response.seed,
        "image_id": response.image_id,
        "source": source,
    }


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
            _FINISH_REASONS.get(response.reasoning.finish_reason, "unknown"),
        )
    return QueryResult(
        question=question,
        answer=response.answer,
        reasoning=reasoning,
        logprobs=_logprobs(response),
        samples=tuple(
            query_result(each, source, question, more_sources) for each in response.samples
        ),
        images=tuple(
            SeenImage(ImageSize(seen.image_size.width, seen.image_size.height), seen.image_id)
            for seen in response.images
        ),
        more_sources=more_sources,
        **_common(response, source),
    )


def caption_result(
    response: vision_service_pb2.CaptionResponse, source: ImageInput | None
) -> CaptionResult:
    return CaptionResult(
        caption=response.caption,
        logprobs=_logprobs(response),
        samples=tuple(caption_result(each, source) for each in response.samples),
        **_common(response, source),
    )


def point_result(
    response: vision_service_pb2.PointResponse, source: ImageInput | None, object: str
) -> PointResult:
    points = tuple(map(from_point, response.points))
    return PointResult(
        object=object, points=points, absence=_absence(response), **_common(response, source)
    )


def detect_result(
    response: vision_service_pb2.DetectResponse, source: ImageInput | None, object: str
) -> DetectResult:
    boxes = tuple(map(from_box, response.objects))
    return DetectResult(
        object=object, objects=boxes, absence=_absence(response), **_common(response, source)
    )


def _absence(
    response: vision_service_pb2.PointResponse | vision_service_pb2.DetectResponse,
) -> float | None:
    return response.absence if response.HasField("absence") else None


def segment_result(
    response: vision_service_pb2.SegmentResponse, source: ImageInput | None, object: str
) -> SegmentResult:
    return SegmentResult(
        object=object,
        svg_path=response.svg_path,
        box=from_box(response.box) if response.HasField("box") else None,
        score=read_score(response),
        mask=_mask(response.mask) if response.HasField("mask") else None,
        parse_error=response.parse_error if response.HasField("parse_error") else None,
        coarse_path=response.coarse_path if response.HasField("coarse_path") else None,
        coarse_box=from_box(response.coarse_box) if response.HasField("coarse_box") else None,
        **_common(response, source),
    )


def skill_result(
    response: vision_service_pb2.RunSkillResponse, source: ImageInput | None, skill: str
) -> SkillResult:
    output = from_struct(response.output)
    return SkillResult(
        skill=skill, output=output, logprobs=_logprobs(response), **_common(response, source)
    )


def read_token(message: common_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(map(read_token, message.top))
    return TokenLogprob(message.text, message.utf8, message.id, message.logprob, top)


def _logprobs(
    response: vision_service_pb2.QueryResponse
    | vision_service_pb2.CaptionResponse
    | vision_service_pb2.RunSkillResponse,
) -> Logprobs | None:
    if not response.HasField("logprobs"):
        return None
    message = response.logprobs
    return Logprobs(tuple(map(read_token, message.tokens)), message.sum, message.mean)


def _mask(message: vision_service_pb2.Mask) -> Mask | None:
    encoding = message.WhichOneof("encoding")
    if encoding is None:
        return None
    return Mask(
        encoding,
        message.width,
        message.height,
        svg=message.svg,
        png=message.png,
        rle=tuple(message.rle.counts),
        polygons=tuple(tuple(each.coordinates) for each in message.polygons.polygons),
    )
