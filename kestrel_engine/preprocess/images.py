"""Any accepted picture to upright 8-bit RGB pixels. Owns formats, colours, limits, libvips settings.

Knows no model, crop or cache. Importing this module changes libvips for the whole process:

- Only the loaders of FORMATS may run; all others (SVG, PDF, ImageMagick, raw, CSV, ...) are blocked inside libvips
  itself, so that no sniffing of content can reach them.
- libvips' operation cache is off: it would keep pictures in memory after their request.
- pyvips logs errors only, unless its logger has a level: its warnings are about callers' pictures, a line or more each.
- libvips' own concurrency is 1: the pool decodes several pictures side by side, and decoding one JPEG or PNG does not
  split. Resizing does, and has a hint of its own (crops.py).

Pictures are read in one sequential pass into memory. libvips writes temporary files only for random access to large
pictures, which never happens here: no picture reaches the disk.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pyvips
from pyvips import ffi, vips_lib

from ..config import ImageLimits
from ..errors import (
    ImageDecodeError,
    ImageError,
    ImageTooLargeError,
    InvalidRequest,
    UnsupportedImageError,
)
from . import amplifiers
from .decoded_image import DecodedImage
from .heif_probes import HEIF_PROBES

ImageSource: TypeAlias = (
    "bytes | bytearray | memoryview | str | os.PathLike[str] | pyvips.Image | np.ndarray"
)
"""Encoded bytes, a path, a pyvips.Image, or uint8 pixels: [height, width, 3 or 4 or 1] or [height, width]."""

FIELD = "image"
"""The request's field that errors name."""

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
"""Beginnings of files too damaged for libvips to recognise: better called broken than unsupported."""

_CONVERTED_SPACES = frozenset(
    {"cmyk", "lab", "labs", "labq", "lch", "cmc", "oklab", "oklch", "xyz", "yxy", "scrgb", "hsv"}
)
"""Colour spaces that libvips converts to sRGB (CMYK by the embedded ICC profile, else its built-in one). RGB and grey
are taken as stored, whatever profile is embedded: the reference does so."""

_ROWS_AT_ONCE = 64
"""Decoded at once; a multiple of the height of JPEG's blocks."""

_MAX_BANDS = 5
"""CMYK with alpha. More are no photograph, and each costs time to decompress."""


def _configure_libvips() -> tuple[str, ...]:
    """Applies the settings in the module's docstring; returns the formats that this libvips can decode."""
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
        pyvips.Image.new_from_buffer(data, "", access="sequential", fail_on="error").avg()
    except pyvips.Error:
        return False
    return True


FORMATS = _configure_libvips()
"""Names of the formats that are taken, for messages and for the model service."""


def open_image(source: ImageSource, limits: ImageLimits) -> DecodedImage:
    """``begin_image`` and all of the decoding; raises what either raises."""
    image = begin_image(source, limits)
    image.decode()
    return image


def begin_image(source: ImageSource, limits: ImageLimits) -> DecodedImage:
    """Reads and checks one picture; blocks, so call it in a worker thread. Its ``decode`` decodes it.

    Of several frames or pages the first is taken. EXIF orientation is applied; alpha is dropped, not composited; grey
    is replicated; 16 bits keep their upper 8. Limits are checked on the header, before a pixel is decoded. An array is
    not copied if it is [height, width, 3] and contiguous: don't change it while the request runs.

    Raises InvalidRequest (not a picture at all: wrong type, dtype or shape, unreadable path), UnsupportedImageError,
    ImageTooLargeError, ImageDecodeError (empty or broken); ``decode`` raises ImageDecodeError (broken or truncated).
    """
    if isinstance(source, np.ndarray):
        return DecodedImage(_array_pixels(source, limits))
    if isinstance(source, pyvips.Image):
        return _vips_image(source, limits, "pyvips.Image")
    if isinstance(source, (str, os.PathLike)):
        source = _read_file(source, limits)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _encoded_image(source, limits)
    raise InvalidRequest(
        FIELD,
        f"must be encoded bytes, a path, a pyvips.Image or a uint8 array, not {type(source).__name__}",
    )


def num_pixels(source: ImageSource) -> int:
    """Width times height by the header; blocks for some 0.2 ms. 0 for what ``open_image`` will refuse, and for a path,
    which holds no memory while it waits. Raises nothing."""
    if isinstance(source, np.ndarray):
        return int(source.shape[0] * source.shape[1]) if source.ndim >= 2 else 0
    if isinstance(source, pyvips.Image):
        return int(source.width * source.height)
    if not isinstance(source, (bytes, bytearray, memoryview)):
        return 0
    data = bytes(source)
    try:
        if amplifiers.excess(data, _sniff(data)) is not None:
            return 0
        image = pyvips.Image.new_from_buffer(data, "", access="sequential")
    except (pyvips.Error, UnicodeDecodeError, ImageError):
        return 0
    return int(image.width * image.height)


def _read_file(path: str | os.PathLike[str], limits: ImageLimits) -> bytes:
    """The file's bytes. libvips is never given the name, so names with its option syntax mean nothing."""
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


def _encoded_image(source: bytes | bytearray | memoryview, limits: ImageLimits) -> DecodedImage:
    _check_bytes(memoryview(source).nbytes, limits)
    data = source if isinstance(source, bytes) else bytes(source)
    if not data:
        raise ImageDecodeError(FIELD, "is empty: 0 bytes")
    name = _sniff(data)
    if (too_much := amplifiers.excess(data, name)) is not None:
        raise ImageTooLargeError(FIELD, f"is a {name} that has {too_much}")
    try:
        # fail_on="error" refuses truncated and damaged data, but not harmless oddities such as unknown TIFF tags. The
        # WebP loader can't read in sequence; without memory=True it would put large pictures into a temporary file.
        image = pyvips.Image.new_from_buffer(
            data, "", access="sequential", fail_on="error", memory=name == "WebP"
        )
    except (pyvips.Error, UnicodeDecodeError):
        raise _broken(name) from None
    if name == "HEIF":
        codec = str(_metadata(image, "heif-compression"))
        name = _HEIF_CODECS.get(codec, f"HEIF with {codec} inside")
        if name not in FORMATS:
            raise _unsupported(f"is {name}, which this installation can't decode")
    return _vips_image(image, limits, name)


def _sniff(data: bytes) -> str:
    """The key of _LOADERS for ``data``, by content. Raises UnsupportedImageError or ImageDecodeError."""
    loader = vips_lib.vips_foreign_find_load_buffer(ffi.from_buffer(data), len(data))
    if loader != ffi.NULL:
        found = ffi.string(loader).decode()
        for name, cls in _LOADERS.items():
            if found == f"{cls}Buffer":
                return name
    vips_lib.vips_error_clear()
    for name, magic in _MAGIC:
        if data.startswith(magic):
            raise _broken(name)
    raise _unsupported("is not in a supported format")


def _vips_image(image: pyvips.Image, limits: ImageLimits, name: str) -> DecodedImage:
    """The pixels of a libvips image, [height, width, 3] uint8, still to be computed."""
    try:
        # All frames loaded at once stand below one another.
        height = image.get_page_height()
        if height != image.height:
            image = image.crop(0, 0, image.width, height)
        _check_size(image.width, image.height, limits)
        image = _rgb8(image)
        if _metadata(image, "orientation") in range(2, 9):
            # Turning needs random access, which a sequential source does not give: decode first.
            image = image.copy_memory().autorot()
        pixels = np.empty((image.height, image.width, 3), np.uint8)
    except (pyvips.Error, UnicodeDecodeError):
        raise _broken(name) from None
    return DecodedImage(pixels, _decoding(image, pixels, name))


def _decoding(image: pyvips.Image, pixels: np.ndarray, name: str) -> Iterator[int]:
    """Computes ``image`` into ``pixels``; gives the number of rows that are there. libvips' own writers would start
    threads, one to decode and one to write; a region computes in the calling thread."""
    try:
        region = pyvips.Region.new(image)
        for top in range(0, image.height, _ROWS_AT_ONCE):
            part = pixels[top : top + _ROWS_AT_ONCE]
            found = region.fetch(0, top, image.width, len(part))
            part[...] = np.frombuffer(found, np.uint8).reshape(part.shape)
            yield top + len(part)
    except (pyvips.Error, UnicodeDecodeError):
        raise _broken(name) from None


def _rgb8(image: pyvips.Image) -> pyvips.Image:
    """``image`` as 3 bands of uint8 sRGB. Other types than uint8 and uint16 are taken as 0..255 and clipped."""
    if image.bands > _MAX_BANDS or image.format in ("complex", "dpcomplex"):
        raise UnsupportedImageError(
            FIELD,
            f"has {image.bands} channels of type {image.format}; taken are 1 to {_MAX_BANDS} real ones",
        )
    if image.interpretation in _CONVERTED_SPACES:
        image = image.colourspace("srgb")
    if image.format == "ushort":
        image = image.cast("uchar", shift=True)
    elif image.format != "uchar":
        image = image.cast("uchar")
    if image.bands < 3:
        grey = image.extract_band(0) if image.bands == 2 else image
        return grey.bandjoin([grey, grey])
    return image.extract_band(0, n=3) if image.bands > 3 else image


def _array_pixels(array: np.ndarray, limits: ImageLimits) -> np.ndarray:
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
    _check_size(width, height, limits)
    if channels == 1:
        return np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array[:, :, :3])


def _check_bytes(size: int, limits: ImageLimits) -> None:
    if size > limits.max_bytes:
        raise ImageTooLargeError(FIELD, f"has {size} bytes, the limit is {limits.max_bytes}")


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    """Raises ImageDecodeError for an empty picture, ImageTooLargeError beyond the limits."""
    if width < 1 or height < 1:
        raise ImageDecodeError(FIELD, f"is empty: {width}x{height} pixels")
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(
            FIELD,
            f"has {width}x{height} = {width * height} pixels, the limit is {limits.max_pixels}",
        )
    ratio = max(width, height) / min(width, height)
    if ratio > limits.max_aspect_ratio:
        raise ImageTooLargeError(
            FIELD,
            f"of {width}x{height} has sides of {ratio:.4g}:1, the limit is {limits.max_aspect_ratio:g}:1",
        )


def _metadata(image: pyvips.Image, name: str) -> Any:
    """A header field's value, None if there is none."""
    return image.get(name) if image.get_typeof(name) else None


def _unsupported(what: str) -> UnsupportedImageError:
    return UnsupportedImageError(FIELD, f"{what}; supported are {', '.join(FORMATS)}")


def _broken(name: str) -> ImageDecodeError:
    """libvips' own words are left out: all threads share its error buffer, so they may speak of another request's
    picture."""
    vips_lib.vips_error_clear()
    return ImageDecodeError(FIELD, f"is broken or truncated {name} data")
