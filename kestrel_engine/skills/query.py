"""Query: answers a question about a picture, or without one; optionally thinks aloud and points first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detokenize import StreamingText
from ..errors import InvalidRequest
from ..events import StreamUpdate
from ..requests import Coord, Prompt, check_spatial_refs, spatial_tokens
from ..step import StepToken, TokenRule
from .answer import AnswerState
from .base import Advance, SkillContext, SkillRequest, SkillState, checked_text
from .settings import read_settings, reject_unknown


class QuerySkill:
    """Arguments: question, reasoning (default False), spatial_refs. Output: {"answer", "reasoning"?}.

    max_tokens bounds the reasoning and the answer separately, as in the reference.
    """

    name = "query"

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SkillRequest:
        reject_unknown(arguments, frozenset({"question", "reasoning", "spatial_refs"}))
        question = checked_text("question", arguments.get("question"), context)
        reasoning = arguments.get("reasoning", False)
        if not isinstance(reasoning, bool):
            raise InvalidRequest("reasoning", f"{reasoning!r} is not true or false")
        refs = check_spatial_refs(arguments.get("spatial_refs"))
        read = read_settings(settings, context.defaults, greedy=False)
        templates = context.model.templates
        suffix = templates.query_reasoning_suffix if reasoning else templates.query_suffix
        prompt: Prompt = (
            *templates.query_prefix,
            *spatial_tokens(refs),
            *context.codec.encode(question),
            *suffix,
        )
        # A reasoning phase, the answer id after it, and an answer.
        wanted = read.max_tokens or context.defaults.max_tokens
        return SkillRequest(
            skill=self.name,
            prompt_suffix=prompt,
            sampling=read.sampling,
            seed=read.seed,
            needs_image=bool(refs),
            max_tokens=read.max_tokens,
            token_budget=2 * wanted + 1 if reasoning else None,
            options={"reasoning": reasoning},
        )

    def new_state(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> SkillState:
        if not request.options["reasoning"]:
            return AnswerState("answer", context)
        wanted = request.max_tokens or context.defaults.max_tokens
        # Where the context is too short for both, reasoning may take half of what there is.
        return ReasoningState(min(wanted, max(1, (max_tokens - 1) // 2)), wanted, context)


class ReasoningState:
    """Reasoning up to the answer id, then the answer.

    A coordinate id reads its value; pairs of them ground the chunk of text in which they occur; the ids that start and
    end a ground open a new chunk (moondream.md section 8). End-of-text is no stop here: as the first token it is fed,
    later it is suppressed. When reasoning runs out of tokens the answer id is forced and the answer follows.
    """

    def __init__(self, max_reasoning: int, max_answer: int, context: SkillContext) -> None:
        self._context = context
        self._ids = context.model.ids
        self._max_reasoning = max_reasoning
        self._max_answer = max_answer
        self._reasoning_ids: list[int] = []
        self._chunks: list[_Chunk] = [_Chunk(context)]
        self._answer: AnswerState | None = None

    def rule(self) -> TokenRule:
        if self._answer is not None:
            return self._answer.rule()
        if len(self._reasoning_ids) == self._max_reasoning:
            return TokenRule(forced=self._ids.answer_id)
        if not self._reasoning_ids:
            return TokenRule(read_coord=True)
        return TokenRule(suppressed=(self._ids.eos_id, self._ids.size_id), read_coord=True)

    def consume(self, token: StepToken) -> Advance:
        if self._answer is not None:
            advance = self._answer.consume(token)
            if advance.finish is None and len(self._answer.token_ids) == self._max_answer:
                limit = self._answer.stop_at_limit()
                return Advance(advance.updates + limit.updates, limit.finish)
            return advance
        if token.id == self._ids.answer_id:
            self._answer = AnswerState("answer", self._context)
            return Advance(self._reasoning(self._chunks[-1].finish()))
        before = ""
        if token.id in (self._ids.start_ground_points_id, self._ids.end_ground_id):
            before = self._chunks[-1].finish()
            self._chunks.append(_Chunk(self._context))
        self._reasoning_ids.append(token.id)
        return Advance(self._reasoning(before + self._chunks[-1].push(token)))

    def stop_at_limit(self) -> Advance:
        if self._answer is not None:
            return self._answer.stop_at_limit()
        return Advance(self._reasoning(self._chunks[-1].finish()), "length")

    def output(self) -> dict[str, Any]:
        grounding, start = [], 0
        for chunk in self._chunks:
            end = start + len(chunk.text)
            if chunk.points:
                grounding.append({"start_idx": start, "end_idx": end, "points": chunk.points})
            start = end
        text = "".join(chunk.text for chunk in self._chunks)
        answer = self._answer.output()["answer"] if self._answer is not None else ""
        return {"answer": answer, "reasoning": {"text": text, "grounding": grounding}}

    @property
    def token_ids(self) -> tuple[int, ...]:
        answer = () if self._answer is None else self._answer.token_ids
        return (*self._reasoning_ids, *answer)

    @staticmethod
    def _reasoning(text: str) -> list[StreamUpdate]:
        return [StreamUpdate(reasoning=text)] if text else []


class _Chunk:
    """A stretch of reasoning text and the coordinates in it."""

    def __init__(self, context: SkillContext) -> None:
        self._streaming = StreamingText(context.codec)
        self._coordinates: list[float] = []
        self.text = ""

    @property
    def points(self) -> list[tuple[float, float]]:
        """Coordinates two by two; an unpaired last one is dropped."""
        pairs = zip(self._coordinates[::2], self._coordinates[1::2], strict=False)
        return list(pairs)

    def push(self, token: StepToken) -> str:
        if isinstance(token.value, Coord):
            self._coordinates.append(token.value.value)
        return self._add(self._streaming.push(token.id))

    def finish(self) -> str:
        return self._add(self._streaming.finish())

    def _add(self, text: str) -> str:
        self.text += text
        return text
