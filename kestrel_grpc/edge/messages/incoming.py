"""Incoming: reads the messages of one call one by one, decompresses, checks and decodes them.

gRPC receives a message only when a handler reads it. Until then, a client can send only as much as a stream's window
holds, 64 KiB. So every method is registered as one with a stream of requests. Its handler reads the first message after
the caller is identified and memory for the largest message is reserved (security/admission/message_room.py).

gRPC's core would decompress a message without reserving memory first. The first bytes identify a compressed message.
gzip begins with 0x1f, which is invalid in protobuf (field 3 with an unknown wire type). gRPC's deflate begins with a
zlib header of two bytes, which would be field 15; no request has it.

The fields of a message are counted on its bytes before it is decoded. A field of three bytes becomes an object of some
400 bytes once it is read, so a message of 32 MiB could take 4 GB, and the event loop for minutes. The large fields of
our messages are bytes or text, which count as one.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from kestrel_engine import InvalidRequest

from ...security.admission.admission import MessageTooLarge
from ...security.admission.message_room import COPIES, Hold, MessageLimits
from ...security.connections.connection_guard import ConnectionUse
from ..calls.call import CallLimit
from ..failures.errors import NoMessage

EOF: Any = cast(Any, grpc.aio).EOF
_A_MOMENT_S = 0.05
"""Seconds to wait after the end of a call's messages, because a cancellation arrives a moment later."""
MAX_RATIO = 32
"""Limit on decompressed bytes per received byte. Text and simple drawings stay below it; decompression bombs do not."""
_FREE_BYTES = 64 * 1024
"""A message may decompress to this many bytes with any ratio."""
_INLINE_BYTES = 4096
"""Messages of up to this many bytes are decompressed on the event loop, which takes at most a millisecond."""
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
"""How data of gzip and deflate begin."""
_EITHER = 32 + zlib.MAX_WBITS
"""zlib's value for: detect gzip or zlib by the header."""
MOST_FIELDS = 20_000
"""The fields of a message and of all messages in it, unknown ones included. Each number of a list counts as one. A
prompt of 4,096 positions has 2,048 points, of four fields each."""

_EIGHT_BYTES = frozenset(
    {FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64}
)
_FOUR_BYTES = frozenset(
    {FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32}
)
_AS_ONE = frozenset({FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING})

_VARINT, _FIXED_64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED_32 = range(6)


class Reading:
    """How the messages of a method are read. ``decode``: converts bytes to a message. ``pulls``: limits the time in
    which a message must arrive. ``copies``: of each message's bytes in memory."""

    def __init__(
        self,
        decode: Callable[[bytes], Any],
        limits: MessageLimits,
        pulls: CallLimit,
        copies: int = COPIES,
    ) -> None:
        self.decode, self.limits, self.pulls, self.copies = decode, limits, pulls, copies
        # Generated code decodes with a method of the message's class.
        self.descriptor = getattr(getattr(decode, "__self__", None), "DESCRIPTOR", None)
        self.reserved_bytes = limits.reserved_for(copies)
        held = limits.largest if limits.held is None else limits.held // copies
        self.most_bytes = min(limits.largest, held)
        """Limit on a decompressed message."""

    def check_size(self, num_bytes: int) -> None:
        """Raises MessageTooLarge."""
        limits = self.limits
        if num_bytes > limits.largest:
            raise MessageTooLarge.of(num_bytes, limits.largest)
        if num_bytes > self.most_bytes:
            raise MessageTooLarge(
                "",
                f"the message has {num_bytes} bytes and is held {self.copies} times; all messages together may have "
                f"{limits.held}",
            )


class Incoming:
    """The messages of one call, read as ``reading`` says. ``use``: the use of the call's connection."""

    def __init__(self, context: Any, reading: Reading, hold: Hold, use: ConnectionUse) -> None:
        self._context, self._reading, self._hold, self._use = context, reading, hold, use

    async def only(self) -> Any:
        """The message of a method with one request. Later messages are not read. Raises MessagesFull, MessageTooLarge,
        NoMessage, SlowSender, InvalidRequest."""
        await self._hold.reserve(self._reading.reserved_bytes)
        data = await self._read()
        if data is EOF:
            await asyncio.sleep(_A_MOMENT_S)
            raise NoMessage("the call ended without a request message; the method needs one")
        return await self._message(data)

    async def all(self) -> AsyncIterator[Any]:
        """The messages of a method with a stream of requests. The memory of a message is reserved until the next one is
        read. Raises the same errors as ``only``."""
        while True:
            await self._hold.reserve(self._reading.reserved_bytes)
            if (data := await self._read()) is EOF:
                return
            message = await self._message(data)
            del data
            yield message
            del message

    async def reserved(self) -> Any:
        """The next message of a stream, whose memory the caller has reserved in the hold; None after the last one.
        Raises the same errors as ``only``, but not MessagesFull."""
        data = await self._read()
        return None if data is EOF else await self._message(data)

    async def _read(self) -> Any:
        use = self._use
        use.pulls += 1
        try:
            data = await self._reading.pulls.within(self._context.read())
        finally:
            use.pulls -= 1
            use.heard += 1
        self._hold.arrived(0 if data is EOF else len(data))
        return data

    async def _message(self, data: bytes) -> Any:
        data, reading = await self._plain(data), self._reading
        if reading.descriptor is not None:
            check_fields(data, reading.descriptor)
        try:
            return reading.decode(data)
        except DecodeError:
            # Without this, gRPC would answer with INTERNAL and log a traceback.
            raise InvalidRequest("", "the request is not a valid message of its type") from None

    async def _plain(self, data: bytes) -> bytes:
        """A received message, decompressed. Keeps the memory that it needs."""
        reading = self._reading
        if len(data) > reading.most_bytes:
            reading.check_size(len(data))
        if is_compressed(data):
            data = await inflated(data, reading.limits.largest)
            reading.check_size(len(data))
        self._hold.settle(reading.copies * len(data))
        return data


def is_compressed(data: bytes) -> bool:
    """Whether a received message is compressed with gzip or deflate."""
    return data[:2] in _COMPRESSED


async def inflated(data: bytes, max_bytes: int) -> bytes:
    """Decompresses ``data``, up to ``max_bytes + 1`` bytes. A result longer than ``max_bytes`` is too large. Raises
    InvalidRequest."""
    if len(data) <= _INLINE_BYTES:
        return inflate(data, max_bytes)
    return await asyncio.to_thread(inflate, data, max_bytes)


def inflate(data: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """As ``inflated``, on this thread."""
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


def check_fields(data: bytes | memoryview, descriptor: Any) -> None:
    """Checks an encoded message of the type of ``descriptor``. Raises MessageTooLarge for too many fields, and
    InvalidRequest for data that is no message."""
    if len(data) <= MOST_FIELDS:  # Each takes a byte or more.
        return
    try:
        count = num_fields(data, descriptor)
    except IndexError:
        raise InvalidRequest("", "the request is not a valid message of its type") from None
    if count > MOST_FIELDS:
        raise MessageTooLarge(
            "", f"the message has more than {MOST_FIELDS} fields, with those of the messages in it"
        )


def num_fields(data: bytes | memoryview, descriptor: Any) -> int:
    """The number of fields; more than MOST_FIELDS stands for any such number. Raises IndexError for data that is no
    message."""
    count = 0
    parts = [(0, len(data), descriptor)]
    """The messages that are left to read: begin, end and type."""
    while parts:
        place, end, kind = parts.pop()
        fields = _parts_of(kind)
        num_groups = 0
        while place < end:
            count += 1
            if count > MOST_FIELDS:
                return count
            key, place = _varint(data, place)
            wire_type = key & 7
            if wire_type == _LENGTH:
                size, place = _varint(data, place)
                field = None if num_groups else fields.get(key >> 3)
                if field is not None and field.message is not None:
                    parts.append((place, place + size, field.message))
                elif field is not None:
                    count += size // field.fewest_bytes
                place += size
            elif wire_type == _VARINT:
                _, place = _varint(data, place)
            elif wire_type == _FIXED_64:
                place += 8
            elif wire_type == _FIXED_32:
                place += 4
            elif wire_type == _START_GROUP:  # Of an unknown field: our messages have no groups.
                num_groups += 1
            elif wire_type == _END_GROUP:
                num_groups -= 1
            else:
                raise IndexError(place)
        if place > end:
            raise IndexError(place)
    return count


class _Field(NamedTuple):
    """A field of several parts: the type of its message, or the fewest bytes of each of its numbers."""

    message: Any
    fewest_bytes: int = 1


@functools.cache
def _parts_of(descriptor: Any) -> dict[int, _Field]:
    """The fields that are messages or numbers, by their numbers. A list of numbers is packed like bytes."""
    found = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            found[field.number] = _Field(field.message_type)
        elif field.type not in _AS_ONE:
            fewest = 8 if field.type in _EIGHT_BYTES else 4 if field.type in _FOUR_BYTES else 1
            found[field.number] = _Field(None, fewest)
    return found


def _varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """The number at ``place``, and where it ends. Raises IndexError."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise IndexError(place)
