"""StopStrings: ends a text before the first stop string in it, while the text arrives in pieces of any length.

Owns the end of the text that may turn out to be the beginning of a stop string. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import FieldPath, InvalidRequest
from ...types.requests import checked_list

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
"""UTF-8 bytes of one stop string."""


class StopStrings:
    """The stop string whose last character comes first ends the text; of several that end there, the longest.

    So the result depends on the text only, not on the pieces in which it arrives. No returned text holds any part of
    the stop string that ended it: the longest end of the text with which a stop string begins is held back. A
    character costs a few operations for each stop string, whatever the strings' lengths (Knuth, Morris and Pratt,
    "Fast pattern matching in strings", 1977).
    """

    __slots__ = ("_held", "_matchers", "found")

    def __init__(self, strings: Sequence[str]) -> None:
        """``strings``: none of them is empty."""
        self._matchers = [_Matcher(string) for string in strings]
        self._held = ""
        self.found = False
        """Whether a stop string has ended the text."""

    def push(self, piece: str) -> str:
        """Takes more of the text; returns what no stop string can cut any more. "" after a stop string was found."""
        if self.found:
            return ""
        text = self._held + piece
        for index, character in enumerate(piece, len(self._held) + 1):
            complete = [m.length for m in self._matchers if m.step(character)]
            if complete:
                self.found = True
                self._held = ""
                return text[: index - max(complete)]
        certain = len(text) - max((m.length for m in self._matchers), default=0)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """No text follows; returns what was held back."""
        rest, self._held = self._held, ""
        return rest


class _Matcher:
    """``length``: of the longest end of the text that is a beginning of ``string``."""

    __slots__ = ("_fallback", "_string", "length")

    def __init__(self, string: str) -> None:
        self._string = string
        self.length = 0
        self._fallback = [0]
        """For each beginning of the string, the length of its longest end, but itself, that is a beginning too."""
        shorter = 0
        for character in string[1:]:
            while shorter and string[shorter] != character:
                shorter = self._fallback[shorter - 1]
            shorter += string[shorter] == character
            self._fallback.append(shorter)

    def step(self, character: str) -> bool:
        """Takes one character; returns whether the string is complete. Not to be called again after True."""
        while self.length and self._string[self.length] != character:
            self.length = self._fallback[self.length - 1]
        self.length += self._string[self.length] == character
        return self.length == len(self._string)


def read_stop_strings(value: object) -> tuple[str, ...]:
    """The stop strings of a setting: None, one text, or a list of texts. Raises InvalidRequest."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    what = "a text or a list of texts"
    strings = checked_list("stop", value, what, most=MAX_STOP_STRINGS, noun="texts")
    for index, string in enumerate(strings):
        _check(("stop", index), string)
    return tuple(strings)


def _check(field: FieldPath, string: object) -> None:
    if not isinstance(string, str):
        raise InvalidRequest(field, "must be text")
    if not string:
        raise InvalidRequest(field, "must not be empty")
    # Lone surrogates are no valid Unicode, but they can't occur in a text either: they only fail to match.
    size = len(string.encode(errors="surrogatepass"))
    if size > MAX_STOP_BYTES:
        raise InvalidRequest(
            field,
            f"has {size} UTF-8 bytes, the limit is {MAX_STOP_BYTES}",
            value=size,
            limit=MAX_STOP_BYTES,
        )
