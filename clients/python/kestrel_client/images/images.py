"""What counts as a picture, and its way into a message.

numpy and Pillow are never imported to send: an array or a Pillow image is recognised by what it offers. Arrays and
Pillow images are sent as raw pixels, or as PNG where raw pixels would not fit into a message: losslessly either way.
"""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

from .._pb.kestrel.v1 import common_pb2
from ..errors import InvalidImageError, MissingDependencyError, RequestTooLargeError
from ..values.geometry import ImageSize
from .fetching import fetch, is_url

if TYPE_CHECKING:
    import PIL.Image


@runtime_checkable
class PixelArray(Protocol):
    """As much of a numpy array as is needed: uint8, [height, width], or [height, width, 1, 3 (RGB) or 4 (RGBA)]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def tobytes(self) -> bytes: ...


class Readable(Protocol):
    """A file that is open for reading in binary mode, such as io.BytesIO; read once, from where it stands."""

    def read(self, size: int = ..., /) -> bytes: ...


ImageInput: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | memoryview | PixelArray | PIL.Image.Image "
    "| Readable | ImageHandle"
)
"""A picture: path of a file, http(s) address (fetched here, not by the server), contents of a file, open file, array of
pixels, Pillow image, or one that the server has."""


@dataclass(frozen=True, slots=True)
class ImageHandle:
    """A picture that the server keeps: from ``put_image``, or by a result's ``image_id``. Goes wherever a picture goes.

    When the server has dropped it, calls raise NotFoundError with reason IMAGE_NOT_FOUND: put it again. Where several
    workers serve one port, the one that this client is connected to keeps it, and another may be reached later.
    """

    image_id: str
    size: ImageSize | None = None
    """Width and height in pixels of the upright picture, if known."""
    source: ImageInput | None = field(default=None, repr=False, compare=False)
    """The picture itself, as far as it is at hand; what ``draw()`` paints on."""


_ARRAY_FORMATS = {
    1: common_pb2.PIXEL_FORMAT_GRAY8,
    3: common_pb2.PIXEL_FORMAT_RGB8,
    4: common_pb2.PIXEL_FORMAT_RGBA8,
}
_PILLOW_FORMATS = {
    "L": common_pb2.PIXEL_FORMAT_GRAY8,
    "RGB": common_pb2.PIXEL_FORMAT_RGB8,
    "RGBA": common_pb2.PIXEL_FORMAT_RGBA8,
}
_ENVELOPE_BYTES = 64 * 1024
"""Room kept for what a message holds beside the picture."""
_LARGEST_DRAWN_BYTES = 64 * 1024 * 1024
"""Of what is fetched or read to be drawn on."""


def loaded(image: ImageInput, limit: int) -> ImageInput:
    """Bytes in place of an address or an open file, which can't be read twice; anything else as it is.

    Raises InvalidImageError for what can't be fetched or read, or has more than ``limit`` bytes.
    """
    if is_url(image):
        return fetch(str(image), limit)
    if isinstance(image, (str, os.PathLike, bytes, ImageHandle)) or is_pillow(image):
        return image
    read = getattr(image, "read", None)
    if not callable(read):
        return image
    try:
        data = read(limit + 1)
    except (OSError, ValueError) as error:
        raise InvalidImageError(f"can't read the file: {error}") from error
    if not isinstance(data, bytes):
        raise InvalidImageError("the file is open in text mode: open it with mode 'rb'")
    if len(data) > limit:
        raise RequestTooLargeError(len(data), limit)
    if not data:
        raise InvalidImageError("the file is empty, or was read to its end before")
    return data


def to_image(image: ImageInput, max_message_bytes: int) -> common_pb2.Image:
    """The picture as a message; waits for the file system if it is a path. A handle becomes the id that it stands for.

    Raises InvalidImageError for what is no picture, RequestTooLargeError for what would not fit into
    ``max_message_bytes`` (files are measured before they are read).
    """
    image = loaded(image, max_message_bytes)
    if isinstance(image, (str, os.PathLike)):
        return _encoded(_read(Path(image), max_message_bytes), max_message_bytes)
    if isinstance(image, (bytes, bytearray, memoryview)):
        data = bytes(image)
        if not data:
            raise InvalidImageError("the picture has no bytes")
        return _encoded(data, max_message_bytes)
    if isinstance(image, ImageHandle):
        if not image.image_id:
            raise InvalidImageError(
                "the handle has no image_id: the server did not keep the picture"
            )
        return common_pb2.Image(image_id=image.image_id)
    if is_pillow(image):
        return _from_pillow(image, max_message_bytes)
    if isinstance(image, PixelArray):
        return _from_array(image, max_message_bytes)
    raise InvalidImageError(
        f"a picture must be a path, an http(s) address, bytes, an open file, a uint8 array, a Pillow image or an "
        f"ImageHandle, not {type(image).__name__}"
    )


def to_pillow(image: ImageInput) -> PIL.Image.Image:
    """The picture upright, as a new RGB Pillow image. Raises MissingDependencyError without Pillow."""
    if isinstance(image, ImageHandle):
        if image.source is None:
            raise InvalidImageError("the picture is on the server only: pass it")
        return to_pillow(image.source)
    pillow, ops = _pillow()
    image = loaded(image, _LARGEST_DRAWN_BYTES)
    try:
        if isinstance(image, (str, os.PathLike)):
            with pillow.open(image) as opened:
                upright = ops.exif_transpose(opened)
        elif isinstance(image, (bytes, bytearray, memoryview)):
            with pillow.open(io.BytesIO(image)) as opened:
                upright = ops.exif_transpose(opened)
        elif is_pillow(image):
            upright = ops.exif_transpose(image)
        elif isinstance(image, PixelArray):
            height, width, channels = _array_shape(image)
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
            upright = pillow.frombytes(mode, (width, height), image.tobytes())
        else:
            raise InvalidImageError(f"not a picture: {type(image).__name__}")
    except OSError as error:
        raise InvalidImageError(f"Pillow can't read the picture: {error}") from error
    if upright.mode.startswith("I;16"):
        upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    # Always a copy: what is painted on it does not reach the caller's picture.
    rgb: PIL.Image.Image = upright.convert("RGB")
    return rgb


def is_pillow(image: object) -> TypeGuard[PIL.Image.Image]:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError(
            "this needs Pillow: pip install 'kestrel-client[images]'"
        ) from error
    return Image, ImageOps


def _encoded(data: bytes, limit: int) -> common_pb2.Image:
    """A file as it is; a BMP, which servers don't decode, as PNG where Pillow can read it."""
    if data.startswith(b"BM"):
        try:
            pillow, _ = _pillow()
            with pillow.open(io.BytesIO(data), formats=["BMP"]) as opened:
                return _png(opened, len(data), limit)
        except (MissingDependencyError, OSError, SyntaxError, ValueError):
            pass  # The server says which formats it takes.
    return common_pb2.Image(encoded=data)


def _read(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise RequestTooLargeError(size, limit)
        data = path.read_bytes()
    except OSError as error:
        raise InvalidImageError(f"can't read {path}: {error.strerror or error}") from error
    if not data:
        raise InvalidImageError(f"{path} is empty")
    return data


def _from_array(array: PixelArray, limit: int) -> common_pb2.Image:
    height, width, channels = _array_shape(array)
    size = height * width * channels
    if size + _ENVELOPE_BYTES > limit:
        try:
            return _png(to_pillow(array), size, limit)
        except MissingDependencyError as error:
            raise RequestTooLargeError(size, limit) from error
    raw = common_pb2.RawImage(
        data=array.tobytes(), width=width, height=height, format=_ARRAY_FORMATS[channels]
    )
    return common_pb2.Image(raw=raw)


def _array_shape(array: PixelArray) -> tuple[int, int, int]:
    shape = tuple(int(n) for n in array.shape)
    if len(shape) == 2:
        shape = (*shape, 1)
    if str(array.dtype) != "uint8" or len(shape) != 3 or shape[2] not in _ARRAY_FORMATS:
        raise InvalidImageError(
            "an array must be uint8 of shape [height, width] or [height, width, 1, 3 or 4], "
            f"not {array.dtype} of shape {list(array.shape)}"
        )
    if 0 in shape:
        raise InvalidImageError(f"the array is empty: shape {list(array.shape)}")
    return shape


def _from_pillow(image: Any, limit: int) -> common_pb2.Image:
    _, ops = _pillow()
    upright = ops.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # The server reduces 16 bit to 8 as it does for files; Pillow's own conversion would clip.
        return _png(upright, 2 * upright.width * upright.height, limit)
    if upright.mode not in _PILLOW_FORMATS:
        has_alpha = upright.mode in ("LA", "PA", "La", "RGBa") or "transparency" in upright.info
        upright = upright.convert("RGBA" if has_alpha else "RGB")
    size = upright.width * upright.height * len(upright.getbands())
    if size + _ENVELOPE_BYTES > limit:
        return _png(upright, size, limit)
    raw = common_pb2.RawImage(
        data=upright.tobytes(),
        width=upright.width,
        height=upright.height,
        format=_PILLOW_FORMATS[upright.mode],
    )
    return common_pb2.Image(raw=raw)


def _png(image: Any, raw_size: int, limit: int) -> common_pb2.Image:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    if buffer.tell() > limit:
        raise RequestTooLargeError(min(raw_size, buffer.tell()), limit)
    return common_pb2.Image(encoded=buffer.getvalue())
