"""The images that a request holds: encoded, raw, or by id; on a background; a region of one."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import (
    FieldPath,
    InRegion,
    InvalidRequest,
    OnBackground,
)

from ...edge.failures.errors import located
from ...images.store import ImageId
from .values import known_value, meant_float

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_MAX_IMAGE_ID = 64
MAX_IMAGES = 64
"""The most that RuntimeConfig.max_images may be. The engine then applies the server's own limit."""

_BYTES_PER_PIXEL = {
    common_pb2.PIXEL_FORMAT_UNSPECIFIED: 3,
    common_pb2.PIXEL_FORMAT_RGB8: 3,
    common_pb2.PIXEL_FORMAT_RGBA8: 4,
    common_pb2.PIXEL_FORMAT_GRAY8: 1,
    common_pb2.PIXEL_FORMAT_BGR8: 3,
}

ImageSource: TypeAlias = bytes | np.ndarray | ImageId | OnBackground | InRegion
"""Encoded bytes; pixels as [height, width(, channels)] uint8 RGB(A); the id of a stored image; one of these with a
background colour; or a region of one of these."""


def at_image(path: FieldPath) -> AbstractContextManager[None]:
    """Raises an error that is in the field ``image`` with the ``path`` of the image in the request."""
    return located(lambda field: (*path, *field[1:]) if field[:1] == ("image",) else field)


class LocatedImage(NamedTuple):
    """An image with the path of its field in the request."""

    path: FieldPath
    source: ImageSource


def image_source(image: common_pb2.Image) -> ImageSource:
    """The image of a request: encoded bytes, an ImageId, or raw pixels as an array that shares the message's memory.

    If the request sets a background, the result is an OnBackground of these; with a region, an InRegion of all that.
    Raises InvalidRequest.
    """
    source = _on_background(image)
    if not image.HasField("region"):
        return source
    region = image.region
    edges = (region.x_min, region.y_min, region.x_max, region.y_max)
    return InRegion(source, tuple(map(meant_float, edges)))  # type: ignore[arg-type]


def _on_background(image: common_pb2.Image) -> bytes | np.ndarray | ImageId | OnBackground:
    source = _source(image)
    if not image.HasField("background"):
        return source
    if not _COLOUR.fullmatch(image.background):
        raise InvalidRequest(
            ("image", "background"), f"{image.background!r} must be a colour like #ffffff"
        )
    red, green, blue = bytes.fromhex(image.background[1:])
    return OnBackground(source, (red, green, blue))  # type: ignore[arg-type]  # images.store resolves ids


def _source(image: common_pb2.Image) -> bytes | np.ndarray | ImageId:
    source = image.WhichOneof("source")
    if source == "encoded":
        return image.encoded
    if source == "raw":
        return _raw_pixels(image.raw)
    if source == "image_id":
        return checked_image_id(("image", "image_id"), image.image_id)
    raise InvalidRequest("image", "holds no image: set encoded, raw or image_id")


def checked_image_id(field: str | FieldPath, text: str) -> ImageId:
    """Raises InvalidRequest, which names ``field``, if ``text`` cannot be an id."""
    if not 1 <= len(text) <= _MAX_IMAGE_ID:
        raise InvalidRequest(
            field, f"has {len(text)} characters; an image id has 1 to {_MAX_IMAGE_ID}"
        )
    return ImageId(text)


def _raw_pixels(raw: common_pb2.RawImage) -> np.ndarray:
    depth = known_value(
        ("image", "raw", "format"), raw.format, common_pb2.PixelFormat, _BYTES_PER_PIXEL
    )
    for side, length in (("width", raw.width), ("height", raw.height)):
        if length < 1:
            raise InvalidRequest(("image", "raw", side), f"must be at least 1, got {length}")
    expected = raw.width * raw.height * depth
    data = raw.data
    if len(data) != expected:
        raise InvalidRequest(
            ("image", "raw", "data"),
            f"has {len(data)} bytes; {raw.width}x{raw.height} pixels of {depth} bytes need {expected}",
        )
    pixels = np.frombuffer(data, np.uint8).reshape(raw.height, raw.width, depth)
    return pixels[:, :, ::-1] if raw.format == common_pb2.PIXEL_FORMAT_BGR8 else pixels


def required_image(request: Any) -> ImageSource:
    """The image of a request with the field ``image``. Raises InvalidRequest."""
    if not request.HasField("image"):
        raise InvalidRequest("image", "is required")
    return image_source(request.image)


def images_of(request: Any) -> list[LocatedImage]:
    """The images of a request or a frame, in the order of the prompt. Raises InvalidRequest."""
    if isinstance(request, pb.Frame):
        place: FieldPath = ("frame", "image")
        with at_image(place):
            return [LocatedImage(place, required_image(request))]
    if isinstance(request, pb.QueryRequest):
        if len(request.images) > MAX_IMAGES:
            raise InvalidRequest("images", f"are {len(request.images)}; the limit is {MAX_IMAGES}")
        found = []
        for index, image in enumerate(request.images):
            path: FieldPath = ("images", index)
            with at_image(path):
                found.append(LocatedImage(path, image_source(image)))
        return found
    if isinstance(request, pb.RunSkillRequest) and not request.HasField("image"):
        return []
    return [LocatedImage(("image",), required_image(request))]
