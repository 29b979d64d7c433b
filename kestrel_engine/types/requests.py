"""A request after its check: typed tokens, sampling, a prepared image.

A prompt is a tuple of typed tokens; prefix-cache keys, token counts and region embeddings all follow from that one
type.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, cast

from ..errors import FieldPath, InvalidRequest

if TYPE_CHECKING:
    import numpy as np

    from .adapter import Adapter


@dataclass(frozen=True, slots=True)
class Coord:
    """A coordinate fed to, or decoded by, the region model: normalised to [0, 1]."""

    value: float


@dataclass(frozen=True, slots=True)
class Size:
    """A box size fed to, or decoded by, the region model: both sides normalised to [0, 1]."""

    width: float
    height: float


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """One image in a prompt. Its positions attend to one another in both directions, and to all positions before it.
    The BOS at position 0 belongs to the block of an image that follows it directly.

    ``key`` is the content hash of what the model sees, ``num_positions`` its length in KV positions (grid squared).
    """

    key: str
    num_positions: int


class ImagePlace(enum.Enum):
    """In a skill's prompt, stands for an image of the request, which the engine puts there (SkillRequest)."""

    NEXT = "next image"


IMAGE_PLACE = ImagePlace.NEXT

Token: TypeAlias = int | Coord | Size | ImageBlock
"""A prompt or fed-back token; a plain int is a text id."""

Prompt: TypeAlias = tuple[Token, ...]


def num_positions(tokens: tuple[Token, ...] | list[Token]) -> int:
    """KV positions that ``tokens`` take."""
    return sum(t.num_positions if isinstance(t, ImageBlock) else 1 for t in tokens)


def image_positions(tokens: tuple[Token, ...], most: int | None = None) -> int:
    """Those of ``num_positions`` that images take; with ``most``, of the first ``most`` positions."""
    if most is None:
        return sum(t.num_positions for t in tokens if isinstance(t, ImageBlock))
    found = 0
    for token in tokens if most else ():
        if isinstance(token, ImageBlock):
            found += min(most, token.num_positions)
        most -= token.num_positions if isinstance(token, ImageBlock) else 1
        if most <= 0:
            break
    return found


def _number(default: float, **schema: float) -> Any:
    """A field of SamplingParams. ``schema``: its range, in JSON Schema."""
    return field(default=default, metadata={"schema": {"type": "number", **schema}})


def _whole(default: int, limit: str) -> Any:
    """As `_number`, for a whole number of at least 0. ``limit``: how an error states its range."""
    schema = {"type": "integer", "minimum": 0}
    return field(default=default, metadata={"schema": schema, "limit": limit})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 keeps all. Each field is a setting of all skills,
    with its name and range."""

    temperature: float = _number(0.0, minimum=0, maximum=100)
    top_p: float = _number(1.0, exclusiveMinimum=0, maximum=1)
    top_k: int = _whole(0, "of at least 0 (0 keeps all)")
    min_p: float = _number(0.0, minimum=0, maximum=1)
    """Ids whose probability is below this part of the largest one are not drawn. It applies before top_k and top_p."""
    seed: int = _whole(0, "in [0, 2^63)")

    def __post_init__(self) -> None:
        for name, (schema, limit) in _SAMPLING.items():
            value = getattr(self, name)
            if schema["type"] == "integer":
                whole = isinstance(value, int) and not isinstance(value, bool)
                if not whole or value < 0 or (name == "seed" and value >= 2**63):
                    raise InvalidRequest(name, f"{value!r} is not a whole number {limit}")
            elif not is_number(value) or not _is_in(value, schema):
                raise InvalidRequest(name, f"{value!r} is not in {limit}")

    @property
    def is_odd(self) -> bool:
        """Whether kernels do not know a rule of it."""
        return self.min_p > 0 and self.temperature > 0


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("exclusiveMinimum"), schema["maximum"]
    return f"[{schema['minimum']}, {high}]" if low is None else f"({low}, {high}]"


_SAMPLING: dict[str, tuple[Mapping[str, Any], str]] = {
    each.name: (
        each.metadata["schema"],
        each.metadata.get("limit") or _range(each.metadata["schema"]),
    )
    for each in fields(SamplingParams)
}

SAMPLING_SETTINGS: Mapping[str, Mapping[str, Any]] = {k: v[0] for k, v in _SAMPLING.items()}
"""The fields of SamplingParams, each with its JSON Schema."""


def _is_in(value: float, schema: Mapping[str, Any]) -> bool:
    low = schema.get("exclusiveMinimum")
    above = value >= schema["minimum"] if low is None else value > low
    return bool(above and value <= schema["maximum"])


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number. Booleans are none."""
    # numpy's numbers are registered as Real, which takes longer to find out.
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        return False
    # Compared, for isfinite() raises on a whole number that is no float.
    return -math.inf < cast(float, value) < math.inf


def checked_list(
    field: str | FieldPath, value: object, what: str, *, most: int | None = None, noun: str = ""
) -> Sequence[Any]:
    """``value`` if it is a list of at most ``most`` items; a text is none. ``what``: what it must be a list of.
    ``noun``: the items, in the error. Raises InvalidRequest."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise InvalidRequest(field, f"must be {what}")
    if most is not None and len(value) > most:
        count = len(value)
        why = f"has {count} {noun}, the limit is {most}"
        raise InvalidRequest(field, why, value=count, limit=most)
    return value


def check_bytes(field: str | FieldPath, text: str, limit: int) -> None:
    """Raises InvalidRequest if ``text`` has more than ``limit`` UTF-8 bytes or is not valid Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "holds a lone surrogate and is not valid Unicode") from error
    if size > limit:
        raise InvalidRequest(
            field, f"has {size} UTF-8 bytes, the limit is {limit}", value=size, limit=limit
        )


Edges: TypeAlias = tuple[float, float, float, float]
"""x_min, y_min, x_max, y_max as fractions of an image."""


class Outline(NamedTuple):
    """An SVG path relative to a box of the upright image."""

    path: str
    box: Edges


@dataclass(frozen=True, slots=True)
class ImageRegion:
    """The part of an image that a request sees, in pixels of the upright image, and the size of that image."""

    left: int
    top: int
    width: int
    height: int
    image_width: int
    image_height: int

    @property
    def edges(self) -> Edges:
        return (
            self.left / self.image_width,
            self.top / self.image_height,
            (self.left + self.width) / self.image_width,
            (self.top + self.height) / self.image_height,
        )

    def x_to_image(self, x: float) -> float:
        """``x``: a fraction of the region's width. Returns a fraction of the image's."""
        return (self.left + x * self.width) / self.image_width

    def y_to_image(self, y: float) -> float:
        return (self.top + y * self.height) / self.image_height

    def x_to_region(self, x: float) -> float:
        """``x``: a fraction of the image's width. Returns a fraction of the region's, outside [0, 1] if ``x`` is
        outside the region."""
        return (x * self.image_width - self.left) / self.width

    def y_to_region(self, y: float) -> float:
        return (y * self.image_height - self.top) / self.height


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A decoded image, or a region of one, whose crops are there, or will be made on the device.

    ``crops``: [num_crops, crop_size, crop_size, 3] uint8 RGB; crop 0 is the whole image, then the tiles row by row;
    None if ``pixels`` [height, width, 3] uint8 RGB are there instead. ``tiling``: rows and columns of tiles. ``key``:
    hash of the decoded pixels and the preprocessing version. ``width``, ``height``: of the upright image, or of the
    region. ``source_digest``: SHA-256 of what the caller gave, by which callers may recognise equal images.
    ``keeps_features``: the runtime keeps the features of the crops as long as the embedding, because embeddings of
    crops are read. ``region``: None for a whole image. ``crop_keys``: a content key for each distinct crop, if equal
    crops of other images may skip the tower; equal keys mean equal crops. ``adapter``: the adapter of the request, if
    it changes the vision tower. ``features``: [patches, dim] float32 or float16, the embedding that the caller sent in
    place of crops and pixels; ``made_with``: the name of the adapter that it was made with.
    """

    key: str
    crops: np.ndarray | None
    tiling: tuple[int, int]
    width: int
    height: int
    pixels: np.ndarray | None = None
    source_digest: bytes | None = None
    keeps_features: bool = False
    region: ImageRegion | None = None
    crop_keys: tuple[str, ...] | None = None
    adapter: Adapter | None = None
    features: np.ndarray | None = None
    made_with: str = ""

    @property
    def looks(self) -> tuple[PreparedImage, ...]:
        """The image alone, as that of a request that looks at it once."""
        return (self,)

    @property
    def image_size(self) -> tuple[int, int]:
        """Width and height of the whole upright image."""
        if self.region is None:
            return self.width, self.height
        return self.region.image_width, self.region.image_height

    @property
    def num_crops(self) -> int:
        """Steps to the embedding: those of all crops, or the one that takes the features."""
        rows, columns = self.tiling
        return 1 + rows * columns if self.features is None else 1

    @property
    def num_distinct(self) -> int:
        """The number of crops to encode. A single tile equals the overview and is not encoded again."""
        if self.features is not None:
            return 0
        return 1 if self.tiling == (1, 1) else self.num_crops

    def with_adapter(self, adapter: Adapter) -> PreparedImage:
        """The image as an adapter encodes it that changes the tower or the projector. It shares no embedding with the
        image, and the features of crops only if the adapter leaves the tower as it is."""
        keys = self.crop_keys
        if keys is not None and adapter.changes_tower:
            keys = tuple(f"{key}/{adapter.key}" for key in keys)
        return replace(self, key=f"{self.key}/{adapter.key}", crop_keys=keys, adapter=adapter)

    def overview(self) -> PreparedImage:
        """The image with its overview as the only crop, so that it costs one crop, and small objects may be missed.
        Results have the same coordinates. An image with a single tile is returned as it is."""
        if self.tiling == (1, 1):
            return self
        return replace(
            self,
            key=f"{self.key}/overview",
            tiling=(1, 1),
            crops=None if self.crops is None else self.crops[[0, 0]],
            crop_keys=None if self.crop_keys is None else self.crop_keys[:1],
        )

    @property
    def num_bytes(self) -> int:
        """Memory of crops, pixels and features."""
        held = (self.crops, self.pixels, self.features)
        return sum(array.nbytes for array in held if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTiles:
    """An image that a request looks at several times. ``looks``: the whole image first, if it is among them, then the
    tiles row by row."""

    looks: tuple[PreparedImage, ...]


SpatialRef: TypeAlias = tuple[float, float] | tuple[float, float, float, float]
"""A normalised point (x, y) or box (x_min, y_min, x_max, y_max)."""


def check_spatial_refs(refs: object) -> tuple[SpatialRef, ...]:
    """Validates references given as a sequence of 2- or 4-number sequences; None means none. Raises InvalidRequest.

    Arrays with a ``tolist`` method, such as numpy's, count as sequences.
    """
    refs = _plain(refs)
    if refs is None:
        return ()
    if not isinstance(refs, (list, tuple)):
        raise InvalidRequest(
            "spatial_refs", "must be a list of [x, y] or [x_min, y_min, x_max, y_max]"
        )
    checked: list[SpatialRef] = []
    for i, ref in enumerate(refs):
        checked.append(check_place(("spatial_refs", i), ref))
    return tuple(checked)


def check_place(
    field: str | FieldPath, place: object, *, lengths: Sequence[int] = (2, 4)
) -> SpatialRef:
    """Returns a point, a box, or either, as ``lengths`` says: how many numbers it may have. Raises InvalidRequest."""
    place = _plain(place)
    if not isinstance(place, (list, tuple)) or len(place) not in lengths:
        counts = " or ".join({2: "2 numbers (point)", 4: "4 (box)"}[length] for length in lengths)
        raise InvalidRequest(field, f"must have {counts}")
    for value in place:
        if not is_number(value) or not 0 <= value <= 1:
            raise InvalidRequest(field, f"{value!r} is not a number in [0, 1]")
    if len(place) == 4 and (place[0] > place[2] or place[1] > place[3]):
        raise InvalidRequest(field, "needs x_min <= x_max and y_min <= y_max")
    return tuple(float(v) for v in place)  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def spatial_tokens(refs: tuple[SpatialRef, ...]) -> tuple[Token, ...]:
    """A point becomes two coordinates; a box its centre's two and one size (moondream.md section 3)."""
    tokens: list[Token] = []
    for ref in refs:
        if len(ref) == 2:
            tokens += [Coord(ref[0]), Coord(ref[1])]
        else:
            x0, y0, x1, y1 = ref
            tokens += [Coord((x0 + x1) / 2), Coord((y0 + y1) / 2), Size(x1 - x0, y1 - y0)]
    return tuple(tokens)
