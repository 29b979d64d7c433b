"""The limit on the fields of a message, checked on its bytes before it is decoded.

A field of three bytes becomes an object of some 400 bytes once it is read, so a message of 32 MiB could take 4 GB, and
the event loop for minutes. The large fields of our messages are bytes or text, which count as one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from kestrel_engine import InvalidRequest

from ...security.admission.admission import MessageTooLarge

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


def check_fields(data: bytes | memoryview, descriptor: Any) -> None:
    """Checks an encoded message of the type of ``descriptor``. Raises MessageTooLarge for too many fields, and
    InvalidRequest for data that is no message."""
    if len(data) <= MOST_FIELDS:  # Each takes a byte or more.
        return
    try:
        count = _num_fields(data, descriptor)
    except IndexError:
        raise InvalidRequest("", "the request is not a valid message of its type") from None
    if count > MOST_FIELDS:
        raise MessageTooLarge(
            "", f"the message has more than {MOST_FIELDS} fields, with those of the messages in it"
        )


def _num_fields(data: bytes | memoryview, descriptor: Any) -> int:
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
