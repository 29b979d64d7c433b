"""Writes TIFFs with any tags, also those that no library writes."""

import struct

import numpy as np

WIDTH, HEIGHT = 16, 12
_SHORT, _LONG, _RATIONAL = 3, 4, 5
_LONGS = (256, 257, 273, 278, 279)


def tiff(pixel: list[float], dtype: str = "u1", order: str = "<", **tags: object) -> bytes:
    """A TIFF of one colour: ``pixel`` holds its stored samples. ``tags``: "t262" and so on, each a number, a list of
    numbers, or a list of fractions. Samples of 8 bits or more of ``dtype``."""
    stored = np.dtype(order + dtype)
    data = np.tile(np.array(pixel, stored), HEIGHT * WIDTH).tobytes()
    return tiff_of(
        data, order, **{"t258": [stored.itemsize * 8] * len(pixel), "t277": len(pixel)} | tags
    )


def tiff_of(data: bytes, order: str = "<", **tags: object) -> bytes:
    """A TIFF with one strip, whose bytes are ``data``."""
    wanted = {256: WIDTH, 257: HEIGHT, 259: 1, 273: 0, 278: HEIGHT, 279: len(data)}
    wanted |= {int(name[1:]): value for name, value in tags.items()}
    packed = [_packed(tag, value, order) for tag, value in sorted(wanted.items())]
    behind = 8 + 2 + 12 * len(packed) + 4
    start = behind + sum(len(raw) for *_, raw in packed if len(raw) > 4)
    entries, large = b"", b""
    for tag, kind, count, raw in packed:
        if tag == 273:
            raw = struct.pack(order + "I", start)
        if len(raw) > 4:
            large, raw = large + raw, struct.pack(order + "I", behind + len(large))
        entries += struct.pack(order + "HHI", tag, kind, count) + raw.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    head = magic + struct.pack(order + "IH", 8, len(packed))
    return head + entries + bytes(4) + large + data


def _packed(tag: int, value: object, order: str) -> tuple[int, int, int, bytes]:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], tuple):
        return tag, _RATIONAL, len(values), b"".join(struct.pack(order + "2I", *v) for v in values)
    code, kind = ("I", _LONG) if tag in _LONGS else ("H", _SHORT)
    return tag, kind, len(values), struct.pack(f"{order}{len(values)}{code}", *values)
