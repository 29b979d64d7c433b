"""ImageFeatures: the embedding of an image in place of its pixels. Owns what features must be, and what needs pixels.

`Embed` gave the features. Each request brings its own, so no request can change what another sees. Their key is a hash
of the numbers in the namespace of the caller.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.image_limits import ImageLimits
from ..errors import FieldPath, InvalidRequest
from ..types.adapter import Adapter
from ..types.model_config import VisionConfig
from ..types.requests import PreparedImage
from .crops import KEY_LENGTH
from .decoding.costs import PIXELS, check_size
from .decoding.open_image import OnBackground
from .looks import MAX_CROPS, REGION, InCrops, InRegion, Mirrored, Tiled
from .prepared_cache import in_namespace

if TYPE_CHECKING:
    from ..skills.base import SkillRequest

FEATURES = ("image", "features")
MOST_RMS = 1000.0
"""Largest root mean square of a vector. The released projector's are near 1. Up to this limit no number exceeds
float16."""

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<f2"), 4: np.dtype("<f4")}
_NEEDS_PIXELS: dict[type, FieldPath] = {
    Tiled: ("tiles",),
    InRegion: REGION,
    InCrops: MAX_CROPS,
    OnBackground: ("image", "background"),
    Mirrored: ("accurate",),
}


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """``data``: the vectors, row by row, float32 or float16, little endian: the number of bytes tells which. ``rows``:
    one for each patch. ``width``, ``height``: of the upright image in pixels, which results refer to. ``adapter``: the
    name of the adapter whose tower made them; "": the model's own tower."""

    data: bytes
    rows: int
    dimensions: int
    width: int
    height: int
    adapter: str = ""


def features_of(source: Any) -> ImageFeatures | None:
    """The features that a request has in place of an image; None for an image. Raises InvalidRequest for a part of an
    image, which only pixels have."""
    field: FieldPath | None = None
    while (wrapper := _NEEDS_PIXELS.get(type(source))) is not None:
        field, source = field or wrapper, source.source
    if not isinstance(source, ImageFeatures):
        return None
    if field is not None:
        raise InvalidRequest(field, "needs the image's pixels; send the image, or leave it out")
    return source


def prepared_features(
    features: ImageFeatures, vision: VisionConfig, limits: ImageLimits, namespace: str
) -> PreparedImage:
    """Checks features, which are not copied. Blocks for milliseconds. Raises InvalidRequest, ImageTooLargeError."""
    for name, value, needed in (
        ("rows", features.rows, vision.grid**2),
        ("dimensions", features.dimensions, vision.proj_out_dim),
    ):
        if value != needed:
            raise InvalidRequest(
                (*FEATURES, name),
                f"is {value}; this model has {vision.grid**2} rows of {vision.proj_out_dim} dimensions",
                value=value,
                limit=needed,
            )
    for name, value in (("width", features.width), ("height", features.height)):
        if value < 1:
            raise InvalidRequest((*FEATURES, name), f"is {value}; must be at least 1")
    check_size(features.width, features.height, limits, PIXELS)
    count = features.rows * features.dimensions
    dtype = _DTYPES.get(len(features.data) // count if len(features.data) % count == 0 else 0)
    if dtype is None:
        raise InvalidRequest(
            (*FEATURES, "data"),
            f"has {len(features.data)} bytes; {features.rows} x {features.dimensions} numbers are {2 * count} in "
            f"float16 or {4 * count} in float32",
        )
    vectors = np.frombuffer(features.data, dtype).reshape(features.rows, features.dimensions)
    _check_numbers(vectors)
    digest = hashlib.sha256(repr(("features", dtype.str, features.adapter)).encode())
    digest.update(features.data)
    image = PreparedImage(
        key=digest.hexdigest()[:KEY_LENGTH],
        crops=None,
        tiling=(1, 1),
        width=features.width,
        height=features.height,
        features=vectors,
        made_with=features.adapter,
    )
    return in_namespace(image, namespace)


def _check_numbers(vectors: np.ndarray) -> None:
    """Raises InvalidRequest."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(vectors, dtype=np.float32).mean(axis=1, dtype=np.float64)
    bad = np.flatnonzero(~((squares > 0) & (squares <= MOST_RMS**2)))
    if not len(bad):
        return
    row = int(bad[0])
    if not np.isfinite(vectors[row]).all():
        raise InvalidRequest((*FEATURES, "data"), f"row {row} has a number that is not finite")
    rms = float(np.sqrt(squares[row]))
    raise InvalidRequest(
        (*FEATURES, "data"),
        f"row {row} has a root mean square of {rms:.4g}; it must be above 0 and at most {MOST_RMS:g}",
        value=rms,
        limit=MOST_RMS,
    )


def check_features(
    image: PreparedImage, skill: SkillRequest, adapter: Adapter | None, at: FieldPath
) -> None:
    """Checks what a request asks of features in place of an image. ``at``: the path. Raises InvalidRequest."""
    if image.features is None:
        return
    if skill.pixels_field is not None:
        is_all = skill.pixels_field == "image"
        raise InvalidRequest(
            at if is_all else skill.pixels_field,
            "needs the image's pixels, which its features do not hold; "
            f"{'' if is_all else 'turn it off, or '}send the image",
        )
    used, made_with = "" if adapter is None else adapter.name, image.made_with
    if made_with in (used, used.partition("@")[0]) and (made_with or not used):
        return
    if made_with or (adapter is not None and adapter.changes_vision):
        with_what = f"the adapter {used!r}" if used else "no adapter"
        made_by = f"the adapter {image.made_with!r}" if image.made_with else "no adapter"
        raise InvalidRequest(
            (*at, "features", "adapter"),
            f"was made with {made_by}, and the request has {with_what}; embed the image with the request's adapter",
        )
