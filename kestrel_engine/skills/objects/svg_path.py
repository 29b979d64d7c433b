"""SvgPathDecoder: path tokens to SVG path data, piece by piece (moondream.md section 9.3).

Grammar: a command letter, then integers until the next command; a lone "-" negates the next integer and is ignored if
nothing follows it. Integers live in a 960-unit box. Numbers are grouped in pairs; an odd last number of a command is
discarded. Knows no tokenizer and draws nothing.
"""

from __future__ import annotations

import re

COMMANDS = frozenset("MmLlHhVvCcSsQqTtAaZz")
UNITS = 960
_INTEGER = re.compile(r"-?\d{1,6}")


class PathError(ValueError):
    """The tokens are not a path; the message says which token is at fault."""


def format_number(units: int) -> str:
    """Units of the 960 box as a fraction with at most 3 decimals, no trailing zeros."""
    text = f"{units / UNITS:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class SvgPathDecoder:
    """push() decoded, stripped, non-empty token texts in order; it returns the commands completed by them."""

    def __init__(self) -> None:
        self._command: str | None = None
        self._numbers: list[int] = []
        self._negate = False
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Takes one token; returns the piece (a command with its arguments) that it completed, or "".

        Raises PathError for a token that fits no place in the grammar.
        """
        if text in COMMANDS:
            piece = self._complete()
            self._command = text
            return piece
        if self._command is None:
            raise PathError(f"token {text!r} comes before any command")
        if text == "-":
            self._negate = True
            return ""
        if not _INTEGER.fullmatch(text):
            raise PathError(f"token {text!r} is neither a command nor an integer")
        value = int(text)
        self._numbers.append(-value if self._negate else value)
        self._negate = False
        return ""

    def finish(self) -> str:
        """The last command, now that nothing follows."""
        piece = self._complete()
        self._command = None
        return piece

    @property
    def path(self) -> str:
        """All pieces completed so far, joined by single spaces."""
        return " ".join(self._pieces)

    def _complete(self) -> str:
        if self._command is None:
            return ""
        even = self._numbers[: len(self._numbers) // 2 * 2]
        piece = " ".join([self._command, *(format_number(n) for n in even)])
        self._numbers, self._negate = [], False
        self._pieces.append(piece)
        return piece
