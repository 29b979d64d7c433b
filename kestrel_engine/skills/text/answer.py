"""Free text up to the end token. Caption uses it as it is, query after its reasoning."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...types.events import FinishReason, StreamUpdate, TokenLogprob, alternatives
from ...types.step import RuleWait, StepToken, TokenRule
from ..base import SkillContext, SkillControl, SkillOutput
from ..constraints.grammars import Grammar
from .detokenize import StreamingText
from .penalties import PenalizingControl
from .request import TextRequest
from .stop_strings import StopStrings


class AnswerControl:
    """The answer id is suppressed from the second token on; the first is unmasked, as in the reference
    (moondream.md section 14). Coordinate ids are ordinary tokens here."""

    def __init__(self, context: SkillContext, top: int = 0) -> None:
        """``top``: how many alternatives each token has (TokenRule.top)."""
        ids = context.model.ids
        self._eos = ids.eos_id
        self._first, self._rest = _rules(ids.eos_id, ids.answer_id, top)

    def rule(self, index: int) -> TokenRule:
        return self._rest if index else self._first

    def accept(self, token: StepToken) -> FinishReason | None:
        return "stop" if token.id == self._eos else None


@lru_cache(maxsize=64)
def _rules(eos_id: int, answer_id: int, top: int) -> tuple[TokenRule, TokenRule]:
    """The rules of the first token, and of the rest. All requests share them, as those of objects (locate.py)."""
    return TokenRule(stop=eos_id, top=top), TokenRule(stop=eos_id, suppressed=(answer_id,), top=top)


class ConstrainedAnswerControl:
    """An answer whose tokens a grammar restricts. It ends with the end token, which the grammar allows where the text
    may end. No rule is known before the token ahead of it was accepted."""

    def __init__(self, context: SkillContext, grammar: Grammar, top: int = 0) -> None:
        ids = context.model.ids
        self._eos, self._top = ids.eos_id, top
        self._matcher = grammar.start()
        self._num_accepted = 0

    def rule(self, index: int) -> TokenRule | RuleWait | None:
        if index > self._num_accepted:
            return None
        mask = self._matcher.mask
        if mask is None:
            return self._matcher
        return TokenRule(stop=self._eos, mask=mask, top=self._top)

    def accept(self, token: StepToken) -> FinishReason | None:
        self._num_accepted += 1
        if token.id == self._eos:
            return "stop"
        self._matcher.take(token.id)
        return None


def answer_control(request: TextRequest, context: SkillContext) -> SkillControl:
    """The control of an answer with the request's constraint, penalties and alternatives."""
    top, constraint = request.top_logprobs, request.constraint
    control: SkillControl
    if constraint is None:
        control = AnswerControl(context, top)
    else:
        assert isinstance(constraint, Grammar), "constraints are compiled first"
        control = ConstrainedAnswerControl(context, constraint, top)
    if request.penalties is None:
        return control
    return PenalizingControl(control, request.penalties, request.prompt_suffix, context)


class AnswerOutput(SkillOutput):
    """Text under ``key``, streamed as it becomes certain. It ends before the first of the ``stop`` strings.

    The token that completes a stop string is the last of ``token_ids``. ``logprobs``: whether to keep the tokens'
    log-probabilities, with the alternatives for which their rules ask.
    """

    def __init__(
        self, key: str, context: SkillContext, stop: tuple[str, ...] = (), *, logprobs: bool = False
    ) -> None:
        self._key = key
        self._codec = context.codec
        self._streaming = StreamingText(context.codec)
        self._stop = StopStrings(stop) if stop else None
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] | None = [] if logprobs else None
        self._num_sent = 0
        """Tokens of ``_logprobs`` that updates have held."""

    def push(self, token: StepToken) -> list[StreamUpdate]:
        self._ids.append(token.id)
        if self._logprobs is not None:
            assert token.logprob is not None, "the runtime gives log-probabilities"
            name = self._codec.token_bytes
            top = alternatives(token.top, name) if token.top else ()
            self._logprobs.append(TokenLogprob(token.id, name(token.id), token.logprob, top))
        return self._emit(self._streaming.push(token.id))

    def finish(self) -> list[StreamUpdate]:
        return self._emit(self._streaming.finish(), is_last=True)

    def output(self) -> dict[str, Any]:
        return {self._key: "".join(self._pieces)}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return None if self._logprobs is None else tuple(self._logprobs)

    @property
    def is_complete(self) -> bool:
        return self._stop is not None and self._stop.found

    def _emit(self, text: str, *, is_last: bool = False) -> list[StreamUpdate]:
        if self._stop is not None:
            text = self._stop.push(text) + (self._stop.finish() if is_last else "")
        tokens = tuple((self._logprobs or ())[self._num_sent :])
        if not text and not (is_last and tokens):  # The last tokens may have no text.
            return []
        self._pieces.append(text)
        self._num_sent += len(tokens)
        return [StreamUpdate(text=text, tokens=tokens)]
