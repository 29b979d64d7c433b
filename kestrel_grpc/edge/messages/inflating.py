"""Decompresses messages. gRPC's core would do it without reserving memory first.

The first bytes identify a compressed message. gzip begins with 0x1f, which is invalid in protobuf (field 3 with an
unknown wire type). gRPC's deflate begins with a zlib header of two bytes, which would be field 15; no request has it.
"""

from __future__ import annotations

import asyncio
import zlib

from kestrel_engine import InvalidRequest

MAX_RATIO = 32
"""Limit on decompressed bytes per received byte. Text and simple drawings stay below it; decompression bombs do not."""
_FREE_BYTES = 64 * 1024
"""A message may decompress to this many bytes with any ratio."""
_INLINE_BYTES = 4096
"""Messages of up to this many bytes are decompressed on the event loop, which takes at most a millisecond."""
_GZIP, _DEFLATE = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_EITHER = 32 + zlib.MAX_WBITS
"""zlib's value for: detect gzip or zlib by the header."""


def is_compressed(data: bytes) -> bool:
    """Whether a received message is compressed with gzip or deflate."""
    return data[:2] == _GZIP or data[:2] in _DEFLATE


async def inflated(data: bytes, max_bytes: int) -> bytes:
    """Decompresses ``data``, up to ``max_bytes + 1`` bytes. A result longer than ``max_bytes`` is too large. Raises
    InvalidRequest."""
    if len(data) <= _INLINE_BYTES:
        return _inflated(data, max_bytes)
    return await asyncio.to_thread(_inflated, data, max_bytes)


def _inflated(data: bytes, max_bytes: int) -> bytes:
    most = max(_FREE_BYTES, MAX_RATIO * len(data))
    unpacker = zlib.decompressobj(_EITHER)
    try:
        message = unpacker.decompress(data, min(most, max_bytes) + 1)
    except zlib.error:
        raise InvalidRequest("", "the compressed message cannot be decompressed") from None
    if len(message) > max_bytes:
        return message
    if len(message) > most:
        raise InvalidRequest(
            "",
            f"the message has {len(data)} bytes and decompresses to more than {most}; the limit is "
            f"{MAX_RATIO} times its size; send it without compression",
        )
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest("", "the compressed message is incomplete, or data follows its end")
    return message
