"""Messages that arrive compressed: unpacked here, not by gRPC's core, which would do it without asking for room.

A gzip message begins with 0x1f, which no protobuf message does (field 3 of a wire type that doesn't exist); what gRPC
calls deflate begins with the two bytes of a zlib header, which would be field 15, and no request has one.
"""

from __future__ import annotations

import asyncio
import zlib

from kestrel_engine import InvalidRequest

MAX_RATIO = 32
"""Unpacked bytes for one that came: text and drawings of few colours take less; what takes more is a bomb."""
_FREE_BYTES = 64 * 1024
"""Small messages may unpack to this much, whatever their ratio."""
_INLINE_BYTES = 4096
"""At most so much is unpacked on the event loop: a millisecond."""
_GZIP, _DEFLATE = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_EITHER = 32 + zlib.MAX_WBITS
"""zlib's word for: gzip or zlib, by the header."""


def is_compressed(data: bytes) -> bool:
    """Whether a message that arrived is packed by gzip or deflate."""
    return data[:2] == _GZIP or data[:2] in _DEFLATE


async def inflated(data: bytes, max_bytes: int) -> bytes:
    """Unpacks ``data``. One byte more than ``max_bytes`` says that the message is too large. Raises InvalidRequest."""
    if len(data) <= _INLINE_BYTES:
        return _inflated(data, max_bytes)
    return await asyncio.to_thread(_inflated, data, max_bytes)


def _inflated(data: bytes, max_bytes: int) -> bytes:
    most = max(_FREE_BYTES, MAX_RATIO * len(data))
    unpacker = zlib.decompressobj(_EITHER)
    try:
        message = unpacker.decompress(data, min(most, max_bytes) + 1)
    except zlib.error:
        raise InvalidRequest("", "the compressed message can't be unpacked") from None
    if len(message) > max_bytes:
        return message
    if len(message) > most:
        raise InvalidRequest(
            "",
            f"the message has {len(data)} bytes and unpacks to more than {most}, the limit is "
            f"{MAX_RATIO} for each; send it without compression",
        )
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest("", "the compressed message is cut short or goes on after its end")
    return message
