"""Valid images of an accepted format in a form that can't be decoded. They are not broken, and their errors say so."""

from __future__ import annotations

from . import tiff
from .amplifiers import jpeg_markers

_DECODED_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA})
"""Baseline, extended, progressive, lossless, and with arithmetic coding."""
_OTHER_BITS = (*range(2, 8), *range(9, 17))
"""Precisions that the JPEG standards allow, but for 8."""
_FRAMES = {
    0xC5: "hierarchical",
    0xC6: "hierarchical",
    0xC7: "hierarchical",
    0xCB: "arithmetic lossless",
    0xCD: "hierarchical",
    0xCE: "hierarchical",
    0xCF: "hierarchical",
    0xF7: "JPEG-LS",
}


def what(data: bytes, name: str) -> str | None:
    """Describes why a valid image of format ``name`` can't be decoded, as words after "is"; None if it can."""
    if name == "JPEG":
        return _jpeg(data)
    if name == "PNG" and data[12:16] == b"CgBI":
        return "a PNG in Apple's form for iPhones (CgBI)"
    if name == "TIFF" and (tags := tiff.read_tags(data)) is not None:
        return tiff.unsupported(tags)
    return None


def _jpeg(data: bytes) -> str | None:
    for marker, at in jpeg_markers(data):
        if marker in _FRAMES:
            return f"a JPEG of the kind {_FRAMES[marker]}"
        if marker in _DECODED_FRAMES:
            bits = data[at + 2] if at + 2 < len(data) else 8
            return f"a JPEG of {bits} bits a sample" if bits in _OTHER_BITS else None
    return None
