"""ImageFeatures: the embedding of an image, which calls take in place of the image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._pb.kestrel.v1 import common_pb2
from ..errors import InvalidImageError, RequestTooLargeError
from ..geometry import ImageSize

_BYTES = {"float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What ``embed(image, pooling="none")`` returned of the whole image: a result is taken as it is, and its
    ``features`` are these. Another device may run the tower, and the server the rest of the same model.

    Raises InvalidImageError if the bytes are not rows times dimensions numbers in float32 or float16.
    """

    data: bytes = field(repr=False)
    """The numbers, float32 or float16, little endian, one row for each patch."""
    rows: int
    dimensions: int
    size: ImageSize
    """Width and height of the upright image in pixels, which results refer to."""
    adapter: str = ""
    """The adapter that the image was embedded with; requests that apply it must name it too."""

    def __post_init__(self) -> None:
        count = self.rows * self.dimensions
        if count < 1 or len(self.data) not in (2 * count, 4 * count):
            raise InvalidImageError(
                f"{len(self.data)} bytes are not {self.rows} x {self.dimensions} numbers in float32 or float16"
            )

    @classmethod
    def from_array(cls, array: Any, size: tuple[int, int], adapter: str = "") -> ImageFeatures:
        """``array``: [patches, dimensions] of numpy, float32 or float16. ``size``: width and height of the image.
        Raises InvalidImageError."""
        shape: Any = getattr(array, "shape", ())
        dtype = str(getattr(array, "dtype", ""))
        if len(shape) != 2 or dtype not in _BYTES:
            raise InvalidImageError(
                "features must be a float32 or float16 array of shape [patches, dimensions], "
                f"not {dtype or type(array).__name__} of shape {list(shape)}"
            )
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        rows, dimensions = shape
        return cls(little.tobytes(), rows, dimensions, ImageSize(*size), adapter)


def features_of(image: object) -> ImageFeatures | None:
    """The features that ``image`` is or has; None for an image. Raises InvalidImageError."""
    found = image if isinstance(image, ImageFeatures) else getattr(image, "features", None)
    return found if isinstance(found, ImageFeatures) else None


def to_features(features: ImageFeatures, limit: int) -> common_pb2.Image:
    """The message. Raises InvalidImageError and RequestTooLargeError."""
    if len(features.data) > limit:
        raise RequestTooLargeError(len(features.data), limit)
    width, height = features.size
    try:
        message = common_pb2.ImageFeatures(
            data=features.data,
            rows=features.rows,
            dimensions=features.dimensions,
            width=width,
            height=height,
            adapter=features.adapter or None,
        )
    except (TypeError, ValueError) as error:
        raise InvalidImageError(f"features: {error}") from error
    return common_pb2.Image(features=message)
