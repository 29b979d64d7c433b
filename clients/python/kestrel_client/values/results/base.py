"""Result: the fields and methods of all results, and their values as plain values for JSON.

``draw()`` and ``save()`` draw the result on the image (this needs Pillow).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from ..._pb.kestrel.v1 import common_pb2
from ...drawing.marks import Marks, Mask
from ...errors import RpcError
from ...geometry import ImageSize, read_size
from ...images.images import ImageInput
from .showing import draw_marks, notebook_png

if TYPE_CHECKING:
    import PIL.Image

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "unknown"]
"""Why generation ended: at its natural end ("stop"), at a limit, or cancelled. A newer server may give "unknown"."""

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
    if isinstance(value, RpcError):
        return {"code": value.code.name, "message": value.message, "reason": value.reason}
    if isinstance(value, (tuple, list, bytes)):
        return [plain_value(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain_value(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def read_usage(usage: common_pb2.Usage) -> Usage:
    return Usage(**{f.name: getattr(usage, f.name) for f in fields(Usage)})


def read_timings(timings: common_pb2.Timings) -> Timings:
    return Timings(**{f.name: getattr(timings, f.name) for f in fields(Timings)})


def read_finish_reason(reason: int) -> FinishReason:
    return _FINISH_REASONS.get(reason, "unknown")


def read_finish_reasons(reasons: Iterable[int]) -> FinishReason:
    """The reason of several generations: "length" if one of them has it, otherwise that of the first that has one."""
    read: list[FinishReason] = [
        reason for reason in map(read_finish_reason, reasons) if reason != "unknown"
    ]
    if "length" in read:
        return "length"
    return read[0] if read else "unknown"


class Response(Protocol):
    """What the responses of all skills share."""

    @property
    def usage(self) -> common_pb2.Usage: ...
    @property
    def timings(self) -> common_pb2.Timings: ...
    @property
    def info(self) -> common_pb2.RequestInfo: ...


def common_fields(response: Response, source: ImageInput | None) -> dict[str, Any]:
    """The fields of Result but ``finish_reason``."""
    return {
        "usage": read_usage(response.usage),
        "timings": read_timings(response.timings),
        "source": source,
        **info_fields(response.info),
    }


def info_fields(info: common_pb2.RequestInfo) -> dict[str, Any]:
    """What a result holds of its request."""
    first = next(iter(info.images), None)
    return {
        "model": info.model,
        "request_id": info.request_id,
        "image_size": None if first is None else read_size(first.size),
        "seed": info.seed,
        "image_id": "" if first is None else first.image_id,
    }
