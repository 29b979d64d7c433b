"""The options of a call, and the parts of a request that they make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from ..._pb.kestrel.v1 import common_pb2
from ...connection import Metadata
from ...drawing.marks import MaskFormat
from ...errors import InvalidRequestError
from ...geometry import Box, BoxInput, SpatialRef, TilesInput
from ...images.image_forms import ImageInput
from ...values.constraint import Constraint, to_constraint
from ...values.reading import words
from ...values.tasks import Turn
from .building import build, choice

CaptionLength: TypeAlias = Literal["short", "normal", "long"]
Priority: TypeAlias = Literal["low", "normal", "high"]
LateFrames: TypeAlias = Literal["keep", "overview"]


class HandlingOptions(TypedDict, total=False):
    """How a call is handled. The server has a default for each option that is omitted or None."""

    model: str | None
    """Name of the model that must answer."""
    adapter: str | None
    """Name of the adapter, a fine-tune of the model, to apply."""
    request_id: str | None
    """Your name for the request: 1 to 128 visible ASCII characters."""
    priority: Priority | None
    """Order in which waiting requests are started."""
    cache_salt: str | None
    """The server reuses computation only among calls with the same salt; at most 128 bytes of UTF-8."""
    background: str | None
    """Background colour for a transparent image, like "#ffffff"; without it the server drops the alpha channel."""
    region: Box | Sequence[float] | None
    """The part of the image that the model sees: a Box, or x_min, y_min, x_max and y_max. Results and spatial
    references have coordinates of the whole image. Further images of a query are seen whole."""
    max_crops: int | None
    """Limit on the tiles in which the model sees each image, beside the overview: fewer take less time, and small text
    and objects may be missed. From 1, the overview alone, to the model's own limit (``Model.max_crops``).
    ``result.num_crops`` says how many crops were used."""
    timeout: float | None
    """Seconds for the whole call; default: the client's. The server drops a request that still waits at its end."""
    metadata: Metadata | None
    """Sent with the call, after the client's own."""
    session: str | None
    """With several servers: calls with the same name go to the same server, also if their images differ. 1 to 128
    visible ASCII characters; default: calls about the same image go to the same server."""


class CallOptions(HandlingOptions, total=False):
    """Options of every skill. The server has a default for each option that is omitted or None."""

    temperature: float | None
    """0 is greedy; in [0, 100]."""
    top_p: float | None
    """In (0, 1]."""
    top_k: int | None
    """At least 0; 0 keeps all tokens."""
    min_p: float | None
    """In [0, 1]: tokens whose probability is below this part of the largest one are not sampled."""
    max_tokens: int | None
    """Largest number of tokens to generate, at least 1; for ``point``, ``detect`` and ``segment`` of each name, for
    ``gaze`` of each look. Reasoning and answer each have this limit. A point takes 2 tokens and a box 3; an incomplete
    object is dropped."""
    seed: int | None
    """In [0, 2^63): the same seed and request give the same result."""


class TextOptions(CallOptions, total=False):
    """Options of the skills that write a text. The server has a default for each option that is omitted or None."""

    stop: str | Sequence[str] | None
    """The text ends before the first of these texts; at most 16, each of at most 256 bytes of UTF-8. One string is one
    text. In reasoning they are ordinary text."""
    logprobs: bool | None
    """Whether the result has the log-probability of each token (``result.logprobs``)."""
    top_logprobs: int | None
    """With ``logprobs``: how many of the likeliest tokens the result has at the place of each token, at most 20
    (``TokenLogprob.top``)."""
    constraint: Constraint | None
    """What the text must match."""
    repetition_penalty: float | None
    """In [0.01, 10]; above 1 the model repeats less of the prompt and of the text so far."""
    presence_penalty: float | None
    """In [-2, 2]: subtracted from the logits of all tokens of the text so far."""
    frequency_penalty: float | None
    """In [-2, 2]: subtracted from the logit of a token for each time that it is in the text so far."""
    logit_bias: Mapping[int, float] | None
    """Numbers in [-100, 100] to add to the logits of at most 300 tokens, by id."""


class QueryOptions(TextOptions, total=False):
    """Options of ``query``."""

    reasoning: bool
    """Whether the model reasons before it answers."""
    spatial_refs: Iterable[SpatialRef]
    """Points and boxes that the question refers to."""
    history: Iterable[Turn]
    """Earlier turns of the conversation, oldest first: results of ``query`` about the same image, or pairs of question
    and answer."""
    images: Sequence[ImageInput]
    """More images that the question is about. With a history, the first argument belongs to the first turn, and these
    to the question."""
    system: str
    """Instructions that precede the first question."""
    presupposes: Sequence[str]
    """Objects without which the question has no answer, at most 8. If one of them is absent with a probability above
    ``max_absence``, there is no answer: ``result.abstained``."""
    max_absence: float | None
    max_reasoning_tokens: int | None
    """With reasoning: largest number of tokens of the reasoning, at least 1; ``max_tokens`` then limits the answer
    alone. ``result.reasoning.finish_reason`` says whether the reasoning was cut."""
    answer_start: str | None
    """The beginning of the answer; the result has only what follows. Not with reasoning."""


class PointOptions(CallOptions, total=False):
    """Options of ``point``."""

    max_objects: int | None
    """Limit on the objects of each name."""
    spatial_refs: Iterable[SpatialRef]
    """Points and boxes that the names refer to."""
    min_score: float | None
    """Objects with a lower score are omitted."""
    tiles: TilesInput | None
    """Cuts the image into this many rows and columns, like "2x3" or Tiles(2, 3, overlap=0.3), and looks at each tile
    and at the whole image, which finds small objects; default: one look."""


class DetectOptions(CallOptions, total=False):
    """Options of ``detect``."""

    max_objects: int | None
    """As for ``point``, like ``min_score`` and ``tiles``."""
    min_score: float | None
    max_overlap: float | None
    """Of two boxes whose intersection exceeds this part of their union, the result has the one with the higher score,
    also if their names differ; default: both."""
    tiles: TilesInput | None


class SegmentOptions(CallOptions, total=False):
    """Options of ``segment``."""

    spatial_refs: Iterable[SpatialRef]
    """As for ``point``, like ``min_score``."""
    mask: MaskFormat
    """The encoding of a mask that the server sends in addition to the path."""
    min_score: float | None
    refine: bool | None
    """False gives the model's own outline; the default refines it if the model has a refiner."""


class GazeOptions(CallOptions, total=False):
    """Options of ``gaze``."""

    faces: BoxInput | Sequence[BoxInput]
    """In place of eyes, a face or up to 256 faces; default: all faces that the model finds, at most ``max_faces``."""
    max_faces: int | None
    accurate: bool
    """Looks 20 times for each face, and takes the mean without outliers; not with eyes."""


_PRIORITIES = words(common_pb2.Priority)
_SAMPLING = tuple(common_pb2.Sampling.DESCRIPTOR.fields_by_name)
_TEXT = tuple(common_pb2.TextOptions.DESCRIPTOR.fields_by_name)
_LIMITS = ("max_tokens", "max_reasoning_tokens")
_HANDLING = tuple(common_pb2.RequestOptions.DESCRIPTOR.fields_by_name)


def checked_session(name: str | None) -> str:
    """The value of IMAGE_HEADER for a session; empty for None. Raises InvalidRequestError."""
    if name is None:
        return ""
    if not isinstance(name, str) or not re.fullmatch(r"[!-~]{1,128}", name):
        raise InvalidRequestError(f"session={name!r}: must be 1 to 128 visible ASCII characters")
    return name


def to_handling(options: HandlingOptions, known: type) -> common_pb2.RequestOptions | None:
    """None if no option is set. Raises TypeError for an option that is not in ``known``."""
    unknown = options.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}")
    values = {n: v for n, v in options.items() if n in _HANDLING and v is not None}
    if "priority" in values:
        values["priority"] = choice("priority", values["priority"], _PRIORITIES)
    return build(common_pb2.RequestOptions, **values) if values else None


def generation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a task that say how to generate: limits, ``sampling`` and ``text``. Raises InvalidRequestError."""
    chosen = {name: value for name, value in values.items() if value is not None}
    fields = {name: chosen[name] for name in _LIMITS if name in chosen}
    if sampling := {name: chosen[name] for name in _SAMPLING if name in chosen}:
        fields["sampling"] = build(common_pb2.Sampling, **sampling)
    if text := {name: chosen[name] for name in _TEXT if name in chosen}:
        fields["text"] = _to_text(text)
    return fields


def _to_text(text: dict[str, Any]) -> common_pb2.TextOptions:
    if isinstance(text.get("stop"), str):
        text["stop"] = [text["stop"]]
    if "constraint" in text:
        text["constraint"] = to_constraint(text["constraint"])
    if "logit_bias" in text:
        text["logit_bias"] = _to_bias(text["logit_bias"])
    return build(common_pb2.TextOptions, **text)


def _to_bias(biases: object) -> list[common_pb2.LogitBias]:
    """Raises InvalidRequestError."""
    if not isinstance(biases, Mapping):
        raise InvalidRequestError(f"logit_bias: {biases!r} is not a mapping from ids to numbers")
    try:
        return [common_pb2.LogitBias(id=token, bias=bias) for token, bias in biases.items()]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"logit_bias: {error}") from error
