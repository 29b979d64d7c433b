"""Grammars: compiles constraints to automata that give the tokens allowed next.

The library llguidance does the work: its parser follows the text token by token, and gives a bit for each id of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import FieldPath, InvalidRequest, KestrelError, SkillUnavailable
from ...types.constraint import Constraint
from ...types.info import MaskCounts
from ...types.step import RuleWait, TokenRule
from .grammar_process import GrammarProcess
from .grammar_text import (
    AVAILABLE,
    NOTHING_FOLLOWS,
    UnlockedMatchers,
    first_line,
    lark_of,
    new_matcher,
    new_tokenizer,
)
from .mask_threads import MaskThreads

if TYPE_CHECKING:
    import llguidance

    from ..base import TextCodec

_QUICK_S = 0.001
"""Seconds of a mask on average, at most, of a quick matcher."""
_EXTRA_S = 0.01
"""More seconds for all masks together: a state that is reached for the first time takes longer."""


class Matcher(RuleWait):
    """Follows one text. After ``take``, the next mask must be computed: by ``begin``, in another thread."""

    def __init__(self, inner: llguidance.LLMatcher, grammar: Grammar) -> None:
        self._inner = inner
        self._grammar = grammar
        self._mask: bytes | None = grammar.first
        self._token: int | None = None
        """The last one, which ``inner`` does not have yet."""
        self._error: KestrelError | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._num_masks = 0
        self.principal, self.field = grammar.principal, grammar.field
        self.seconds = 0.0
        """Processor time that its masks have taken."""

    @property
    def is_quick(self) -> bool:
        """Whether its masks take an ordinary time."""
        return self.seconds <= _EXTRA_S + _QUICK_S * self._num_masks

    @property
    def mask(self) -> bytes | None:
        """The ids allowed next, as TokenRule.mask. The end id is among them if the text may end here. None: it is not
        computed yet.

        Raises InvalidRequest or ConstraintsCostly if the constraint takes too long to follow.
        """
        if self._error is not None:
            raise self._error
        return self._mask

    def take(self, token_id: int) -> None:
        """Takes a token that the last mask allows."""
        assert self._mask is not None, "the mask before is known"
        self._mask, self._token = None, token_id

    def begin(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._grammar.threads.put(self)

    def drop(self) -> None:
        self._grammar.threads.drop(self)

    def compute(self) -> None:
        """Computes the mask after the last token. Raises InvalidRequest."""
        assert self._token is not None
        if self.is_quick:
            taken = self._inner.consume_token(self._token)
        else:
            taken = self._grammar.unlocked.consume_token(self._inner, self._token)
        self._num_masks += 1
        if taken:
            mask = self._inner.compute_bitmask()
        if not taken or self._inner.is_error():
            message = first_line(self._inner.get_error())
            if message == NOTHING_FOLLOWS:
                raise InvalidRequest(
                    self.field, "has a part that matches no text, and this answer has come to it"
                )
            raise InvalidRequest(self.field, f"is too complex for this text: {message}")
        self._mask = mask[: len(self._grammar.first)]  # The library may add a word.

    def done(self, error: KestrelError | None) -> None:
        """The mask, or ``error``, is there."""
        self._error = error
        self._on_end()


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled constraint. ``first``: the mask at the beginning of a text. ``field``: the setting that errors name.
    ``principal``: for whom its matchers work. For one event loop."""

    template: llguidance.LLMatcher
    first: bytes
    field: FieldPath
    threads: MaskThreads
    unlocked: UnlockedMatchers
    principal: str = ""

    def of(self, principal: str) -> Grammar:
        """The same for ``principal``."""
        return replace(self, principal=principal)

    def start(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return Matcher(self.template.deep_copy(), self)


class Grammars:
    """Compiles constraints for one vocabulary, in one thread."""

    def __init__(
        self,
        codec: TextCodec,
        vocab_size: int,
        eos_id: int,
        threads: MaskThreads | None = None,
        *,
        confine: str = "auto",
    ) -> None:
        """``threads``: those that compute masks. ``confine``: as RuntimeConfig.confine."""
        self._codec, self._vocab_size, self._eos_id = codec, vocab_size, eos_id
        self._threads = threads or MaskThreads()
        self._process = GrammarProcess(confine)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._unlocked: UnlockedMatchers | None = None

    @property
    def counts(self) -> MaskCounts:
        """The work of all matchers. From any thread."""
        return self._threads.counts

    def compile(self, constraint: Constraint) -> Grammar:
        """Compiles ``constraint``. The first call builds a tree of the vocabulary and starts a process, which takes up
        to a second.

        Raises InvalidRequest naming field and place, SkillUnavailable if the library is not installed or the tokenizer
        does not suit it, and RuntimeFailure if no process can be started.
        """
        if not AVAILABLE:
            raise SkillUnavailable(
                "constraint",
                "needs the package llguidance on the server, which is not installed there",
            )
        field = ("constraint", constraint.kind)
        problem = self._process.problem(constraint)
        if problem:
            raise InvalidRequest(field, problem)
        if self._tokenizer is None:
            self._tokenizer = self._new_tokenizer()
            self._unlocked = UnlockedMatchers(self._tokenizer)
        assert self._unlocked is not None
        matcher = new_matcher(self._tokenizer, lark_of(constraint))
        first = matcher.compute_bitmask()[: TokenRule.mask_bytes(self._vocab_size)]
        if matcher.is_error():
            raise InvalidRequest(field, f"is too complex: {first_line(matcher.get_error())}")
        return Grammar(matcher, first, field, self._threads, self._unlocked)

    def close(self) -> None:
        """Ends the process and the threads."""
        self._process.close()
        self._threads.close()

    def _new_tokenizer(self) -> llguidance.LLTokenizer:
        tokens = [self._codec.token_bytes(token) for token in range(self._vocab_size)]
        try:
            return new_tokenizer(tokens, self._eos_id)
        except Exception as error:  # The library raises ValueError and, from its core, other types.
            raise SkillUnavailable(
                "constraint", f"the model's tokenizer does not permit constraints: {error}"
            ) from error
