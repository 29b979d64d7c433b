"""AnswerState: free text up to the end token. Caption uses it as it is, query after its reasoning."""

from __future__ import annotations

from typing import Any

from ..detokenize import StreamingText
from ..events import StreamUpdate
from ..step import StepToken, TokenRule
from .base import Advance, SkillContext


class AnswerState:
    """The answer id is suppressed from the second token on; the first is unmasked, as in the reference
    (moondream.md section 15). Coordinate ids are ordinary tokens here."""

    def __init__(self, key: str, context: SkillContext) -> None:
        self._key = key
        self._eos = context.model.ids.eos_id
        self._first = TokenRule(stop=self._eos)
        self._rest = TokenRule(stop=self._eos, suppressed=(context.model.ids.answer_id,))
        self._streaming = StreamingText(context.codec)
        self._ids: list[int] = []
        self._pieces: list[str] = []

    def rule(self) -> TokenRule:
        return self._rest if self._ids else self._first

    def consume(self, token: StepToken) -> Advance:
        if token.id == self._eos:
            return Advance(self._flush(), "stop")
        self._ids.append(token.id)
        return Advance(self._emit(self._streaming.push(token.id)))

    def stop_at_limit(self) -> Advance:
        return Advance(self._flush(), "length")

    def output(self) -> dict[str, Any]:
        return {self._key: "".join(self._pieces)}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def _flush(self) -> list[StreamUpdate]:
        return self._emit(self._streaming.finish())

    def _emit(self, text: str) -> list[StreamUpdate]:
        if not text:
            return []
        self._pieces.append(text)
        return [StreamUpdate(text=text)]
