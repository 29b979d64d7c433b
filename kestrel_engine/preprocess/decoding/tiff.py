"""The tags of a TIFF that say what its samples mean: which TIFFs libvips reads with the right colours.

libvips takes samples whose meaning it does not know for RGB or grey. So only the combinations of tags whose pixels are
known to be right are accepted. The tests compare them with the TIFF 6.0 specification.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
import pyvips

_MOST_ENTRIES = 4096
"""As in libtiff."""
_MOST_VALUES = 8
_TYPES = {1: "B", 3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 16: "Q"}
"""TIFF's number of a type to the characters of struct. A rational is two numbers."""

_ONE = {
    254: "subfile",
    259: "compression",
    262: "photometric",
    277: "samples",
    284: "planar",
    332: "ink_set",
}
_SEVERAL = {258: "bits", 338: "extra_samples", 339: "formats", 530: "subsampling"}
_REAL = {529: ("luma", 3), 532: ("black_white", 6)}
"""Tags to fields of TiffTags, and the number of values."""
_TAGS = {322, *_ONE, *_SEVERAL, *_REAL}

_JPEG = 7
_COMPRESSIONS = frozenset({1, 2, 3, 4, 5, _JPEG, 8, 32773, 32946, 50001})

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR, _CIELAB = 0, 1, 2, 3, 5, 6, 8
_COLOURS = {
    _WHITE_IS_ZERO: ("grey (WhiteIsZero)", 1, (1, 2, 4, 8, 16)),
    _BLACK_IS_ZERO: ("grey (BlackIsZero)", 1, (1, 2, 4, 8, 16)),
    _RGB: ("RGB", 3, (8, 16)),
    _PALETTE: ("palette", 1, (1, 2, 4, 8)),
    _CMYK: ("CMYK", 4, (8, 16)),
    _YCBCR: ("YCbCr", 3, (8,)),
    _CIELAB: ("CIELab", 3, (16,)),
}
"""Accepted values of PhotometricInterpretation: name, samples of a pixel without the extra ones, bits of a sample."""
_MOST_SAMPLES = 5
"""CMYK with alpha. Each channel takes time to decompress."""
_UNSIGNED, _SIGNED, _VOID = 1, 2, 4
_SAMPLE_FORMATS = {_SIGNED: "signed", 3: "floating-point", 5: "complex", 6: "complex"}
"""Neither TIFF nor a habit says which of these values are black and white."""

_PARTS = {1: "a reduced copy, as of raw photographs", 4: "a mask"}
"""Bits of NewSubfileType: pages that stand for the image and are not it."""

_ALPHA = (1, 2)
"""Values of ExtraSamples: premultiplied alpha, which libvips divides out, and plain alpha."""


class TiffTags(NamedTuple):
    """Tags of the first directory, by TIFF's names. Sequences hold the file's values, at most _MOST_VALUES."""

    photometric: int
    subfile: int = 0
    compression: int = 1
    bits: tuple[float, ...] = (1,)
    samples: int = 1
    planar: int = 1
    tiled: bool = False
    ink_set: int = 1
    extra_samples: tuple[float, ...] | None = None
    formats: tuple[float, ...] = (_UNSIGNED,)
    luma: tuple[float, ...] = (0.299, 0.587, 0.114)
    subsampling: tuple[float, ...] = (2, 2)
    black_white: tuple[float, ...] = (0, 255, 128, 255, 128, 255)


def read_tags(data: bytes) -> TiffTags | None:
    """Returns the tags of the first directory of a TIFF or BigTIFF; None if it is broken: a directory beyond the file,
    one without PhotometricInterpretation, or 0 / 0 or an infinite value where a whole number belongs."""
    fields: dict[str, Any] = {}
    try:
        found = _first_directory(data)
        fields |= {name: int(found[tag][0]) for tag, name in _ONE.items() if tag in found}
    except (struct.error, OverflowError, ValueError):
        return None
    if 262 not in found:
        return None
    fields["tiled"] = 322 in found
    fields |= {name: found[tag] for tag, name in _SEVERAL.items() if tag in found}
    fields |= {name: found[tag] for tag, (name, n) in _REAL.items() if len(found.get(tag, ())) == n}
    return TiffTags(**fields)


def _first_directory(data: bytes) -> dict[int, tuple[float, ...]]:
    """Returns tag to values, for values of _TYPES."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    offset, count, inline = ("Q", "Q", 8) if big else ("I", "H", 4)
    (at,) = struct.unpack_from(order + offset, data, 8 if big else 4)
    (number,) = struct.unpack_from(order + count, data, at)
    at += struct.calcsize(order + count)
    found: dict[int, tuple[float, ...]] = {}
    for _ in range(min(number, _MOST_ENTRIES)):
        tag, kind, length = struct.unpack_from(f"{order}HH{offset}", data, at)
        at += struct.calcsize(f"{order}HH{offset}")
        if tag in _TAGS and kind in _TYPES and length and tag not in found:
            code = order + _TYPES[kind] * min(length, _MOST_VALUES)
            fits = length * struct.calcsize(order + _TYPES[kind]) <= inline
            where = at if fits else struct.unpack_from(order + offset, data, at)[0]
            values = struct.unpack_from(code, data, where)
            if kind == 5:
                pairs = zip(values[::2], values[1::2], strict=True)
                values = tuple(a / b if b else math.nan for a, b in pairs)
            found[tag] = values
        at += inline
    return found


def unsupported(tags: TiffTags) -> str | None:
    """Describes a TIFF that can't be decoded, or only to false colours, as words after "is"; None if it can."""
    for bit, words in _PARTS.items():
        if tags.subfile & bit:
            return f"a TIFF whose first page is {words} (NewSubfileType {tags.subfile})"
    compression, photometric = tags.compression, tags.photometric
    if compression not in _COMPRESSIONS:
        return f"a TIFF of the compression {compression}"
    if photometric not in _COLOURS:
        return f"a TIFF of the PhotometricInterpretation {photometric}"
    name, colours, depths = _COLOURS[photometric]
    if tags.samples > _MOST_SAMPLES:
        return f"a TIFF with {tags.samples} channels, more than {_MOST_SAMPLES}"
    formats = (
        set(tags.formats) - {_UNSIGNED, _VOID} - ({_SIGNED} if photometric == _CIELAB else set())
    )
    if formats:
        number = int(min(formats))
        words = _SAMPLE_FORMATS.get(number, "unknown")
        return f"a TIFF with {words} samples of {tags.bits[0]} bits (SampleFormat {number})"
    if not set(tags.bits) <= set(depths) or len(set(tags.bits)) > 1:
        return f"a {name} TIFF with samples of {', '.join(map(str, sorted(set(tags.bits))))} bits"
    if photometric == _CMYK and (tags.ink_set != 1 or tags.samples < colours):
        return f"a TIFF of inks that are not CMYK (InkSet {tags.ink_set}, {tags.samples} samples)"
    if photometric in (_YCBCR, _CIELAB) and tags.samples > colours:
        return f"a {name} TIFF with {tags.samples - colours} extra samples"
    if tags.planar != 1 and tags.samples > 1 and (tags.tiled or photometric == _YCBCR):
        return f"a {'tiled ' * tags.tiled}{name} TIFF with separate planes (PlanarConfiguration 2)"
    return None


def with_colours(image: pyvips.Image, data: bytes) -> pyvips.Image:
    """Returns libvips' ``image`` of the supported TIFF ``data`` with its colour channels, perhaps alpha, and no other
    channels. Raises pyvips.Error for unreadable tags, and for impossible values in the tags of YCbCr."""
    if (tags := read_tags(data)) is None:
        raise pyvips.Error("unreadable tags")
    _, colours, _ = _COLOURS[tags.photometric]
    if tags.photometric == _YCBCR:
        # libtiff converts where it reads JPEG data or subsampled data.
        plain = tags.compression != _JPEG and tags.subsampling[:2] == (1, 1)
        return _from_ycbcr(image, tags) if plain else image
    extra = tags.extra_samples
    alpha = tags.samples > colours and (not extra or extra[0] in _ALPHA)
    kept = (
        colours + alpha + image.bands - tags.samples
    )  # A palette of colours gives three channels.
    return image.extract_band(0, n=kept) if 0 < kept < image.bands else image


def _from_ycbcr(image: pyvips.Image, tags: TiffTags) -> pyvips.Image:
    """TIFF 6.0, section 21: the full range of each component, by ReferenceBlackWhite, then YCbCrCoefficients."""
    red, green, blue = np.array(tags.luma)
    black, white = np.array(tags.black_white[::2]), np.array(tags.black_white[1::2])
    with np.errstate(all="ignore"):
        scale = np.array([255.0, 127.0, 127.0]) / (white - black)
        to_rgb = np.array(
            [
                [1, 0, 2 - 2 * red],
                [1, -blue * (2 - 2 * blue) / green, -red * (2 - 2 * red) / green],
                [1, 2 - 2 * blue, 0],
            ]
        )
        matrix = to_rgb * scale
        offset = -matrix @ black
    if not (np.isfinite(matrix).all() and np.isfinite(offset).all()):
        raise pyvips.Error("impossible YCbCrCoefficients or ReferenceBlackWhite")
    rgb = image.recomb(pyvips.Image.new_from_array(matrix.tolist())) + offset.tolist()
    return rgb.rint().cast("uchar").copy(interpretation="srgb")
