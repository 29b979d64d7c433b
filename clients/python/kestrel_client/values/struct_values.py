"""Converts plain Python values to google.protobuf.Struct and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2

from ..errors import InvalidRequestError


def to_struct(name: str, values: Mapping[str, Any] | None) -> struct_pb2.Struct | None:
    """Converts ``values``; None stays None. Raises InvalidRequestError, naming the argument ``name``."""
    if values is None:
        return None
    struct = struct_pb2.Struct()
    try:
        struct.update(_listed(values))
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"{name}: must map names to None, bools, numbers, strings, lists and mappings: {error}"
        ) from error
    return struct


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Converts a Struct. It has no integers, so a number without a fraction becomes an int."""
    return {name: _from_value(value) for name, value in struct.fields.items()}


def _listed(value: Any) -> Any:
    """Converts tuples, arrays and mappings to the lists and dicts that Struct accepts."""
    if hasattr(value, "tolist"):  # a numpy array or number
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    return value


def _from_value(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return from_struct(value.struct_value)
        case "list_value":
            return [_from_value(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None
