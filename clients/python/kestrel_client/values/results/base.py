"""Result: the fields and methods of all results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from ..._pb.kestrel.v1 import common_pb2
from ...geometry import ImageSize, read_size
from ...images.image_forms import ImageInput
from ..plain import Plain, plain_fields
from ..reading import read, words_by_value
from .showing import Drawable

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "unknown"]
"""Why generation ended: at its natural end ("stop"), at a limit, or cancelled. A newer server may give "unknown"."""

_SHOWN_CHARACTERS = 120
_FINISH_REASONS: dict[int, FinishReason] = words_by_value(common_pb2.FinishReason)


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
    device_ms: float = 0.0
    """The share of the device's time that belongs to the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The phases of a request on the server, in milliseconds."""

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    prefill_ms: float = 0.0
    """From the start of the computation to the first token, including vision."""
    decode_ms: float = 0.0
    """From the first token to the last."""
    ttft_ms: float = 0.0
    """From the acceptance of the request to the first token."""
    processing_ms: float = 0.0
    """Total time without queue time."""
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Drawable, Plain):
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
    num_crops: int = 0
    """Crops in which the model saw the image (``max_crops``); 0 without an image."""
    source: ImageInput | None = field(default=None, repr=False, compare=False)
    """The image that was given to the call: ``draw()`` draws on it."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``, the skill's own first. The images that were given are omitted."""
        common = [f.name for f in fields(Result)]
        plain = plain_fields(self, "source", "more_sources")
        return dict(sorted(plain.items(), key=lambda item: item[0] in common))

    def _short(self, shown: str) -> str:
        return f"{type(self).__name__}({shown}, {self.model}, {self.finish_reason})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ImageResult(Result):
    """A result of a skill that always has an image."""

    image_size: ImageSize
    """Width and height of the upright image in pixels; coordinates refer to it."""


def shown_scores(scores: Sequence[float]) -> str:
    """The lowest and the highest score, for a repr; empty if there is none."""
    if not scores:
        return ""
    low, high = min(scores), max(scores)
    return f" {low:.2f}" if len(scores) == 1 else f" {low:.2f} to {high:.2f}"


def clipped(value: object) -> str:
    """A short ``repr(value)``."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def read_finish_reason(reason: int) -> FinishReason:
    return _FINISH_REASONS.get(reason, "unknown")


def read_finish_reasons(reasons: Iterable[int]) -> FinishReason:
    """The reason of several generations: "length" if one of them has it, otherwise that of the first that has one."""
    known: list[FinishReason] = [
        reason for reason in map(read_finish_reason, reasons) if reason != "unknown"
    ]
    if "length" in known:
        return "length"
    return known[0] if known else "unknown"


def common_fields(response: Any, source: ImageInput | None) -> dict[str, Any]:
    """The fields of Result but ``finish_reason``, from the response of a skill."""
    return {
        "usage": read(Usage, response.usage),
        "timings": read(Timings, response.timings),
        "source": source,
        "seed": response.info.seed,
        **info_fields(response.info),
    }


def info_fields(info: common_pb2.RequestInfo) -> dict[str, Any]:
    """What every result holds of its request."""
    first = next(iter(info.images), None)
    return {
        "model": info.model,
        "request_id": info.request_id,
        "image_size": None if first is None else read_size(first.size),
        "image_id": "" if first is None else first.image_id,
        "num_crops": 0 if first is None else first.num_crops,
    }
