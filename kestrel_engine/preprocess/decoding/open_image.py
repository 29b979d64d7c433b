"""Converts any accepted image to upright 8-bit RGB pixels. Owns formats, colours, limits and the settings of libvips.

Importing this module changes libvips for the whole process:

- Only the loaders of _LOADERS may run. All others (SVG, PDF, ImageMagick, raw, CSV, ...) are blocked inside libvips.
- libvips' operation cache is off, because it would keep images in memory after their request.
- pyvips logs errors only, unless its logger has a level: callers' images cause its warnings.
- libvips' own concurrency is 1. Pool and crops.py use several threads.
- No thread of libvips remains, so that a process may fork after the import (processes/).

libvips opens all images but BMP (bmp.py) and plain JPEGs (plain_jpeg.py), in one sequential pass into memory: it writes
temporary files only for random access.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import pyvips
from pyvips import ffi, vips_lib

from ...config.image_limits import ImageLimits
from ...errors import ImageDecodeError, ImageTooLargeError, InvalidRequest, UnsupportedImageError
from . import amplifiers, bmp, plain_jpeg, tiff, unsupported
from .bmp import BmpImage, on_background
from .costs import FIELD, KINDS, PIXELS, Cost, Kind, check_size, cost_of
from .decoded_image import Allocate, DecodedImage, new_bytes
from .heif_probes import HEIF_PROBES
from .plain_jpeg import PlainJpeg, plain_size

if TYPE_CHECKING:
    import PIL.Image

Colour: TypeAlias = tuple[int, int, int]
"""Red, green, blue, each from 0 to 255."""


@dataclass(frozen=True, slots=True, eq=False)
class OnBackground:
    """An image whose transparent parts are drawn on a colour. Without a background, alpha is dropped."""

    source: ImageSource
    colour: Colour


ImageSource: TypeAlias = (
    "bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO | pyvips.Image | PIL.Image.Image "
    "| np.ndarray | OnBackground"
)
"""Encoded bytes, a path, a file that is open for reading in binary mode, a pyvips.Image, a Pillow image, uint8 pixels
([height, width, 3 or 4 or 1] or [height, width]), or any of these on a background. A request also takes an InRegion,
InCrops or a Tiled image (looks.py)."""

_LOADERS = {
    "JPEG": "VipsForeignLoadJpeg",
    "PNG": "VipsForeignLoadPng",
    "WebP": "VipsForeignLoadWebp",
    "TIFF": "VipsForeignLoadTiff",
    "GIF": "VipsForeignLoadNsgif",
    "HEIF": "VipsForeignLoadHeif",
}
"""The allow-list: format to libvips class. A class covers loading from a file, a buffer and a source."""

_HEIF_CODECS = {"av1": "AVIF", "hevc": "HEIC"}
"""Compression inside a HEIF container to the name of the format; others (JPEG, H.264, ...) are refused."""

_MAGIC = (
    ("JPEG", b"\xff\xd8\xff"),
    ("PNG", b"\x89PNG\r\n"),
    ("TIFF", b"II*\0"),
    ("TIFF", b"MM\0*"),
    ("GIF", b"GIF8"),
)
"""Beginnings of files that libvips may not recognise if they are damaged. Such files are reported as broken, unless
unsupported.py knows them."""

_CONVERTED_SPACES = frozenset(
    {"cmyk", "lab", "labs", "labq", "lch", "cmc", "oklab", "oklch", "xyz", "yxy", "scrgb", "hsv"}
)
"""Colour spaces that libvips converts to sRGB (CMYK by the embedded ICC profile, else by its built-in one). RGB and
grey values are used as stored, whatever profile is embedded, as in the reference."""

_ROWS_AT_ONCE = 64
"""Rows that are decoded at once; a multiple of the height of JPEG's blocks."""

_BYTES_OF_FORMAT = {"uchar": 1, "char": 1, "ushort": 2, "short": 2, "uint": 4, "int": 4, "float": 4}
"""Bytes of a channel by libvips' name of its type. Other types have 8 bytes, or 16 and are refused."""

_MAX_BANDS = 5
"""CMYK with alpha. An image with more channels is no photograph, and each channel takes time to decompress."""


def _configure_libvips() -> tuple[str, ...]:
    """Applies the settings in the module's docstring. Returns the formats that this libvips can decode."""
    pyvips.cache_set_max(0)
    pyvips.concurrency_set(1)
    pyvips.block_untrusted_set(True)
    pyvips.operation_block_set("VipsForeignLoad", True)
    present = [name for name, cls in _LOADERS.items() if pyvips.type_from_name(cls)]
    for name in present:
        pyvips.operation_block_set(_LOADERS[name], False)
    log = logging.getLogger("pyvips")
    if log.level == logging.NOTSET:
        log.setLevel(logging.ERROR)
    if "HEIF" in present:
        present.remove("HEIF")
        present += [name for name, probe in HEIF_PROBES.items() if _decodes(probe)]
    return tuple(present)


def _decodes(data: bytes) -> bool:
    try:
        image = pyvips.Image.new_from_buffer(data, "", access="sequential", fail_on="error")
        pyvips.Region.new(image).fetch(0, 0, 1, 1)
    except pyvips.Error:
        return False
    return True


IMAGE_FORMATS = (*_configure_libvips(), *(["BMP"] if bmp.AVAILABLE else []))
"""Names of the accepted formats, for messages and for the model service."""


def open_image(source: ImageSource, limits: ImageLimits) -> DecodedImage:
    """Reads, checks and decodes one image. Blocks. Raises the errors of ``begin_image`` and of the decoding."""
    image = begin_image(source, limits)
    image.decode()
    return image


def begin_image(source: ImageSource, limits: ImageLimits) -> DecodedImage:
    """Reads and checks one image. Blocks. The ``decode`` of the result decodes the image.

    If an image has several frames or pages, the first one is used. EXIF orientation is applied. Alpha is dropped,
    unless an OnBackground gives a colour. Grey becomes three equal channels. 16-bit values keep their upper 8 bits. An
    array is not copied if it is [height, width, 3] and contiguous: don't change it while the request runs.

    Raises InvalidRequest (wrong type, dtype or shape, or an unreadable path), UnsupportedImageError,
    ImageTooLargeError, and ImageDecodeError (empty or broken; of ``decode`` also truncated).
    """
    background = source.colour if isinstance(source, OnBackground) else None
    payload = read_source(source, limits)
    if isinstance(payload, np.ndarray):
        return DecodedImage(payload)
    return read_header(payload, limits, background).begin()


def read_source(source: ImageSource, limits: ImageLimits) -> bytes | np.ndarray:
    """Returns the encoded bytes of ``source``, after a check of their number only. For an array, a pyvips.Image or a
    Pillow image, returns the pixels, [height, width, 3] uint8, on the background. Blocks. Raises as ``begin_image``."""
    background = None
    if isinstance(source, OnBackground):
        background = source.colour
        source = source.source
    if isinstance(source, np.ndarray):
        return _array_pixels(source, limits, background)
    if _is_pillow(source):
        return _pillow_pixels(source, limits, background)
    if isinstance(source, pyvips.Image):
        image = _checked(source, limits)
        try:
            decoded = _decoded(_upright(image, background), "pyvips.Image")
        except (pyvips.Error, UnicodeDecodeError):
            raise _broken("pyvips.Image") from None
        decoded.decode()
        return decoded.pixels
    if isinstance(source, (str, os.PathLike)):
        return _read_file(source, limits)
    if isinstance(source, (bytes, bytearray, memoryview)):
        _check_bytes(memoryview(source).nbytes, limits)
        return source if isinstance(source, bytes) else bytes(source)
    if callable(getattr(source, "read", None)):
        return _read_open_file(source, limits)
    raise InvalidRequest(
        FIELD,
        "must be encoded bytes, a path, an open file, a pyvips.Image, a Pillow image or a uint8 array, "
        f"not {type(source).__name__}",
    )


def _read_open_file(file: Any, limits: ImageLimits) -> bytes:
    try:
        data = file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        raise InvalidRequest(FIELD, f"cannot read the open file: {error}") from error
    if not isinstance(data, bytes):
        raise InvalidRequest(FIELD, "is a file in text mode: open it with mode 'rb'")
    _check_bytes(len(data), limits)
    return data


def _is_pillow(source: object) -> bool:
    module = sys.modules.get("PIL.Image")  # If it is not imported, no Pillow image exists.
    return module is not None and isinstance(source, module.Image)


def _pillow_pixels(image: Any, limits: ImageLimits, background: Colour | None) -> np.ndarray:
    """Returns the upright pixels of the current frame, [height, width, 3] uint8."""
    from PIL import ImageOps

    check_size(image.width, image.height, limits, PIXELS)
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith(
            "I;16"
        ):  # Keep the upper 8 bits, as for files. Pillow would clip.
            upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        pixels = np.asarray(upright.convert("RGBA" if upright.has_transparency_data else "RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageDecodeError(FIELD, f"is a Pillow image that can't be decoded: {error}") from None
    return _array_pixels(pixels, limits, background)


def _read_file(path: str | os.PathLike[str], limits: ImageLimits) -> bytes:
    """Returns the file's bytes. libvips never gets the name, so its option syntax in a name has no effect."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(FIELD, f"{os.fspath(path)!r} is not a regular file")
        _check_bytes(status.st_size, limits)
        with open(path, "rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, (InvalidRequest, ImageTooLargeError)):
            raise
        reason = error.strerror if isinstance(error, OSError) else "not a valid path"
        raise InvalidRequest(
            FIELD, f"cannot read {os.fspath(path)!r}: {reason or 'input/output error'}"
        ) from error


def read_header(data: bytes, limits: ImageLimits, background: Colour | None = None) -> Undecoded:
    """Reads and checks the header. Raises UnsupportedImageError, ImageTooLargeError, ImageDecodeError."""
    if bmp.AVAILABLE and data.startswith(bmp.MAGIC):
        return BmpImage(data, limits, background)
    if (size := plain_size(data)) is not None:

        def by_libvips(pixels: np.ndarray) -> Iterator[int]:
            return EncodedImage(data, limits, background).decoding(pixels)

        return PlainJpeg(data, size, limits, background, by_libvips)
    return EncodedImage(data, limits, background)


class EncodedImage:
    """An image in a format of libvips, whose header is read and checked. ``cost``: the cost of decoding the rest."""

    def __init__(self, data: bytes, limits: ImageLimits, background: Colour | None = None) -> None:
        """``background``: see OnBackground. Raises UnsupportedImageError, ImageTooLargeError, ImageDecodeError."""
        if not data:
            raise ImageDecodeError(FIELD, "is empty: 0 bytes")
        name = _sniff(data)
        if (too_much := amplifiers.excess(data, name)) is not None:
            raise ImageTooLargeError(FIELD, f"is a {name} that has {too_much}")
        if (form := unsupported.what(data, name)) is not None:
            raise UnsupportedImageError(
                FIELD,
                f"is {form}, which can't be decoded; save it as 8-bit RGB, for example as PNG",
            )
        try:
            # fail_on="error" refuses truncated and damaged data, but not harmless oddities such as unknown TIFF tags.
            # The WebP loader can't read sequentially. Without memory=True it would write large images to a temporary
            # file.
            image = pyvips.Image.new_from_buffer(
                data, "", access="sequential", fail_on="error", memory=name == "WebP"
            )
            if name == "HEIF":
                codec = str(_metadata(image, "heif-compression"))
                name = _HEIF_CODECS.get(codec, f"HEIF with {codec} inside")
                if name not in IMAGE_FORMATS:
                    raise _unsupported(f"is {name}, which this installation can't decode")
            kind = _kind(image, name)
            image = _checked(image, limits, kind)
            self._image = tiff.with_colours(image, data) if name == "TIFF" else image
        except (pyvips.Error, UnicodeDecodeError):
            raise _broken(name) from None
        self._name, self._background, self._data = name, background, data
        self._is_plain = (
            kind.name == "JPEG"
            and self._image.bands in (1, 3)
            and self._image.format == "uchar"
            and not _is_turned(self._image)
        )
        self.cost: Cost = cost_of(
            kind,
            self._image.width,
            self._image.height,
            len(data),
            scans=amplifiers.num_scans(data) if kind.ns_per_scan else 1,
            pixel_bytes=self._image.bands * _BYTES_OF_FORMAT.get(self._image.format, 8),
            turned=_is_turned(self._image),
        )

    @property
    def upright_size(self) -> tuple[int, int]:
        width, height = self._image.width, self._image.height
        is_on_its_side = _metadata(self._image, "orientation") in range(5, 9)
        return (height, width) if is_on_its_side else (width, height)

    def begin(self, allocate: Allocate = new_bytes) -> DecodedImage:
        """Returns the image, not yet decoded, with pixels in memory of ``allocate``. If EXIF orientation turns the
        image, decodes it now. Raises UnsupportedImageError, ImageDecodeError."""
        identity = (self._data, bytes(self._background or ()))
        try:
            image = _upright(self._image, self._background)
        except (pyvips.Error, UnicodeDecodeError):
            raise _broken(self._name) from None
        if self._is_plain and plain_jpeg.AVAILABLE:
            pixels = allocate((image.height, image.width, 3))
            rows = plain_jpeg.decoding(
                self._data, pixels, lambda into: _decoding(image, into, "JPEG")
            )
            return DecodedImage(pixels, rows, identity)
        return _decoded(image, self._name, allocate, identity)

    def decoding(self, pixels: np.ndarray) -> Iterator[int]:
        """Decodes the image by libvips into ``pixels``, [height, width, 3]. Raises as `begin`."""
        if (self._image.height, self._image.width, 3) != pixels.shape:
            raise _broken(self._name)
        return _decoding(_upright(self._image, self._background), pixels, self._name)


Undecoded: TypeAlias = EncodedImage | BmpImage | PlainJpeg
"""An image whose header is read and checked, with its ``cost``. ``begin`` returns the image, still to be decoded."""


def _kind(image: pyvips.Image, name: str) -> Kind:
    if _metadata(image, "interlaced"):
        name = {"JPEG": "progressive JPEG", "PNG": "interlaced PNG"}.get(name, name)
    return KINDS[name]


def _sniff(data: bytes) -> str:
    """Returns the key of _LOADERS for the content of ``data``. Raises UnsupportedImageError."""
    loader = vips_lib.vips_foreign_find_load_buffer(ffi.from_buffer(data), len(data))
    if loader != ffi.NULL:
        found = ffi.string(loader).decode()
        for name, cls in _LOADERS.items():
            if found == f"{cls}Buffer":
                return name
    vips_lib.vips_error_clear()
    for name, magic in _MAGIC:
        if data.startswith(magic):
            return name
    raise _unsupported("is not in a supported format")


def _checked(image: pyvips.Image, limits: ImageLimits, kind: Kind = PIXELS) -> pyvips.Image:
    """Returns the first frame, of a valid size. Raises pyvips.Error, ImageDecodeError, ImageTooLargeError."""
    # libvips stacks all loaded frames vertically.
    height = image.get_page_height()
    if height != image.height:
        image = image.crop(0, 0, image.width, height)
    check_size(image.width, image.height, limits, kind)
    return image


def _upright(image: pyvips.Image, background: Colour | None) -> pyvips.Image:
    """Returns ``image`` as upright 3 bands of uint8 sRGB. Raises pyvips.Error, UnsupportedImageError."""
    turned = _is_turned(image)
    image = _rgb8(image, background)
    # Turning needs random access, which a sequential source does not offer, so decode first.
    return image.copy_memory().autorot() if turned else image


def _is_turned(image: pyvips.Image) -> bool:
    return _metadata(image, "orientation") in range(2, 9)


def _decoded(
    image: pyvips.Image,
    name: str,
    allocate: Allocate = new_bytes,
    identity: tuple[bytes, ...] | None = None,
) -> DecodedImage:
    """Returns the pixels of an upright image, [height, width, 3] uint8, which are not yet computed."""
    pixels = allocate((image.height, image.width, 3))
    return DecodedImage(pixels, _decoding(image, pixels, name), identity)


def _decoding(image: pyvips.Image, pixels: np.ndarray, name: str) -> Iterator[int]:
    """Computes ``image`` into ``pixels``. Yields the number of finished rows. libvips' own writers would start two
    threads, one to decode and one to write. A region computes in the calling thread."""
    try:
        region = pyvips.Region.new(image)
        for top in range(0, image.height, _ROWS_AT_ONCE):
            part = pixels[top : top + _ROWS_AT_ONCE]
            found = region.fetch(0, top, image.width, len(part))
            part[...] = np.frombuffer(found, np.uint8).reshape(part.shape)
            yield top + len(part)
    except (pyvips.Error, UnicodeDecodeError):
        raise _broken(name) from None


def _rgb8(image: pyvips.Image, background: Colour | None) -> pyvips.Image:
    """Returns ``image`` as 3 bands of uint8 sRGB, on ``background`` if it has alpha. Values of types other than uint8
    and uint16 are clipped to 0..255."""
    if image.bands > _MAX_BANDS or image.format in ("complex", "dpcomplex"):
        raise UnsupportedImageError(
            FIELD,
            f"has {image.bands} channels of type {image.format}; it must have 1 to {_MAX_BANDS} of a real type",
        )
    if image.interpretation in _CONVERTED_SPACES:
        image = image.colourspace("srgb")
    if image.format == "ushort":
        image = image.cast("uchar", shift=True)
    elif image.format != "uchar":
        image = image.cast("uchar")
    if background is not None and image.bands in (2, 4):
        if image.bands == 2:
            grey = image.extract_band(0)
            image = grey.bandjoin([grey, grey, image.extract_band(1)])
        # As `on_background`; libvips' own flatten would truncate.
        alpha = image.extract_band(3)
        mixed = image.extract_band(0, n=3) * alpha + (255 - alpha) * list(background)
        return (mixed / 255).rint().cast("uchar")
    if image.bands < 3:
        grey = image.extract_band(0) if image.bands == 2 else image
        return grey.bandjoin([grey, grey])
    return image.extract_band(0, n=3) if image.bands > 3 else image


def _array_pixels(array: np.ndarray, limits: ImageLimits, background: Colour | None) -> np.ndarray:
    if array.dtype != np.uint8:
        raise InvalidRequest(FIELD, f"array must have dtype uint8, not {array.dtype}")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise InvalidRequest(
            FIELD,
            "array must have shape [height, width, 3], with 1 or 4 channels, or [height, width]; "
            f"it has {list(array.shape)}",
        )
    height, width, channels = array.shape
    check_size(width, height, limits, PIXELS)
    if channels == 1:
        return np.repeat(array, 3, axis=2)
    if channels == 4 and background is not None:
        return on_background(array, background)
    return np.ascontiguousarray(array[:, :, :3])


def _check_bytes(size: int, limits: ImageLimits) -> None:
    if size > limits.max_bytes:
        raise ImageTooLargeError(
            FIELD,
            f"has {size} bytes, the limit is {limits.max_bytes}",
            value=size,
            limit=limits.max_bytes,
        )


def _metadata(image: pyvips.Image, name: str) -> Any:
    """Returns a header field's value; None if the header has no such field."""
    return image.get(name) if image.get_typeof(name) else None


def _unsupported(what: str) -> UnsupportedImageError:
    return UnsupportedImageError(FIELD, f"{what}; supported are {', '.join(IMAGE_FORMATS)}")


def _broken(name: str) -> ImageDecodeError:
    """Returns the error without libvips' message: all threads share its buffer, so it may concern another request."""
    vips_lib.vips_error_clear()
    return ImageDecodeError(FIELD, f"is broken or truncated {name} data")
