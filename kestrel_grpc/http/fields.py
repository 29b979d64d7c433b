"""Fields: reads a JSON object of a request, field by field. An error names the field and its valid values.

It uses no library of schemas: msgspec and pydantic know no fields that are refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import orjson

from kestrel_client.images.base64_images import decoded_image
from kestrel_engine import FieldPath, InvalidRequest, UnsupportedImageError

from .fetching import Addresses, is_address

_T = TypeVar("_T")
_KINDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}

ANY_OBJECT = '{"type": "object"}'
"""The JSON Schema of all JSON objects."""


_MOST_VALUES = 20_000
"""Limit on the commas and opening brackets in a body. A value takes up to 20 times the bytes of its JSON in memory, and
a message of a conversation 3 us of the event loop. An image is one value."""


_MOST = 2**31 - 1


_MOST_LOOKS = 100
"""Unknown names of a request in which a typing error is looked for: each takes 10 us of the event loop."""


class Looks:
    """How many unknown names of a request may still be compared with the known ones."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _MOST_LOOKS

    def take(self) -> bool:
        """Whether there was one left."""
        self._left -= 1
        return self._left >= 0


class Fields:
    """``path``: of the object in the request, for errors. ``addresses``: None if the server fetches no images.
    ``looks``: those of the request."""

    def __init__(
        self,
        values: dict[str, Any],
        path: FieldPath = (),
        addresses: Addresses | None = None,
        looks: Looks | None = None,
    ) -> None:
        self.values, self.path, self._addresses = values, path, addresses
        self.looks = looks or Looks()

    def at(self, *inner: str | int) -> FieldPath:
        """The path of a field, or of what it holds."""
        return (*self.path, *inner)

    def text(self, key: str, default: str | None = None) -> str:
        """Raises InvalidRequest, also if the field is missing and there is no default."""
        text: str = self._get(key, str, default)
        return text

    def flag(self, key: str) -> bool:
        """False if the field is missing or null. Raises InvalidRequest."""
        return bool(self._get(key, bool, False))

    def inner(self, key: str) -> Fields:
        """Empty if the field is missing or null. Raises InvalidRequest."""
        return self.within(self._get(key, dict, {}), key)

    def within(self, values: dict[str, Any], *inner: str | int) -> Fields:
        """The fields of an object that this one holds."""
        return Fields(values, self.at(*inner), self._addresses, self.looks)

    def items(self, key: str) -> list[Any]:
        """Empty if the field is missing or null. Raises InvalidRequest."""
        return list(self._get(key, list, []))

    def objects(self, key: str, what: str = "an object") -> Iterator[Fields]:
        """The fields of each object in a list. ``what``: an item must be, for errors. Raises InvalidRequest."""
        for index, item in enumerate(self.items(key)):
            if not isinstance(item, dict):
                raise InvalidRequest(self.at(key, index), f"must be {what}")
            yield self.within(item, key, index)

    def texts(self, key: str) -> list[str]:
        """One string is a list of one. Empty if the field is missing or null. Raises InvalidRequest."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, (str, list)):
            raise InvalidRequest(
                self.at(key), f"must be a string or a list of strings, got {_kind_of(value)}"
            )
        values = [value] if isinstance(value, str) else self.items(key)
        for index, item in enumerate(values):
            if not isinstance(item, str):
                raise InvalidRequest(self.at(key, index), f"must be a string, got {_kind_of(item)}")
        return values

    def number(self, key: str) -> float | None:
        """None if the field is missing or null. Raises InvalidRequest."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(self.at(key), f"must be a number, got {_kind_of(value)}")
        return float(value)

    def whole(self, key: str) -> int | None:
        """None if the field is missing or null. Raises InvalidRequest."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            return int(value)  # JSON has one kind of number: 5.0 is 5.
        if isinstance(value, bool) or not isinstance(value, int):
            what = value if isinstance(value, float) else _kind_of(value)
            raise InvalidRequest(self.at(key), f"must be a whole number, got {what}")
        return value

    def image(self, text: str, *inner: str | int) -> bytes:
        """The encoded image in a data URL, in plain base64, or at an address. ``inner``: the place of ``text``. Raises
        InvalidRequest, UnsupportedImageError."""
        path = self.at(*inner)
        has_address = is_address(text)
        if has_address and self._addresses is not None:
            return self._addresses.image(text, path)
        if has_address or text[:5].lower() == "file:":
            raise UnsupportedImageError(
                path, "is an address, and this server fetches none; send the image as a data URL"
            )
        try:
            return decoded_image(text)
        except ValueError as error:
            raise InvalidRequest(path, str(error)) from None

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise InvalidRequest(self.at(key), "is required")
            return default
        if not isinstance(value, kind):
            raise InvalidRequest(self.at(key), f"must be {_KINDS[kind]}, got {_kind_of(value)}")
        return value


def positive(fields: Fields, key: str) -> int | None:
    """A whole number from 1 to 2^31 - 1; None if the field is missing or null. Raises InvalidRequest."""
    value = fields.whole(key)
    if value is not None and not 1 <= value <= _MOST:
        raise InvalidRequest(fields.at(key), f"must be in [1, {_MOST}], got {value}")
    return value


def choice(fields: Fields, key: str, default: str, values: dict[str, _T]) -> _T:
    """What ``values`` has for a text. Raises InvalidRequest."""
    given = fields.text(key, default)
    if given not in values:
        known = ", ".join(values)
        raise InvalidRequest(fields.at(key), f"must be one of {known}, got {given[:50]!r}")
    return values[given]


def json_fields(body: bytes | bytearray, addresses: Addresses | None = None) -> Fields:
    """The fields of a request's body. ``addresses``: as for Fields. Raises InvalidRequest."""
    if sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise InvalidRequest("", f"the body has more than {_MOST_VALUES} values")
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("", f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("", f"the body must be a JSON object, got {_kind_of(values)}")
    return Fields(values, (), addresses)


def json_text(fields: Fields) -> str:
    """The JSON of an object that was read from JSON. Raises InvalidRequest."""
    try:
        return orjson.dumps(fields.values).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(fields.path, f"cannot be read: {error}") from None


def numbers(value: Any, field: FieldPath) -> Sequence[float]:
    """A list of numbers. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise InvalidRequest(field, f"must be a list of numbers, got {_kind_of(value)}")
    for index, each in enumerate(value):
        if isinstance(each, bool) or not isinstance(each, (int, float)):
            raise InvalidRequest((*field, index), f"must be a number, got {_kind_of(each)}")
    return [float(each) for each in value]


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return _KINDS.get(type(value), "a number")
