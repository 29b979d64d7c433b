"""The contract between scheduler and runtime: what one step computes, and what comes back.

Everything is plain data. The scheduler fills a StepPlan with ints; a runtime turns it into tensors and returns a
StepResult. Constraints on sampling (allowed, suppressed, forced ids, which head to read) travel as a TokenRule, never
as a callback, so that a captured graph or another process can apply them.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .reading import ReadSpec
from .requests import Coord, PreparedImage, SamplingParams, Size, Token

if TYPE_CHECKING:
    import numpy as np

    from .adapter import Adapter


class LogitEdit(NamedTuple):
    """A change of the logit of one id: ``bias`` is added; then a logit above 0 is divided by ``penalty`` and another is
    multiplied by it; then ``minus`` is subtracted."""

    id: int
    bias: float = 0.0
    penalty: float = 1.0
    minus: float = 0.0


MAX_TOP = 20
"""The most alternatives of one token."""


@dataclass(frozen=True, slots=True)
class TokenRule:
    """What may be sampled at one position, and whether a value is read from the region heads.

    Order: ``forced`` wins over all; else ``edits`` change logits, each id at most once; logits outside ``allowed``,
    outside ``mask`` and inside ``suppressed`` become -inf, an id is drawn, and if ``otherwise`` is set every id but
    ``stop`` turns into it (point and detect of Moondream 2 read any token but the end as "another object"). Then id
    ``coord``/``size`` takes a value from its head at the same hidden state if ``read_coord``/``read_size``; else it is
    an ordinary text token.
    """

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()
    forced: int | None = None
    otherwise: int | None = None
    stop: int = 0
    read_coord: bool = False
    read_size: bool = False
    mask: bytes | None = None
    """One bit for each id of the vocabulary: bit ``id % 8`` of byte ``id // 8``. Ids whose bit is 0 are forbidden. A
    multiple of 4 bytes long, with zeros beyond the vocabulary. Such a rule is used for one token only."""

    edits: tuple[LogitEdit, ...] = ()

    top: int = 0
    """How many of the likeliest ids to return with the token (StepToken.top), at most MAX_TOP. Not for a forced id."""

    @staticmethod
    def mask_bytes(vocab_size: int) -> int:
        return -(-vocab_size // 32) * 4


class RuleWait(abc.ABC):
    """Stands for a rule that another thread computes."""

    @property
    @abc.abstractmethod
    def is_quick(self) -> bool:
        """Whether the rule is usually there within a millisecond."""

    @abc.abstractmethod
    def begin(self, on_end: Callable[[], None]) -> None:
        """Has the rule computed. Then another thread calls ``on_end``. Once for each rule."""

    @abc.abstractmethod
    def drop(self) -> None:
        """The rule is no longer needed. ``on_end`` may be called nevertheless."""


NEAR_BINS = 16
"""Bins on each side of a value's bin that count as near it: 1.6 % of the image, or a factor of 1.11 for a size."""


@dataclass(slots=True, unsafe_hash=True)
class StepToken:
    """One sampled token: its id, and its value if a region head was read. Never changed; not frozen, because one is
    made for every token, and that would take four times as long. The same holds for SampleSpec and Row.

    ``logprob``: the natural logarithm of the id's probability under its rule, at temperature 1; 0 for a forced id; None
    if unknown. ``near``: for a value, the probability in [0, 1] that the region head gives to the bins within NEAR_BINS
    of the value's bin; for a size, the product for width and height; None if unknown. Both are float32.

    ``top``: the likeliest ids under the rule, as many as it asks for, with their log-probabilities. The likeliest is
    first, and of equal ones the smaller id. Forbidden ids are left out. ``otherwise`` does not change them.
    """

    id: int
    value: Coord | Size | None = None
    logprob: float | None = None
    near: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def as_input(self) -> Token:
        """The input at the next position."""
        return self.id if self.value is None else self.value


@dataclass(slots=True, unsafe_hash=True)
class SampleSpec:
    """Asks for one token after a row's last position. ``draw`` counts this request's tokens: (seed, draw) names the
    random number, so a seeded request gives the same samples whatever its neighbours."""

    rule: TokenRule
    sampling: SamplingParams
    draw: int


class Previous(enum.Enum):
    """Stands for the token that the sequence's last row sampled: a step may be launched before that is known here."""

    TOKEN = "previous"


PREVIOUS = Previous.TOKEN


@dataclass(frozen=True, slots=True)
class EncodeSlice:
    """Crops ``first`` up to ``last`` of an image; an image's slices come in order, over one or more steps.

    ``reused``: crops among these whose features the runtime keeps, under their crop keys. ``kept``: crops whose
    features the runtime keeps from now on.
    """

    image: PreparedImage
    first: int
    last: int
    reused: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    sequence_id: int = field(default=-1, compare=False)
    """The sequence for which the crops are encoded. Others may use them too."""

    @property
    def distinct(self) -> range:
        """The crops of the slice that differ from one another: a single tile equals the overview."""
        return range(self.first, min(self.last, self.image.num_distinct))

    @property
    def encoded_runs(self) -> tuple[tuple[int, int], ...]:
        """The crops that pass through the tower, as ranges of neighbours, from the first up to the last (exclusive)."""
        found: list[tuple[int, int]] = []
        for index in self.distinct:
            if index in self.reused:
                continue
            first = found.pop()[0] if found and found[-1][1] == index else index
            found.append((first, index + 1))
        return tuple(found)

    @property
    def num_encoded(self) -> int:
        """Crops that pass through the tower."""
        return len(self.distinct) - len(self.reused)

    @property
    def kept_keys(self) -> tuple[str, ...]:
        keys = self.image.crop_keys or ()
        return tuple(keys[index] for index in self.kept)


@dataclass(frozen=True, slots=True)
class ImageRead:
    """Reads an image that is encoded in this step or was before. If ``spec`` reads crops, the image has
    ``keeps_features``."""

    sequence_id: int
    image: PreparedImage
    spec: ReadSpec


@dataclass(slots=True, unsafe_hash=True)
class Row:
    """One sequence's share of a step: ``tokens`` at positions start.., written to the pages of ``page_table``.

    ``page_table`` covers every position up to the end of ``tokens``. ``sample`` is None while prefill is incomplete.
    An ImageBlock occurs only whole, and a BOS directly before it is in the same row. PREVIOUS occurs only as the last
    token.
    """

    sequence_id: int
    tokens: tuple[Token | Previous, ...]
    start: int
    page_table: tuple[int, ...]
    sample: SampleSpec | None
    adapter: Adapter | None = None


MOST_REFINED = 4
"""Masks that one step refines at most. Bounds their memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RefineRow:
    """A coarse mask to refine, of a sequence that has sampled its last token.

    ``pixels``: [crop_size, crop_size, 3] uint8 RGB, the region around the object. ``mask``: [crop_size, crop_size]
    uint8, 1 inside the coarse outline. ``adapter``: that of the request, if it changes the vision tower.
    """

    sequence_id: int
    pixels: np.ndarray
    mask: np.ndarray
    adapter: Adapter | None = None


class Lane(enum.IntEnum):
    """Which steps run in order. A runtime with one lane gets steps of ``ALL``, which run in the order of their launch,
    so a page freed by one plan may be written by the next.

    A runtime with two lanes gets steps that only decode and steps that only encode and prefill. The steps of a lane run
    in the order of their launch. A step of ``NEW_WORK`` begins after all decode steps that were launched before it. A
    step of ``DECODE`` does not wait for steps of ``NEW_WORK``, except for the one that its ``after`` names. So decode
    steps run while a long step of ``NEW_WORK`` does. The scheduler keeps the pages that a step of ``NEW_WORK`` writes
    until the step has come back. Steps of ``NEW_WORK`` drop images.
    """

    ALL = 0
    DECODE = 1
    NEW_WORK = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Dropping goes first, then encoding, prefill and decode. Rows are independent of one another."""

    step_id: int
    drop_images: tuple[str, ...] = ()
    """Keys of images whose crops and embeddings are no longer needed; a key may be unknown."""
    drop_crops: tuple[str, ...] = ()
    """Keys of crops whose features are no longer kept; a key may be unknown. Dropped before encoding."""
    ended: tuple[int, ...] = ()
    """Sequences that will have no further row. The runtime may drop their state. An id may be unknown."""
    encode: tuple[EncodeSlice, ...] = ()
    """Crops to encode. After an image's last slice its embedding is kept under its key until ``drop_images``."""
    reads: tuple[ImageRead, ...] = ()
    """What to read of images, after encoding."""
    prefill: tuple[Row, ...] = ()
    """Rows of many tokens."""
    decode: tuple[Row, ...] = ()
    """Rows of exactly one token; they share one batched forward pass."""
    refine: tuple[RefineRow, ...] = ()
    """Masks to refine, beside the rows. Only for a runtime whose limits say that it refines."""
    lane: Lane = Lane.ALL
    after: int | None = None
    """For a step of ``DECODE``: the step of ``NEW_WORK`` that must have run before, because rows continue its rows."""
    leave_room: bool = False
    """For a step of ``NEW_WORK``: many rows decode beside it, so the runtime leaves them a part of the device."""
    spacing_s: float = 0.0
    """For a step of ``DECODE``: the fewest seconds on the device from the start of the last spaced step to its own."""

    @property
    def is_empty(self) -> bool:
        work = self.encode or self.reads or self.prefill or self.decode or self.refine
        return not (work or self.drop_images or self.drop_crops or self.ended)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: one StepToken for each row with a SampleSpec, and what each ImageRead has read, by sequence
    id; seconds by phase."""

    tokens: dict[int, StepToken] = field(default_factory=dict)
    readings: dict[int, Any] = field(default_factory=dict)
    non_finite: frozenset[int] = frozenset()
    """Sequences whose reading is not finite, or whose row gave NaN or infinity, as hidden values at its last
    position, as logits or from a region head. They have no result, and what their rows wrote to their pages is
    worthless. Other sequences are not affected."""
    refined: dict[int, np.ndarray] = field(default_factory=dict)
    """By sequence id, the probability of each pixel to be inside, [crop_size, crop_size] float32. A mask whose values
    are not finite is missing."""
    shared_groups: tuple[int, ...] = ()
    """For each group of rows whose common positions were read once for all of them, its number of rows."""
    vision_s: float = 0.0
    """Crops of images and refined masks."""
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Limits that follow from device and model. Positions are KV positions."""

    num_pages: int
    page_size: int
    max_batch_size: int
    max_seq_length: int
    vocab_size: int
    decodes_beside: bool = False
    """The runtime has two lanes: it decodes while it encodes images and prefills prompts."""
    leaves_room: bool = False
    """It can leave a part of the device to decode steps (StepPlan.leave_room)."""
    refines: bool = False
    """The runtime has a segmentation refiner."""


def noise_key(seed: int, draw: int) -> int:
    """The key of the noise for token ``draw`` of a request, in [0, 2^64): SplitMix64 (Steele, Lea, Flood 2014) of the
    pair. `runtime.sampler` makes the noise of each id from it.

    A counter-based draw needs no generator state, so batching and restarts can't change samples.
    """
    mask = (1 << 64) - 1
    z = (seed * 0xD1342543DE82EF95 + (draw + 1) * 0x9E3779B97F4A7C15) & mask
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z
