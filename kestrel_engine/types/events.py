"""The updates, metrics and result of a request. Plain values only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from .requests import PreparedImage

FinishReason = Literal["stop", "length", "cancelled"]


class TokenLogprob(NamedTuple):
    """A generated token and its probability. A tuple, because one is made for each alternative of each token, in less
    than half the time of a frozen dataclass.

    ``utf8``: the token's bytes, which may be a part of a character; joined, the bytes of all tokens are the text. Empty
    for a special token. ``logprob``: the natural logarithm of the probability that the model gave to the token among
    those that its rule allows, at temperature 1, before top_k and top_p; 0 for a forced token. ``top``: the likeliest
    tokens at this place, the likeliest first, if the request asks for them; their own ``top`` is empty. The end token
    may be among them.
    """

    id: int
    utf8: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The token alone, with a part of a character as U+FFFD."""
        return self.utf8.decode(errors="replace")


def alternatives(
    top: Iterable[tuple[int, float]], name: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """The tokens of the ids and log-probabilities ``top``, without alternatives. ``name``: the bytes of an id."""
    # In half the time of calls of the class, which counts with 20 alternatives of each token of each request.
    new: Any = tuple.__new__
    return tuple([new(TokenLogprob, (id, name(id), logprob, ())) for id, logprob in top])


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """One step forward of a stream; exactly one of the payload fields is set.

    ``text`` and ``reasoning`` are deltas that never split a character and, joined, equal the final text. ``object`` is
    a finished point ``{"x", "y"}`` or box ``{"x_min", "y_min", "x_max", "y_max"}`` (normalised, not clipped), with its
    ``score`` in [0, 1] if the runtime gives probabilities. ``path`` is one SVG command with its arguments; joined with
    single spaces the pieces equal ``svg_path``. ``token_index``: number of tokens generated when it was emitted.
    ``tokens`` come with ``text``, if the request asks for log-probabilities: those since the last update with text. The
    text of the last of them may follow later. The last update has tokens alone if no text follows.
    """

    request_id: str = ""
    token_index: int = 0
    text: str = ""
    reasoning: str = ""
    object: dict[str, float] | None = None
    path: str = ""
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Counts, and milliseconds by the host's monotonic clock."""

    input_tokens: int = 0
    """Prompt positions, BOS and image included."""
    image_tokens: int = 0
    """Those of input_tokens that images take."""
    output_tokens: int = 0
    """Generated tokens, spatial ones included, stop id not."""
    reasoning_tokens: int = 0
    """Those of output_tokens that were reasoning."""
    cached_tokens: int = 0
    """KV positions reused from a cache."""
    cached_image_tokens: int = 0
    """Those of cached_tokens that images take."""
    encoded_crops: int = 0
    """Crops of the request's images that were encoded for it; 0 if another request had the image encoded."""
    reused_crops: int = 0
    """Crops that were not encoded, because an earlier image had an equal one (RuntimeConfig.crop_cache_bytes)."""
    device_time_ms: float = 0.0
    """The request's share of the device's work in its steps, by positions, and by crops of images."""
    queue_time_ms: float = 0.0
    """Accepted to first scheduled, less preprocessing."""
    preprocess_time_ms: float = 0.0
    """Decoding and tiling the image, tokenising."""
    prefill_time_ms: float = 0.0
    """First scheduled to first token; vision included."""
    decode_time_ms: float = 0.0
    """First token to the last."""
    ttft_ms: float = 0.0
    """Accepted to first token."""
    processing_time_ms: float = 0.0
    """Total less queue."""
    total_time_ms: float = 0.0
    """Accepted to finished."""

    @staticmethod
    def work_of(several: Sequence[EngineMetrics]) -> dict[str, Any]:
        """The sums of tokens, crops and device time of several requests, by field."""
        return {name: sum(getattr(each, name) for each in several) for name in _WORK}


_WORK = (
    *("input_tokens", "image_tokens", "output_tokens", "reasoning_tokens", "cached_tokens"),
    *("cached_image_tokens", "encoded_crops", "reused_crops", "device_time_ms"),
)


class ObjectAbsence(NamedTuple):
    """The probability in [0, 1] that no image of a request shows an object."""

    object: str
    absence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenImage:
    """An image of a request. ``size``: width and height in pixels of the whole upright image. ``digest``: SHA-256 of
    the image as it was given, without its background, region and budget, in hexadecimal. ``num_crops``: those that the
    model sees, in all looks together: the overview, and the tiles if there are several."""

    size: tuple[int, int]
    digest: str
    num_crops: int

    @classmethod
    def of(cls, looks: Sequence[PreparedImage]) -> SeenImage:
        """``looks``: all that a request sees of the image."""
        digest = looks[0].source_digest or b""
        num_crops = sum(look.num_distinct for look in looks)
        return cls(size=looks[0].image_size, digest=digest.hex(), num_crops=num_crops)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """The whole result of one request. ``output``: the skill's dict (moondream.md section 12)."""

    request_id: str
    output: dict[str, Any]
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    model: str = ""
    images: tuple[SeenImage, ...] = ()
    """The images of the request, in the order of its prompt."""
    num_looks: int = 1
    """How often the request looked at its images: above 1 for a tiled image, and for a question that presupposes
    objects."""
    seed: int = 0
    """The seed that the sampling used."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """The tokens of the answer or description, reasoning left out; None unless the request asked for them."""
    absence: float | None = None
    """Of point and detect: the probability in [0, 1] that the image has no such object; None if it is unknown."""
    absences: tuple[ObjectAbsence, ...] = ()
    """Those of the objects that the question presupposes, in order."""
    abstained: bool = False
    """One of these objects is absent, so nothing was generated."""

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Width and height in pixels of the first image, upright; None without an image."""
        return self.images[0].size if self.images else None
