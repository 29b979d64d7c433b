"""Messages as JSON, by the rule of Protocol Buffers (ProtoJSON), for clients that write it by hand.

The package protobuf converts. It drops letters that are not base64, reads true as 1, tells the place of a fault in its
own words only, and takes tens of milliseconds for each megabyte of an image. So this module checks names and types
itself, and reads the bytes. An unknown field is refused, as ProtoJSON demands.
"""

from __future__ import annotations

import functools
from difflib import get_close_matches
from typing import Any

import orjson
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kestrel_client.images.base64_images import decoded_image
from kestrel_engine import FieldPath, InvalidRequest

from ..fields import json_fields

_OWN_FORMS = "google.protobuf."
"""Types of this package have forms of their own in JSON, such as text for a time."""
_SHOWN_CHARS = 50
_FAULTS = (json_format.ParseError, TypeError, ValueError, AttributeError)
"""What ParseDict raises for values of a wrong type."""
_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "a string",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "a number of 32 bits",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number of 32 bits without a sign",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number of 64 bits without a sign",
}


def parse_json(data: bytes | bytearray, message: Any) -> None:
    """Fills ``message``. Raises InvalidRequest."""
    values = json_fields(data).values
    found: list[tuple[FieldPath, bytes]] = []
    _take_bytes(values, message.DESCRIPTOR, (), found)
    try:
        json_format.ParseDict(values, message)
    except _FAULTS:
        raise _fault(values, type(message), ()) from None
    for path, content in found:
        _put(message, path, content)


def to_json(message: Message) -> bytes:
    """The message with the names of JSON (``textDelta``), without fields that have their default."""
    return orjson.dumps(json_format.MessageToDict(message))


def _take_bytes(
    values: dict[str, Any], kind: Any, path: FieldPath, found: list[tuple[FieldPath, bytes]]
) -> None:
    """Adds to ``found`` what the fields of bytes hold, with the paths of these fields, and leaves "" in their place.
    Raises InvalidRequest for unknown names too."""
    for key, value in values.items():
        field = _field(kind, key, path)
        items = value if field.is_repeated and isinstance(value, list) else [value]
        for index, item in enumerate(items):
            place = (*path, field.name, index) if items is value else (*path, field.name)
            if isinstance(item, dict) and _is_plain(field):
                _take_bytes(item, field.message_type, place, found)
            elif _is_misread(field, item):
                raise InvalidRequest(place, f"must be {_expected(field)}, got {_shown(item)}")
            elif isinstance(item, str) and field.type == FieldDescriptor.TYPE_BYTES:
                try:
                    found.append((place, decoded_image(item)))
                except ValueError as error:
                    raise InvalidRequest(place, str(error)) from None
                if items is value:
                    value[index] = ""
                else:
                    values[key] = ""


def _is_misread(field: FieldDescriptor, value: Any) -> bool:
    """Whether protobuf would read a value of another type: true as 1, and 1.5 as the number of an enum."""
    if field.enum_type is not None:
        return isinstance(value, (bool, float))
    return isinstance(value, bool) and field.cpp_type in _KINDS and field.type != field.TYPE_BOOL


def _field(kind: Any, key: str, path: FieldPath) -> FieldDescriptor:
    names = _names(kind)
    if (field := names.get(key)) is None:
        known = sorted({each.name for each in names.values()})
        close = get_close_matches(key[:_SHOWN_CHARS], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        raise InvalidRequest((*path, key[:_SHOWN_CHARS]), f"is unknown; {hint}")
    return field


@functools.cache
def _names(kind: Any) -> dict[str, FieldDescriptor]:
    """The fields by the names that ProtoJSON reads: those of the protos, and those of JSON."""
    return {name: field for field in kind.fields for name in (field.name, field.json_name)}


def _is_plain(field: FieldDescriptor) -> bool:
    """Whether a field holds messages whose JSON is an object with the names of their fields."""
    kind = field.message_type
    return kind is not None and not _is_map(field) and not kind.full_name.startswith(_OWN_FORMS)


def _fault(values: dict[str, Any], kind: Any, path: FieldPath) -> InvalidRequest:
    """What is wrong in values that could not be read: of the first field that can't be read by itself."""
    for key, value in values.items():
        field = _names(kind.DESCRIPTOR)[key]
        if _reads(kind, key, value):
            continue
        place, item = (*path, field.name), value
        if field.is_repeated and isinstance(value, list):
            index = _first_fault(kind, key, value)
            place, item = (*place, index), value[index]
        elif field.is_repeated and not _is_map(field):
            return InvalidRequest(place, f"must be a list, got {_shown(value)}")
        inner: Any = field.message_type
        if isinstance(item, dict) and _is_plain(field):
            return _fault(item, message_factory.GetMessageClass(inner), place)
        return InvalidRequest(place, f"must be {_expected(field)}, got {_shown(item)}")
    names: dict[Any, set[str]] = {}
    for key in values:
        field = _names(kind.DESCRIPTOR)[key]
        names.setdefault(field.containing_oneof or field.name, set()).add(key)
    twice = next((each for each in names.values() if len(each) > 1), set(values))
    return InvalidRequest(path, f"may hold only one of {', '.join(sorted(twice))}")


def _reads(kind: Any, key: str, value: Any) -> bool:
    try:
        json_format.ParseDict({key: value}, kind())
    except _FAULTS:
        return False
    return True


def _first_fault(kind: Any, key: str, items: list[Any]) -> int:
    """The index of the first item of a list that can't be read, at the cost of two readings of the list."""
    start, end = 0, len(items)
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (middle, end) if _reads(kind, key, items[start:middle]) else (start, middle)
    return start


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _expected(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        return f"one of {', '.join(field.enum_type.values_by_name)}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return "text in base64"
    if field.message_type is not None:
        own = field.message_type.full_name.startswith(_OWN_FORMS)
        return f"{field.message_type.name} in its JSON form" if own else "an object"
    return _KINDS[field.cpp_type]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return orjson.dumps(value)[:_SHOWN_CHARS].decode(errors="ignore")


def _put(message: Any, path: FieldPath, content: bytes) -> None:
    *outer, last = path
    for part in outer:
        message = message[part] if isinstance(part, int) else getattr(message, part)
    if isinstance(last, int):
        message[last] = content
    else:
        setattr(message, last, content)
