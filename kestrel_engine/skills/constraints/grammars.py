"""Grammars: compiles constraints to automata that give the tokens allowed next. Owns the cache of compiled ones.

The library llguidance does the work: its parser follows the text token by token, and gives a bit for each id of the
vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from ... import clock
from ...errors import InvalidRequest, SkillUnavailable
from ...types.constraint import Constraint
from ...types.info import MaskCounts
from ...types.step import TokenRule
from .grammar_process import GrammarProcess
from .grammar_text import AVAILABLE, first_line, lark_of, new_matcher, new_tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 32
"""Compiled constraints that are kept."""


class _Codec(Protocol):
    def token_bytes(self, token_id: int, /) -> bytes: ...


class Matcher:
    """Follows one text. Belongs to one thread at a time."""

    def __init__(self, inner: llguidance.LLMatcher, first: bytes, counts: MaskCounts) -> None:
        """``first``: the mask at the beginning. ``counts``: the work of the matcher is added to it."""
        self._inner = inner
        self._counts = counts
        self._first: bytes | None = first
        self._size = len(first)

    def mask(self) -> bytes:
        """The ids allowed next, as TokenRule.mask. The end id is among them if the text may end here.

        Raises InvalidRequest if the constraint takes too long to follow.
        """
        self._counts.masks += 1
        if self._first is not None:
            return self._first
        began = clock.now()
        mask = self._inner.compute_bitmask()
        self._counts.seconds += clock.now() - began
        if self._inner.is_error():
            self._fail()
        return mask[: self._size]  # The library may add a word.

    def take(self, token_id: int) -> None:
        """Takes a token that the last mask allows. Raises InvalidRequest as ``mask``."""
        self._first = None
        began = clock.now()
        taken = self._inner.consume_token(token_id)
        self._counts.seconds += clock.now() - began
        if not taken:
            self._fail()

    def _fail(self) -> None:
        raise InvalidRequest(
            "constraint", f"is too complex for this text: {first_line(self._inner.get_error())}"
        )


class Grammar:
    """A compiled constraint. Safe to use from any thread."""

    def __init__(self, template: llguidance.LLMatcher, vocab_size: int, counts: MaskCounts) -> None:
        self._template, self._counts = template, counts
        self._first = template.compute_bitmask()[: TokenRule.mask_bytes(vocab_size)]

    def start(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return Matcher(self._template.deep_copy(), self._first, self._counts)


class Grammars:
    """Compiles constraints for one vocabulary. Belongs to one thread, but for ``counts``: the work of all matchers."""

    def __init__(self, codec: _Codec, vocab_size: int, eos_id: int) -> None:
        self._codec, self._vocab_size, self._eos_id = codec, vocab_size, eos_id
        self.counts = MaskCounts()
        self._process = GrammarProcess()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, Grammar] = OrderedDict()

    def compile(self, constraint: Constraint) -> Grammar:
        """Compiles ``constraint``, or takes it from the cache. The first call builds a tree of the vocabulary and
        starts a process, which takes up to a second.

        Raises InvalidRequest naming field and place, SkillUnavailable if the library is not installed or the tokenizer
        does not suit it, and RuntimeFailure if no process can be started.
        """
        if not AVAILABLE:
            raise SkillUnavailable(
                "constraint",
                "needs the package llguidance on the server, which is not installed there",
            )
        grammar = self._compiled.get(constraint)
        if grammar is None:
            grammar = Grammar(self._compile(constraint), self._vocab_size, self.counts)
            if len(self._compiled) == MAX_CACHED:
                self._compiled.popitem(last=False)
            self._compiled[constraint] = grammar
        self._compiled.move_to_end(constraint)
        return grammar

    def close(self) -> None:
        """Ends the process."""
        self._process.close()

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        field = f"constraint.{constraint.kind}"
        problem = self._process.problem(constraint)
        if problem:
            raise InvalidRequest(field, problem)
        if self._tokenizer is None:
            self._tokenizer = self._new_tokenizer()
        matcher = new_matcher(self._tokenizer, lark_of(constraint))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(field, f"is too complex: {first_line(matcher.get_error())}")
        return matcher

    def _new_tokenizer(self) -> llguidance.LLTokenizer:
        tokens = [self._codec.token_bytes(token) for token in range(self._vocab_size)]
        try:
            return new_tokenizer(tokens, self._eos_id)
        except Exception as error:  # The library raises ValueError and, from its core, other types.
            raise SkillUnavailable(
                "constraint", f"the model's tokenizer does not permit constraints: {error}"
            ) from error
