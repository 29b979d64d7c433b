"""BMP, which the packaged libvips can't decode: read by Pillow's reader of this one format, without its sniffing.

Only uncompressed BMP is accepted. Its size follows from the header, so a short file can't ask for much work.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np

from ...config.image_limits import ImageLimits
from ...errors import ImageDecodeError, UnsupportedImageError
from .costs import FIELD, KINDS, Cost, check_size, cost_of
from .decoded_image import Allocate, DecodedImage, new_bytes

AVAILABLE = find_spec("PIL") is not None
MAGIC = b"BM"

_ROWS_AT_ONCE = 64
_ERRORS = (OSError, SyntaxError, ValueError, OverflowError, IndexError, KeyError)
"""What Pillow's reader raises for malformed files."""
_UNSUPPORTED = ("Unsupported BMP compression", "Unsupported BMP bitfields")
"""What Pillow's reader says of valid files, such as JPEG or PNG inside of a BMP."""


def load_reader() -> None:
    """Imports all that Pillow imports when it reads its first BMP. A confined process can't open the modules."""
    if AVAILABLE:
        header = struct.pack(
            "<2sIIIIiiHHIIiiII", MAGIC, 58, 0, 54, 40, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0
        )
        BmpImage(header + bytes(4), ImageLimits()).begin().decode()


class BmpImage:
    """A BMP whose header is read and checked. ``cost``: the resources that decoding may take."""

    def __init__(
        self, data: bytes, limits: ImageLimits, background: tuple[int, int, int] | None = None
    ) -> None:
        """``background``: see OnBackground. Raises UnsupportedImageError, ImageTooLargeError, ImageDecodeError."""
        from PIL.BmpImagePlugin import BmpImageFile

        try:
            self._image = BmpImageFile(io.BytesIO(data))
        except _ERRORS as error:
            if str(error).startswith(_UNSUPPORTED):
                raise UnsupportedImageError(
                    FIELD, f"can't be decoded ({error}); save it as PNG"
                ) from None
            raise _broken() from None
        check_size(self._image.width, self._image.height, limits, KINDS["BMP"])
        codec, _, offset, arguments = self._image.tile[0]
        if codec != "raw":
            raise UnsupportedImageError(
                FIELD, "is a compressed BMP; save it uncompressed, or as PNG"
            )
        assert isinstance(arguments, tuple), "mode, bytes of a row, direction"
        if offset + int(arguments[1]) * self._image.height > len(data):
            raise _broken()
        self._background, self._data = background, data
        self.cost: Cost = cost_of(KINDS["BMP"], self._image.width, self._image.height, len(data))

    @property
    def upright_size(self) -> tuple[int, int]:
        return self._image.width, self._image.height

    def begin(self, allocate: Allocate = new_bytes) -> DecodedImage:
        """The pixels in memory of ``allocate``, still to be decoded."""
        pixels = allocate((self._image.height, self._image.width, 3))
        identity = (self._data, bytes(self._background or ()))
        return DecodedImage(pixels, self._decoding(pixels), identity)

    def _decoding(self, pixels: np.ndarray) -> Iterator[int]:
        """Writes ``pixels`` from top to bottom. Yields the number of rows that are written."""
        try:
            self._image.load()
        except _ERRORS:
            raise _broken() from None
        mode = "RGBA" if self._image.mode == "RGBA" else "RGB"
        for top in range(0, len(pixels), _ROWS_AT_ONCE):
            part = pixels[top : top + _ROWS_AT_ONCE]
            area = (0, top, self._image.width, top + len(part))
            rows = np.asarray(self._image.crop(area).convert(mode))
            part[...] = (
                rows[:, :, :3]
                if self._background is None
                else on_background(rows, self._background)
            )
            yield top + len(part)


def on_background(pixels: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """``pixels``, [height, width, 3 or 4] uint8, on a colour: [height, width, 3] uint8."""
    if pixels.shape[2] == 3:
        return pixels
    alpha = pixels[:, :, 3:].astype(np.float32) / 255
    mixed = pixels[:, :, :3] * alpha + np.array(background, np.float32) * (1 - alpha)
    return np.round(mixed).astype(np.uint8)


def _broken() -> ImageDecodeError:
    return ImageDecodeError(FIELD, "is broken or truncated BMP data")
