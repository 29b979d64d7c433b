"""Changes a protobuf message at some places, so that inputs stay messages."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import EncodeError, Message

_NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", " ", "a", "\x00", "é" * 300, "x" * 5000, "fake", "../..", "{}", "[" * 100, "a{1,9}")
_BYTES = (b"", b"\x00", b"\xff" * 100, bytes(12), bytes(4800), b"\x89PNG\r\n\x1a\n", b"GIF89a")


def mutated(message: Message, wire: bytes, most: int, seed: int) -> bytes:
    """``message`` in wire format with some changes, or ``wire`` with changed bytes."""
    chance = random.Random(seed)
    if seed % 8:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            _change(chance.choice(list(_messages(message))), chance)
        try:
            changed = message.SerializeToString()
        except (EncodeError, ValueError):
            changed = wire
        if changed != wire and len(changed) <= most:
            return changed
    import atheris

    return bytes(atheris.Mutate(wire, most))


def _messages(message: Message) -> Any:
    """The message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field):
            for each in value if field.is_repeated else [value]:
                yield from _messages(each)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _change(message: Message, chance: random.Random) -> None:
    fields = [field for field in message.DESCRIPTOR.fields if not _is_map(field)]
    if not fields:
        return
    field = chance.choice(fields)
    if chance.random() < 0.2:
        message.ClearField(field.name)
    elif field.message_type is not None:
        part = getattr(message, field.name)
        if field.is_repeated:
            part.add().CopyFrom(chance.choice(list(part) or [part.add()]))
        else:
            part.SetInParent()
    else:
        value = _value(field, chance)
        if field.is_repeated:
            getattr(message, field.name).extend([value] * chance.choice((1, 1, 2, 30)))
        else:
            setattr(message, field.name, value)


def _value(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == Field.CPPTYPE_STRING:
        return chance.choice(_BYTES if field.type == Field.TYPE_BYTES else _TEXTS)
    if kind == Field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return chance.choice(_FLOATS)
    if kind == Field.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 3, 99))
    number = chance.choice(_NUMBERS)
    if kind in (Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64):
        number = abs(number)
    bits = 31 if kind in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32) else 63
    return max(-(1 << bits), min((1 << bits) - 1, number))
