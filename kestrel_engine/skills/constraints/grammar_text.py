"""Constraints as texts for the library llguidance, and its messages as errors that name the place.

A process of its own runs ``problem`` (grammar_process.py), so this module imports nothing heavy.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...types.constraint import Constraint
from .endless import endless_place
from .lark import endless_rule, schemas
from .schemas import parts, read_schema

try:
    import llguidance
except ImportError:  # There are no wheels for some systems.
    AVAILABLE = False
else:
    AVAILABLE = True
NOTHING_FOLLOWS = "NoExtensionBias"
"""llguidance's word if no text goes on, such as at the begin of a grammar that refers only to itself."""
_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Without this, the library looks for the longest text that must follow. A pattern may demand gigabytes."""
_JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}
"""At most one blank where JSON permits white space. Otherwise a model could write blanks without end."""
_DRAWN = "regex parse error:"
"""A drawing of the pattern follows, and then what is wrong with it."""
_PLACE_S = 0.2
"""Seconds for the search for the place in an invalid schema."""


@functools.cache
def _limits() -> llguidance.LLParserLimits:
    """Bounds on time and memory: some 100 ms for a token, and 16 MB for the states of one constraint."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        max_items_in_row=1_000,
        step_max_items=5_000,
        max_lexer_states=8_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Vocabulary:
    """A vocabulary in the form that the library reads. It calls the object with a text to get its ids."""

    def __init__(self, tokens: list[bytes], eos_id: int) -> None:
        """``tokens``: the bytes of each id; empty for a special one."""
        self.eos_token_id = self.bos_token_id = eos_id
        self.special_token_ids = [token for token, text in enumerate(tokens) if not text]
        self.tokens = [text or b"<|%d|>" % token for token, text in enumerate(tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        raise AssertionError("nothing is forced, so no text is encoded")


def new_tokenizer(tokens: list[bytes], eos_id: int) -> llguidance.LLTokenizer:
    """Raises errors of any type for a vocabulary that does not suit the library."""
    wrapper = llguidance.TokenizerWrapper(Vocabulary(tokens, eos_id))
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokens))


def new_matcher(tokenizer: llguidance.LLTokenizer, lark: str) -> llguidance.LLMatcher:
    """The matcher may be in its error state."""
    return llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=_limits())


class UnlockedMatchers:
    """Lets a matcher consume a token without Python's interpreter lock, for one thread at a time.

    The library's own method keeps the lock, which may take as long as a mask. Its method for several matchers releases
    the lock, but not for a single one.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self._executor = llguidance.LLExecutor(1)
        self._other = new_matcher(tokenizer, "")
        """In its error state, so that it consumes nothing."""

    def consume_token(self, matcher: llguidance.LLMatcher, token_id: int) -> bool:
        return self._executor.consume_token_par([(matcher, token_id), (self._other, token_id)])[0]


def lark_of(constraint: Constraint) -> str:
    """The constraint in llguidance's variant of Lark's notation. Raises ValueError for a schema that is not JSON."""
    source = constraint.source
    if constraint.kind == "choices":
        return f"{_NO_FORCING}\nstart: {' | '.join(map(json.dumps, source))}"
    assert isinstance(source, str)
    if constraint.kind == "regex":
        return f"{_NO_FORCING}\nstart: /{llguidance.regex_to_lark(source)}/"
    if constraint.kind == "grammar":
        return _of_grammar(_with_schemas(source))
    return _of_schema(read_schema(source))


def problem(constraint: Constraint, tokenizer: llguidance.LLTokenizer) -> str:
    """What is wrong with the constraint, with the place; "" if nothing is."""
    try:
        matcher = new_matcher(tokenizer, lark_of(constraint))
    except ValueError as error:
        return str(error)
    if matcher.is_error():
        message = matcher.get_error()
        if constraint.kind == "regex":
            return _regex_problem(message)
        if constraint.kind == "json_schema":
            assert isinstance(constraint.source, str)
            where = _place(read_schema(constraint.source), tokenizer)
            said = _schema_problem(message)
            return f"at {where}: {said}" if where else said
        if constraint.kind == "grammar":
            # The places of the caller's text, without the library's schemas in it.
            assert isinstance(constraint.source, str)
            plain = new_matcher(tokenizer, _of_grammar(constraint.source))
            message = plain.get_error() or message
        return _grammar_problem(message)
    if circle := _circle(constraint):
        return circle
    first = matcher.compute_bitmask()
    message = first_line(matcher.get_error()) if matcher.is_error() else ""
    if message and message != NOTHING_FOLLOWS:
        return f"is too complex: {message}"
    return "" if any(first) and not message else "matches no text"


def _circle(constraint: Constraint) -> str:
    """The part that requires itself without end; "" if there is none."""
    source = constraint.source
    if constraint.kind == "json_schema":
        assert isinstance(source, str)
        return _circle_of_schema(source)
    if constraint.kind != "grammar":
        return ""
    assert isinstance(source, str)
    for each in schemas(source):
        if circle := _circle_of_schema(each.text):
            return f"{circle}, in %json {each.place}"
    if (rule := endless_rule(source)) is None:
        return ""
    name, place = rule
    return f"rule {name} requires itself without end {place}; add an alternative without it"


def _circle_of_schema(text: str) -> str:
    if (place := endless_place(read_schema(text))) is None:
        return ""
    return f"at {place}: requires itself without end; make a property optional, or permit null"


def _place(schema: Mapping[str, Any], tokenizer: llguidance.LLTokenizer) -> str:
    """The JSON pointer of the innermost part that is invalid by itself; "" for the whole schema."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place, until = "", time.monotonic() + _PLACE_S
    found: tuple[str, Any] | None = ("", schema)
    while found is not None:
        place += found[0]
        inside = parts(found[1]) if isinstance(found[1], Mapping) else iter(())
        found = None
        for pointer, inner in inside:
            if time.monotonic() > until:
                break
            if _is_invalid(inner, shared, tokenizer):
                found = (pointer, inner)
                break
    return place


def _is_invalid(
    schema: object, shared: Mapping[str, Any], tokenizer: llguidance.LLTokenizer
) -> bool:
    """``shared``: the definitions that references in ``schema`` may name."""
    if not isinstance(schema, Mapping):
        return not isinstance(schema, bool)
    return bool(new_matcher(tokenizer, _of_schema({**shared, **schema})).is_error())


def _of_grammar(source: str) -> str:
    # At the end, so that places in messages are those of the caller's text.
    return f"{source}\n{_NO_FORCING}"


def _with_schemas(source: str) -> str:
    """The grammar with its schemas in the words of the library. Raises ValueError naming the place."""
    pieces, end = [], 0
    for each in schemas(source):
        try:
            schema = read_schema(each.text)
        except ValueError as error:
            raise ValueError(f"{error}, in %json {each.place}") from error
        pieces += [source[end : each.begin], _with_options(schema)]
        end = each.end
    return "".join([*pieces, source[end:]])


def _of_schema(schema: Mapping[str, Any]) -> str:
    return f"{_NO_FORCING}\nstart: %json {_with_options(schema)}"


def _with_options(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _grammar_problem(message: str) -> str:
    """``at 1(8): unknown name`` becomes ``unknown name at line 1, column 8``. The innermost place is the first one."""
    head = first_line(message, 3_000)
    found = re.match(r"(?:at )?(\d+)\((\d+)\): (?:\d+\(\d+\): )*(.{,300})", head)
    return f"{found[3]} at line {found[1]}, column {found[2]}" if found else head[:300]


def _regex_problem(message: str) -> str:
    """The library draws the pattern, with carets below the place, and then ``error: what``."""
    lines = message.splitlines()
    what = _regex_error(lines)
    if not what:
        return _grammar_problem(message).partition(" at line ")[0]
    for above, line in itertools.pairwise(lines):
        if line.strip() and not line.strip("^ ") and above.startswith("    "):
            return f"{what} at character {line.index('^') - 3}"
    return what


def _schema_problem(message: str) -> str:
    if "coerce_one_of" in message:
        return (
            "oneOf: the alternatives must exclude each other evidently, such as by type or by a const of one property; "
            "use anyOf"
        )
    head = first_line(message)
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", head)


def _regex_error(lines: Sequence[str]) -> str:
    return next((line[7:] for line in lines if line.startswith("error: ")), "")


def first_line(message: str, most: int = 300) -> str:
    """The first line, with what is wrong with a pattern if the library says so in a later line."""
    head, *rest = message.splitlines() or [""]
    if head.endswith(_DRAWN):
        head = head.removesuffix(_DRAWN) + _regex_error(rest)
    return head.strip()[:most]
