"""Reads a grammar in llguidance's variant of Lark's notation: its schemas, and a rule that requires itself without end.

The library has compiled the grammar before, so that its notation is valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .circles import Part, closing

_TOKEN = re.compile(
    r"""(?P<blank> (?: \# | // ) [^\n]* | [ \t]+ )
    | (?P<line> \r?\n )
    | (?P<text> " (?: \\. | [^"\\\n] )* "i? )
    | (?P<pattern> / (?: \\. | [^/\\] )+ /[a-z]* )
    | (?P<special> < [^<>\s]+ > )
    | (?P<json> %(?: json | regex | llguidance ) \b )
    | (?P<word> %[a-z]+ )
    | (?P<name> [!?]{0,2} _?[a-z][a-z0-9_-]* )
    | (?P<terminal> _?[A-Z][A-Z0-9_-]* )
    | (?P<number> 0x[0-9a-fA-F]+ | [0-9]+ )
    | (?P<sign> -> | :: | \.\. | [^"/\n] )""",
    re.VERBOSE,
)
_CLOSING = ("|", ")", "]", "}")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    begin: int
    end: int

    @property
    def is_end_of_sequence(self) -> bool:
        return self.kind in ("line", "end") or (self.kind == "sign" and self.text in _CLOSING)


@dataclass(slots=True, eq=False)
class _Part(Part):
    """``name``, ``begin``: of a rule's reference. ``optional``: what it reaches and does not need."""

    name: str = ""
    begin: int = 0
    optional: list[_Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema after ``%json``. ``place``: where, for a message. ``begin``, ``end``: those of its text."""

    text: str
    place: str
    begin: int
    end: int


def schemas(source: str) -> Iterator[Schema]:
    """The JSON Schemas in a grammar."""
    if "%json" not in source:
        return
    for token in _tokens(source):
        if token.kind == "json" and token.text.startswith("%json"):
            begin = token.begin + len("%json")
            place = _place(source, token.begin)
            yield Schema(source[begin : token.end], place, begin, token.end)


def endless_rule(source: str) -> tuple[str, str] | None:
    """The name of a rule that closes a circle of requirements, and the place of this reference; None if every rule that
    a text may reach ends."""
    start = _Reader(source).grammar()
    found, seen = [start], {id(start)}
    for part in found:  # It grows meanwhile.
        for each in (*(option for options in part.needs for option in options), *part.optional):
            if id(each) not in seen:
                seen.add(id(each))
                found.append(each)
    last = closing(found)
    return (last.name, _place(source, last.begin)) if last is not None else None


def _place(source: str, begin: int) -> str:
    line = source.count("\n", 0, begin) + 1
    return f"at line {line}, column {begin - source.rfind(chr(10), 0, begin)}"


def _tokens(source: str) -> Iterator[_Token]:
    """The tokens without blanks, up to a text without an end. A line that begins with "|" continues the line before."""
    at, line = 0, None
    while (found := _TOKEN.match(source, at)) is not None:
        kind, text, begin, at = str(found.lastgroup), found[0], found.start(), found.end()
        if kind == "json":
            at = _end_of_json(source, at)
            text = source[begin:at]
        token = _Token(kind, text, begin, at)
        if kind == "line":
            line = line or token
        elif kind != "blank":
            if line is not None and text != "|":
                yield line
            line = None
            yield token
    yield _Token("end", "", len(source), len(source))


def _end_of_json(source: str, at: int) -> int:
    blanks = re.compile(r"[ \t\r\n]*").match(source, at)
    assert blanks is not None
    try:
        return json.JSONDecoder().raw_decode(source, blanks.end())[1]
    except (ValueError, RecursionError):
        return at


class _Reader:
    """``at``: the index of the next token."""

    def __init__(self, source: str) -> None:
        self._tokens = list(_tokens(source))
        self._at = 0

    def grammar(self) -> _Part:
        """The start rule of the grammar up to the end or to its closing brace. A rule that is not defined ends."""
        rules: dict[str, _Part] = {}
        while not (self._next.kind == "end" or self._is_sign("}")):
            if self._next.kind == "name":
                rule = self._rule(self._take().text.lstrip("!?"), rules)
                while not (self._is_sign(":") or self._next.kind == "end"):
                    self._take()
                self._take()
                rule.needs.append([self._alternatives(rules)])
            else:
                self._skip_line()
        return self._rule("start", rules)

    @staticmethod
    def _rule(name: str, rules: dict[str, _Part]) -> _Part:
        return rules.setdefault(name, _Part())

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += token.kind != "end"
        return token

    def _is_sign(self, text: str) -> bool:
        return self._next.kind == "sign" and self._next.text == text

    def _takes(self, text: str) -> bool:
        is_next = self._is_sign(text)
        self._at += is_next
        return is_next

    def _skip_line(self) -> None:
        """Skips a statement or a terminal."""
        depth = 0
        while self._next.kind != "end" and (depth or self._next.kind != "line"):
            token = self._take()
            if token.kind == "sign":
                depth += (token.text in "([{") - (token.text in ")]}")
        self._take()

    def _alternatives(self, rules: dict[str, _Part]) -> _Part:
        part = _Part()
        part.needs.append([self._sequence(rules)])
        while self._takes("|"):
            part.needs[0].append(self._sequence(rules))
        return part

    def _sequence(self, rules: dict[str, _Part]) -> _Part:
        part = _Part()
        while not self._next.is_end_of_sequence:
            inner, is_optional = self._item(rules)
            if self._is_repeated_from_0() or is_optional:
                part.optional.append(inner)
            else:
                part.needs.append([inner])
        return part

    def _item(self, rules: dict[str, _Part]) -> tuple[_Part, bool]:
        """The next part of a sequence, and whether it is in brackets."""
        token = self._take()
        if token.kind == "name":
            needs = [[self._rule(token.text, rules)]]
            part = _Part(token.text, token.begin, needs=needs, refers=True)
            self._skip_parameter()
            return part, False
        if token.text in ("(", "["):
            part = self._alternatives(rules)
            self._take()
            return part, token.text == "["
        if token.text == "%lark":
            self._take()
            part = self.grammar()
            self._take()
            return part, False
        if token.text == "->":
            self._take()
        elif token.text == "%if":
            while not self._next.is_end_of_sequence:
                self._skip_group()
        return _Part(), False

    def _skip_parameter(self) -> None:
        """Skips what a rule is called with, such as ``::incr(_)``."""
        if self._takes("::"):
            self._take()
            if self._is_sign("("):
                self._skip_group()

    def _skip_group(self) -> None:
        """Skips a token, with all up to its parenthesis that closes."""
        depth = 0
        while self._next.kind != "end":
            text = self._take().text
            depth += (text in ("(", "[")) - (text in (")", "]"))
            if depth <= 0:
                return

    def _is_repeated_from_0(self) -> bool:
        """Takes what says how often the last part may repeat, and whether it may be absent."""
        if self._takes("?") or self._takes("*"):
            return True
        if self._takes("+"):
            return False
        is_braced = self._takes("{")
        if not is_braced and not self._takes("~"):
            return False
        may_be_absent = self._next.kind != "number" or not self._take().text.strip("0")
        if is_braced:
            while self._next.kind != "end" and not self._takes("}"):
                self._take()
        elif self._takes(".."):
            self._take()
        return may_be_absent
