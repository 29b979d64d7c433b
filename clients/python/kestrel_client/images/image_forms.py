"""Converts the supported forms of an image to a message.

Sending imports neither numpy nor Pillow: an array is recognised by its attributes. Arrays and Pillow images are sent
losslessly: as raw pixels, or as PNG if the raw pixels do not fit into a message.
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
from ..geometry import ImageSize
from .features import ImageFeatures, features_of, to_features
from .fetching import fetch, is_url

if TYPE_CHECKING:
    import PIL.Image

    from ..values.embeddings import EmbedResult


@runtime_checkable
class PixelArray(Protocol):
    """The required part of numpy's array: uint8, [height, width], or [height, width, 1, 3 (RGB) or 4 (RGBA)]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def tobytes(self) -> bytes: ...


class Readable(Protocol):
    """A file that is open for reading in binary mode, such as io.BytesIO. It is read once, from its position."""

    def read(self, size: int = ..., /) -> bytes: ...


EncodedImage: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path or an http(s) address of a file, or its contents."""
# One literal: pyright reads no type in a text of several.
NoPixels: TypeAlias = "ImageHandle | ImageFeatures | EmbedResult"
"""What stands for an image that the client need not have."""
ImageInput: TypeAlias = "EncodedImage | PixelArray | PIL.Image.Image | Readable | NoPixels"
"""An image: path of a file, http(s) address (the client fetches it), contents of a file, open file, array of pixels,
Pillow image, the handle of an image that the server stores, or in place of an image its features."""


Pixels: TypeAlias = bytes | memoryview
"""The bytes of raw pixels, row by row."""


@dataclass(frozen=True, slots=True)
class ImageHandle:
    """An image that the server stores: from ``put_image``, or made from a result's ``image_id``. All methods take
    it in place of an image.

    If the server does not know the id, because it dropped the image or another server answers, the client puts the
    image again. If the client does not have the image, calls raise NotFoundError with reason IMAGE_NOT_FOUND.
    """

    image_id: str
    size: ImageSize | None = None
    """Width and height in pixels of the upright image, if known."""
    source: ImageInput | None = field(default=None, repr=False, compare=False)
    """The image itself, if the client has it: ``draw()`` draws on it, and the client can put it again."""


_FORMATS = {
    1: common_pb2.PIXEL_FORMAT_GRAY8,
    3: common_pb2.PIXEL_FORMAT_RGB8,
    4: common_pb2.PIXEL_FORMAT_RGBA8,
}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Formats and Pillow's modes, by the number of channels."""
_ENVELOPE_BYTES = 64 * 1024
"""Space reserved for the rest of a message."""
NO_LIMIT = 2**63
_READ_BYTES = 1 << 20
_LARGEST_DRAWN_BYTES = 64 * 1024 * 1024
"""Limit of a file that is fetched or read to draw on it."""


def loaded(image: ImageInput, limit: int) -> ImageInput:
    """Reads an address or an open file, which can be read only once, into bytes. Returns other forms unchanged.

    Raises InvalidImageError if it can't be read, and RequestTooLargeError for a file of more than ``limit`` bytes.
    """
    if is_url(image):
        return fetch(str(image), limit)
    if (features := features_of(image)) is not None:
        return features
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
        raise InvalidImageError("the file is empty, or its position is at its end")
    return data


def to_image(
    image: ImageInput, max_message_bytes: int, apart: list[Pixels] | None = None
) -> common_pb2.Image:
    """Returns the message of an image. Reads files and fetches addresses. The message of a handle contains its id.
    ``apart``: takes raw pixels in place of the message, without a copy if the array is contiguous.

    Raises InvalidImageError for an unsupported value, and RequestTooLargeError for an image that does not fit into
    ``max_message_bytes`` (a file's size is checked before it is read).
    """
    image = loaded(image, max_message_bytes)
    if isinstance(image, ImageFeatures):
        return to_features(image, max_message_bytes)
    if isinstance(image, (str, os.PathLike)):
        return common_pb2.Image(encoded=_read(Path(image), max_message_bytes))
    if isinstance(image, (bytes, bytearray, memoryview)):
        data = bytes(image)
        if not data:
            raise InvalidImageError("the image is empty: it has 0 bytes")
        return common_pb2.Image(encoded=data)
    if isinstance(image, ImageHandle):
        if not image.image_id:
            raise InvalidImageError(
                "the handle has no image_id: the server did not store the image"
            )
        return common_pb2.Image(image_id=image.image_id)
    if is_pillow(image):
        return _from_pillow(image, max_message_bytes, apart)
    if isinstance(image, PixelArray):
        return _from_array(image, max_message_bytes, apart)
    raise InvalidImageError(
        "an image must be a path, an http(s) address, bytes, an open file, a uint8 array, a Pillow image, "
        f"ImageFeatures or an ImageHandle, not {type(image).__name__}"
    )


def to_pillow(image: ImageInput) -> PIL.Image.Image:
    """Returns the upright image as a new RGB Pillow image. Raises MissingDependencyError without Pillow."""
    if isinstance(image, ImageHandle):
        if image.source is None:
            raise InvalidImageError(
                "the client does not have the image, only the server: pass it to draw() or save()"
            )
        return to_pillow(image.source)
    if features_of(image) is not None:
        raise InvalidImageError(
            "features hold no pixels: pass the image itself to draw() or save()"
        )
    pillow, ops = _pillow()
    image = loaded(image, _LARGEST_DRAWN_BYTES)
    try:
        if isinstance(image, (bytes, bytearray, memoryview)):
            image = io.BytesIO(image)
        if isinstance(image, (str, os.PathLike, io.BytesIO)):
            with pillow.open(image) as opened:
                upright = ops.exif_transpose(opened)
        elif is_pillow(image):
            upright = ops.exif_transpose(image)
        elif isinstance(image, PixelArray):
            height, width, channels = _array_shape(image)
            upright = pillow.frombytes(_MODES[channels], (width, height), image.tobytes())
        else:
            raise InvalidImageError(f"{type(image).__name__} is not an image")
    except OSError as error:
        raise InvalidImageError(f"Pillow can't read the image: {error}") from error
    if upright.mode.startswith("I;16"):
        upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    # Always a copy, so that drawing on it does not change the caller's image.
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
            "this needs Pillow: pip install './clients/python[images]'"
        ) from error
    return Image, ImageOps


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = b""
            # A pipe or a device has no size, and may have no end.
            while size <= limit and (more := file.read(max(size - len(data), _READ_BYTES))):
                data += more
                size = max(size, len(data))
        if size > limit:
            raise RequestTooLargeError(size, limit)
    except OSError as error:
        raise InvalidImageError(f"can't read {path}: {error.strerror or error}") from error
    if not data:
        raise InvalidImageError(f"{path} is empty")
    return data


def _from_array(array: PixelArray, limit: int, apart: list[Pixels] | None) -> common_pb2.Image:
    height, width, channels = _array_shape(array)
    size = height * width * channels
    if size + _ENVELOPE_BYTES > limit:
        try:
            return _png(to_pillow(array), size, limit)
        except MissingDependencyError as error:
            raise RequestTooLargeError(size, limit) from error
    return _raw(array, width, height, channels, apart)


def _array_shape(array: PixelArray) -> tuple[int, int, int]:
    shape = tuple(int(n) for n in array.shape)
    if len(shape) == 2:
        shape = (*shape, 1)
    if str(array.dtype) != "uint8" or len(shape) != 3 or shape[2] not in _FORMATS:
        raise InvalidImageError(
            "an array must be uint8 of shape [height, width] or [height, width, 1, 3 or 4], "
            f"not {array.dtype} of shape {list(array.shape)}"
        )
    if 0 in shape:
        raise InvalidImageError(f"the array is empty: shape {list(array.shape)}")
    return shape


def _from_pillow(image: Any, limit: int, apart: list[Pixels] | None) -> common_pb2.Image:
    _, ops = _pillow()
    upright = ops.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        # The server reduces 16 bits to 8 as it does for files. Pillow's conversion would clip the values.
        return _png(upright, 2 * upright.width * upright.height, limit)
    if upright.mode not in _MODES.values():
        has_alpha = upright.mode in ("LA", "PA", "La", "RGBa") or "transparency" in upright.info
        upright = upright.convert("RGBA" if has_alpha else "RGB")
    channels = len(upright.getbands())
    size = upright.width * upright.height * channels
    if size + _ENVELOPE_BYTES > limit:
        return _png(upright, size, limit)
    return _raw(upright, upright.width, upright.height, channels, apart)


def _raw(
    pixels: Any, width: int, height: int, channels: int, apart: list[Pixels] | None
) -> common_pb2.Image:
    raw = common_pb2.RawImage(width=width, height=height, format=_FORMATS[channels])
    image = common_pb2.Image(raw=raw)
    if apart is None:
        image.raw.data = (
            pixels.tobytes()
        )  # In the constructor, they would be copied three more times.
    else:
        apart.append(_bytes_of(pixels))
    return image


def _bytes_of(pixels: Any) -> Pixels:
    try:
        view = memoryview(pixels)
    except TypeError:  # Pillow's images, and arrays on a device.
        return bytes(pixels.tobytes())
    # tobytes() fills the masked pixels of numpy's masked arrays.
    is_plain = view.c_contiguous and not hasattr(pixels, "mask")
    return view.cast("B") if is_plain else bytes(pixels.tobytes())


def _png(image: Any, raw_size: int, limit: int) -> common_pb2.Image:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    if buffer.tell() > limit:
        raise RequestTooLargeError(min(raw_size, buffer.tell()), limit)
    return common_pb2.Image(encoded=buffer.getvalue())
