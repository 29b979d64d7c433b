"""KnownFields: what becomes of each field of a JSON object: honoured, refused, or ignored. Owns how unknown fields are
treated.

A field that holds the image, or chooses the fine-tune, and is not read gives a wrong answer that looks right. So a
field is refused if its name or its value says that it is one of these, or if its name is another spelling or a typing
error of a field that is honoured.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import islice

from kestrel_client.images.base64_images import is_data_url
from kestrel_engine import FieldPath, InvalidRequest

from .fields import Fields

logger = logging.getLogger(__name__)

_MATTERS = re.compile(
    r"image|picture|photo|adapter|variant|fine_?tun|checkpoint|"
    r"(?:^|_)(?:img|file|attachment|video|audio|lora|peft)"
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHORTEST, _LONGEST = 4, 32
"""Of names in which a typing error is looked for."""
_SHORT = 5
"""In names of so many characters, only moved ones are typing errors, and underscores."""
_LONG_TEXT = 2048
"""Characters of a text that may be an image."""
_MOST_LOOKED_AT = 4
_SHOWN = 50
_MOST_LOGGED = 100
_logged: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class KnownFields:
    """The fields of one kind of object in a dialect.

    ``where``: the object, for the log. ``refused``: fields that would change the answer, each with what to do instead;
    they may be sent without a value, as null, false, 0, "" or an empty list or object. ``misplaced``: fields of another
    object, each with what to do instead; they may be sent as null. ``ignored``: fields that change no answer.
    ``remedy``: where images and fine-tunes belong. ``is_strict``: whether all unknown fields are refused.
    """

    where: str
    honoured: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    misplaced: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    remedy: str = ""
    is_strict: bool = False

    @cached_property
    def _near(self) -> dict[str, str]:
        """The names that may be meant, by what typing errors leave of them."""
        near: dict[str, str] = {}
        for names in (self.refused, self.misplaced, self.honoured):
            for name in sorted(names):
                if len(name) >= _SHORTEST:
                    near |= dict.fromkeys(_left_of(name, len(name) > _SHORT), name)
        return near

    def inner(self, fields: Fields, key: str) -> Fields:
        """The fields of the object ``key``, checked. Raises InvalidRequest."""
        found = fields.inner(key)
        self.check(found)
        return found

    def check(self, fields: Fields) -> None:
        """Logs each unknown field once. Raises InvalidRequest."""
        for key, value in fields.values.items():
            if key in self.honoured or key in self.ignored:
                continue
            if key in self.refused:
                if value:
                    raise InvalidRequest(fields.at(key), self.refused[key])
            elif self.is_strict:
                raise InvalidRequest(_named(fields, key), self._unknown(key))
            elif value is not None:
                if key in self.misplaced:
                    raise InvalidRequest(fields.at(key), self.misplaced[key])
                self._check_unknown(fields, key)

    def _check_unknown(self, fields: Fields, key: str) -> None:
        value, is_logged = fields.values[key], (self.where, key[:_SHOWN]) in _logged
        matters = not is_logged and _MATTERS.search(_snake(key))
        if _holds_image(value) or (value and matters):
            raise InvalidRequest(_named(fields, key), f"is not read here; {self.remedy}")
        if is_logged or matters or not fields.looks.take():
            return
        meant = self._meant(key)
        if meant in self.refused and not value:
            return
        if meant is not None:
            place = self.refused.get(meant) or self.misplaced.get(meant)
            hint = "" if meant in self.honoured or place is None else f" {meant}: {place}"
            raise InvalidRequest(_named(fields, key), f"is unknown; did you mean {meant}?{hint}")
        if len(_logged) < _MOST_LOGGED:
            _logged.add((self.where, key[:_SHOWN]))
            logger.info("the field %r of %s is ignored", key[:_SHOWN], self.where)

    def _meant(self, key: str) -> str | None:
        """The known field of which ``key`` is another spelling (maxTokens), or a typing error: one character more,
        less, other or moved; in short names, moved."""
        if not _SHORTEST - 1 <= len(key) <= _LONGEST:
            return None
        near, name = self._near, _snake(key)
        return next((near[each] for each in _left_of(name, True) if each in near), None)

    def _unknown(self, key: str) -> str:
        names = sorted(self.honoured)
        close = get_close_matches(_snake(key), names, n=1)
        return (
            f"is unknown; {f'did you mean {close[0]}?' if close else 'known: ' + ', '.join(names)}"
        )


def _snake(key: str) -> str:
    key = key[:_LONGEST]
    return (key if key.islower() else _HUMP.sub("_", key).lower()).replace("-", "_")


def _holds_image(value: object, depth: int = 2) -> bool:
    if isinstance(value, str):
        return is_data_url(value) or len(value) >= _LONG_TEXT
    if not depth or not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_image(each, depth - 1) for each in islice(items, _MOST_LOOKED_AT))


def _left_of(name: str, shortens: bool) -> Iterator[str]:
    """What two spellings of a name have in common. ``shortens``: also the name with one character left out."""
    bare = name.replace("_", "")
    yield f"={bare}"
    for index in range(len(bare) - 1 if len(name) <= _SHORT else 0):
        moved = "".join(sorted(bare[index : index + 2]))
        yield f"{bare[:index]}<{moved}>{bare[index + 2 :]}"
    if shortens:
        yield name
        for index in range(len(name)):
            yield name[:index] + name[index + 1 :]


def _named(fields: Fields, key: str) -> FieldPath:
    return fields.at(key[:_SHOWN])
