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
from google.protobuf import json_format
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
    _fill(message, json_fields(data).values, ())


def to_json(message: Message) -> bytes:
    """The message with the names of JSON (``textDelta``), without fields that have their default."""
    return orjson.dumps(json_format.MessageToDict(message))


def _fill(message: Any, values: dict[str, Any], path: FieldPath) -> None:
    """``path``: of ``message``. Raises InvalidRequest."""
    given: dict[Any, str] = {}
    left: dict[str, Any] = {}
    """What protobuf converts."""
    for key, value in values.items():
        field = _field(message.DESCRIPTOR, key, path)
        if value is None:  # The default.
            continue
        if (other := given.setdefault(field.containing_oneof or field.name, key)) != key:
            raise InvalidRequest(path, f"may hold only one of {', '.join(sorted((other, key)))}")
        place, is_list = (*path, field.name), field.is_repeated and not _is_map(field)
        if is_list and not isinstance(value, list):
            raise InvalidRequest(place, f"must be a list, got {_shown(value)}")
        for index, item in enumerate(value if is_list else [value]):
            at = (*place, index) if is_list else place
            if _is_misread(field, item):
                raise _wrong(field, at, item)
            if _is_plain(field):
                held = getattr(message, field.name)
                inner = held.add() if is_list else held
                inner.SetInParent()
                _fill(inner, item, at)
            elif _is_data(field):
                setattr(message, field.name, _bytes(field, item, at))
        if not (_is_plain(field) or _is_data(field)):
            left[key] = value
    try:
        json_format.ParseDict(left, message)
    except _FAULTS:
        raise _fault(left, type(message), path) from None


def _bytes(field: FieldDescriptor, text: str, path: FieldPath) -> bytes:
    try:
        return decoded_image(text)
    except ValueError as error:
        if field.name != "encoded":  # Only an image may come as a data URL.
            raise _wrong(field, path, text) from None
        raise InvalidRequest(path, str(error)) from None


def _is_misread(field: FieldDescriptor, value: Any) -> bool:
    """Whether a value has another type than what this module reads, or one that protobuf would take for another: true
    for 1, and 1.5 for the number of an enum."""
    if _is_plain(field) or _is_data(field):
        return not isinstance(value, dict if _is_plain(field) else str)
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


def _is_data(field: FieldDescriptor) -> bool:
    """Whether a field holds bytes."""
    return field.type == FieldDescriptor.TYPE_BYTES and not field.is_repeated


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _fault(values: dict[str, Any], kind: Any, path: FieldPath) -> InvalidRequest:
    """What is wrong in values that protobuf could not read: the first one that it can't read by itself."""
    key = next((key for key, value in values.items() if not _reads(kind, key, value)), "")
    if not key:
        return InvalidRequest(path, "can't be read as a whole")
    field, value = _names(kind.DESCRIPTOR)[key], values[key]
    place = (*path, field.name)
    if not isinstance(value, list) or not field.is_repeated or _is_map(field):
        return _wrong(field, place, value)
    # At the cost of two readings of the list.
    start, end = 0, len(value)
    while end - start > 1:
        middle = (start + end) // 2
        is_later = _reads(kind, key, value[start:middle])
        start, end = (middle, end) if is_later else (start, middle)
    return _wrong(field, (*place, start), value[start])


def _reads(kind: Any, key: str, value: Any) -> bool:
    try:
        json_format.ParseDict({key: value}, kind())
    except _FAULTS:
        return False
    return True


def _wrong(field: FieldDescriptor, path: FieldPath, value: Any) -> InvalidRequest:
    expected = _KINDS.get(field.cpp_type, "")
    if field.enum_type is not None:
        expected = f"one of {', '.join(field.enum_type.values_by_name)}"
    elif field.type == FieldDescriptor.TYPE_BYTES:
        expected = "text in base64"
    elif field.message_type is not None:
        own = field.message_type.full_name.startswith(_OWN_FORMS)
        expected = f"{field.message_type.name} in its JSON form" if own else "an object"
    return InvalidRequest(path, f"must be {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return orjson.dumps(value)[:_SHOWN_CHARS].decode(errors="ignore")
