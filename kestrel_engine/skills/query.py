"""Query: answers a question about an image, or without one; optionally writes reasoning with points first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import ContextLengthError, InvalidRequest
from ..types.events import FinishReason, StreamUpdate, TokenLogprob
from ..types.requests import (
    IMAGE_PLACE,
    Coord,
    ImagePlace,
    Token,
    check_spatial_refs,
    checked_list,
    spatial_tokens,
)
from ..types.step import RuleWait, StepToken, TokenRule
from .base import SkillContext, SkillControl, SkillOutput, any_text, checked_text
from .declaration import (
    FLAG,
    REASONING_SETTINGS,
    SPATIAL_REFS,
    TEXT,
    TEXT_SETTINGS,
    names_of,
    object_schema,
    settings_schema,
)
from .presupposed import Presupposed
from .settings import read_text_settings, reject_unknown
from .text.answer import AnswerOutput, answer_control
from .text.detokenize import StreamingText
from .text.request import TextRequest

MAX_TURNS = 64
MAX_PRESUPPOSED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest(TextRequest):
    """``max_reasoning_tokens``: the caller's limit on the reasoning. Then ``max_tokens`` bounds the answer alone."""

    reasoning: bool = False
    max_reasoning_tokens: int | None = None

    @property
    def tokens_ahead(self) -> int:
        # The last one separates the reasoning from the answer.
        return 0 if self.max_reasoning_tokens is None else self.max_reasoning_tokens + 1

    @property
    def token_limits(self) -> Iterable[tuple[str, int, str]]:
        yield from super(QueryRequest, self).token_limits
        if (most := self.max_reasoning_tokens) is not None:
            rest = 1 + (self.max_tokens or 1)
            yield "max_reasoning_tokens", most + rest, f"{most} + {rest} for the answer"

    def most_reasoning(self, token_limit: int | None, context: SkillContext) -> int:
        """The limit on the tokens of the reasoning. ``token_limit``: on all tokens; None: no limit but the wanted."""
        if self.max_reasoning_tokens is not None:
            return self.max_reasoning_tokens
        wanted = self.max_tokens or context.defaults.max_tokens
        # Where the context is too short for both, reasoning may take half of what there is.
        return wanted if token_limit is None else min(wanted, max(1, (token_limit - 1) // 2))


class QuerySkill:
    """Arguments: question, reasoning (default False), spatial_refs, history, image_turns, system, presupposes,
    answer_start. Output: {"answer", "reasoning"?}.

    ``presupposes``: names of objects that the question is about. If an image has no such object, the answer is empty.

    ``system``: instructions for the whole conversation. They precede the first question, with a blank line between.

    ``history``: earlier turns as pairs of question and answer, oldest first. Each is rendered as it was asked and
    answered directly (moondream.md section 13).

    ``image_turns``: for each image of the request, in order, the turn that shows it: 0 is the first turn, and
    ``len(history)`` the question. The images of a turn precede its text. Without it, the first turn shows all images.

    ``answer_start``: the beginning of the answer, which the model continues. The output has only what follows.

    max_tokens bounds the reasoning and the answer separately, as in the reference, unless max_reasoning_tokens bounds
    the reasoning. Stop strings and a constraint apply to the answer only;
    """

    name = "query"
    description = "Answers a question, about images or without one."
    arguments = object_schema(
        {
            "question": TEXT,
            "reasoning": FLAG,
            "spatial_refs": SPATIAL_REFS,
            "history": {
                "type": "array",
                "items": {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 2,
                    "maxItems": 2,
                },
                "maxItems": MAX_TURNS,
            },
            "image_turns": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "system": {"type": "string"},
            "presupposes": {"type": "array", "items": TEXT, "maxItems": MAX_PRESUPPOSED},
            "answer_start": {"type": "string"},
        },
        required=("question",),
    )
    settings = settings_schema(TEXT_SETTINGS, REASONING_SETTINGS)

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> QueryRequest:
        reject_unknown(arguments, names_of(self.arguments))
        question = checked_text("question", arguments.get("question"), context)
        reasoning = arguments.get("reasoning", False)
        if not isinstance(reasoning, bool):
            raise InvalidRequest("reasoning", f"{reasoning!r} is not true or false")
        refs = check_spatial_refs(arguments.get("spatial_refs"))
        read, fields = read_text_settings(settings, context, names_of(self.settings))
        if read.max_reasoning_tokens is not None and not reasoning:
            raise InvalidRequest(
                "max_reasoning_tokens", "is set without reasoning; set reasoning to true"
            )
        templates = context.model.templates
        suffix = templates.query_reasoning_suffix if reasoning else templates.query_suffix
        before = _system_text(arguments.get("system"), context)
        turns = _earlier_turns(arguments.get("history"), context, before, question)
        shown = _image_turns(arguments.get("image_turns"), len(turns))
        prompt = (
            *_rendered(turns, shown),
            *templates.query_prefix,
            *spatial_tokens(refs),
            *context.codec.encode(question if turns else before + question),
            *suffix,
            *_answer_start(arguments.get("answer_start"), reasoning, context),
        )
        objects = _presupposed(arguments.get("presupposes"), context)
        # A reasoning phase, the answer id after it, and an answer.
        wanted = read.max_tokens or context.defaults.max_tokens
        most_reasoning = read.max_reasoning_tokens or wanted
        return QueryRequest(
            skill=self.name,
            prompt_suffix=prompt,
            prompt_field="question",
            needs_image=bool(refs or objects),
            presupposed=Presupposed(objects, read.max_absence) if objects else None,
            max_images=None,
            num_images=None if shown is None else len(shown),
            max_reasoning_tokens=read.max_reasoning_tokens,
            token_budget=most_reasoning + 1 + wanted if reasoning else None,
            reasoning=reasoning,
            **fields,
        )

    def new_control(
        self, request: QueryRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        if not request.reasoning:
            return answer_control(request, context)
        wanted = request.max_tokens or context.defaults.max_tokens
        return ReasoningControl(
            request.most_reasoning(max_tokens, context),
            wanted,
            context,
            answer_control(request, context),
            has_own_limit=request.max_reasoning_tokens is not None,
        )

    def new_output(self, request: QueryRequest, context: SkillContext) -> SkillOutput:
        stop, logprobs = request.stop, request.logprobs
        if request.reasoning:
            most = request.most_reasoning(request.token_limit, context)
            return ReasoningOutput(context, most, stop, logprobs=logprobs)
        return AnswerOutput("answer", context, stop, logprobs=logprobs)


def _presupposed(objects: Any, context: SkillContext) -> tuple[str, ...]:
    """The names of the objects that the question presupposes. Raises InvalidRequest."""
    if objects is None:
        return ()
    field, what = "presupposes", "a list of names of objects"
    names = checked_list(field, objects, what, most=MAX_PRESUPPOSED, noun="names")
    return tuple(checked_text((field, index), name, context) for index, name in enumerate(names))


def _system_text(system: Any, context: SkillContext) -> str:
    """The text that precedes the first question; empty for none. Raises InvalidRequest."""
    text = "" if system is None else any_text("system", system, context).strip()
    return f"{text}\n\n" if text else ""


def _answer_start(start: Any, reasoning: bool, context: SkillContext) -> Sequence[int]:
    """The ids of the beginning of the answer. Raises InvalidRequest."""
    text = "" if start is None else any_text("answer_start", start, context)
    if text and reasoning:
        raise InvalidRequest("answer_start", "is set with reasoning, which comes before the answer")
    return context.codec.encode(text) if text else ()


def _earlier_turns(history: Any, context: SkillContext, before: str, last: str) -> list[list[int]]:
    """The ids of each turn of ``history``. ``before``: precedes the first question. ``last``: the question that
    follows. Raises InvalidRequest, ContextLengthError."""
    if history is None:
        return []
    what = "a list of pairs of question and answer"
    pairs: list[tuple[str, str]] = []
    for index, turn in enumerate(
        checked_list("history", history, what, most=MAX_TURNS, noun="turns")
    ):
        place = ("history", index)
        if isinstance(turn, str) or not isinstance(turn, Sequence) or len(turn) != 2:
            raise InvalidRequest(place, "must be a pair of question and answer")
        question = checked_text((*place, "question"), turn[0], context)
        pairs.append((question, any_text((*place, "answer"), turn[1], context)))
    # Checked before anything is encoded: that would take seconds for texts that no context holds.
    size = sum(len(text.encode()) for text in (before, last, *itertools.chain(*pairs)))
    limit = context.defaults.max_text_bytes
    if pairs and size > limit:
        raise ContextLengthError(
            "history",
            f"has {size} UTF-8 bytes with the question and the system text, the limit is {limit}",
            value=size,
            limit=limit,
        )
    templates = context.model.templates
    return [
        [
            *templates.query_prefix,
            *context.codec.encode(question if index else before + question),
            *templates.query_suffix,
            *context.codec.encode(answer),
        ]
        for index, (question, answer) in enumerate(pairs)
    ]


def _image_turns(image_turns: Any, num_turns: int) -> list[int] | None:
    """The turn of each image. ``num_turns``: the earlier turns. Raises InvalidRequest."""
    if image_turns is None:
        return None
    field, before = "image_turns", 0
    turns = checked_list(field, image_turns, "a list of the numbers of turns")
    for index, turn in enumerate(turns):
        if not isinstance(turn, int) or isinstance(turn, bool) or not before <= turn <= num_turns:
            raise InvalidRequest(
                (field, index), f"{turn!r} is not a whole number from {before} to {num_turns}"
            )
        before = turn
    return list(turns)


def _rendered(
    turns: Sequence[Sequence[int]], shown: Sequence[int] | None
) -> list[Token | ImagePlace]:
    """The earlier turns, and the places of all images that come after the first turn begins."""
    tokens: list[Token | ImagePlace] = []
    for index, ids in enumerate((*turns, ())):
        if index and shown is not None:
            tokens += [IMAGE_PLACE] * shown.count(index)
        tokens += ids
    return tokens


class ReasoningControl:
    """Reasoning up to the answer id, then the answer. It ends by "length" if either was cut. A reasoning that ended at
    a limit of its own (``has_own_limit``) does not count as cut: the caller asked for that.

    Any token may be the answer id, so a rule is known only once the token before it was seen. End-of-text is no stop
    here: as the first token it is fed, later it is suppressed. When reasoning runs out of tokens the answer id is
    forced and the answer follows.
    """

    def __init__(
        self,
        max_reasoning: int,
        max_answer: int,
        context: SkillContext,
        answer: SkillControl,
        *,
        has_own_limit: bool = False,
    ) -> None:
        ids = context.model.ids
        self._answer_id = ids.answer_id
        self._max_reasoning, self._max_answer = max_reasoning, max_answer
        self._has_own_limit = has_own_limit
        self._first, self._rest = _reasoning_rules(ids.eos_id, ids.size_id)
        self._answer = answer
        self._num_accepted = 0
        self._answer_from: int | None = None
        """Index of the answer's first token."""
        self._was_cut = False
        """The reasoning had no end of its own, and no limit of its own."""

    def rule(self, index: int) -> TokenRule | RuleWait | None:
        if self._answer_from is not None and index >= self._answer_from:
            return self._answer.rule(index - self._answer_from)
        if index > self._num_accepted:
            return None
        if index == self._max_reasoning:
            return TokenRule(forced=self._answer_id)
        return self._rest if index else self._first

    def accept(self, token: StepToken) -> FinishReason | None:
        self._num_accepted += 1
        if self._answer_from is None:
            if token.id == self._answer_id:
                self._answer_from = self._num_accepted
                is_forced = self._num_accepted > self._max_reasoning
                self._was_cut = is_forced and not self._has_own_limit
            return None
        finish = self._answer.accept(token)
        if finish is None and self._num_accepted - self._answer_from == self._max_answer:
            return "length"
        return "length" if finish and self._was_cut else finish


@lru_cache(maxsize=64)
def _reasoning_rules(eos_id: int, size_id: int) -> tuple[TokenRule, TokenRule]:
    """The rules of the first token, and of the rest. All requests share them, as those of objects (locate.py)."""
    return TokenRule(read_coord=True), TokenRule(suppressed=(eos_id, size_id), read_coord=True)


class ReasoningOutput(SkillOutput):
    """Reasoning text with the points that ground it, then the answer.

    A coordinate id carries its value; pairs of them ground the chunk of text in which they occur; the ids that start
    and end a ground open a new chunk (moondream.md section 8). The reasoning has a finish_reason: "stop" if the model
    ended it, "length" if ``max_reasoning`` did, None if it did not end, because the request ended within it.
    """

    def __init__(
        self,
        context: SkillContext,
        max_reasoning: int,
        stop: tuple[str, ...] = (),
        *,
        logprobs: bool = False,
    ) -> None:
        """``stop``, ``logprobs``: of the answer."""
        self._context, self._max_reasoning = context, max_reasoning
        self._ids = context.model.ids
        self._reasoning_ids: list[int] = []
        self._chunks: list[_Chunk] = [_Chunk(context)]
        self._answer = AnswerOutput("answer", context, stop, logprobs=logprobs)
        self._is_answering = False

    def push(self, token: StepToken) -> list[StreamUpdate]:
        if self._is_answering:
            # After reasoning that was cut the end token comes here: the request ends by "length".
            return [] if token.id == self._ids.eos_id else self._answer.push(token)
        if token.id == self._ids.answer_id:
            self._is_answering = True
            return self._reasoning(self._chunks[-1].finish())
        before = ""
        if token.id in (self._ids.start_ground_points_id, self._ids.end_ground_id):
            before = self._chunks[-1].finish()
            self._chunks.append(_Chunk(self._context))
        self._reasoning_ids.append(token.id)
        return self._reasoning(before + self._chunks[-1].push(token))

    def finish(self) -> list[StreamUpdate]:
        if self._is_answering:
            return self._answer.finish()
        return self._reasoning(self._chunks[-1].finish())

    def output(self) -> dict[str, Any]:
        grounding, start = [], 0
        for chunk in self._chunks:
            end = start + len(chunk.text)
            if chunk.points:
                grounding.append({"start_idx": start, "end_idx": end, "points": chunk.points})
            start = end
        reason: FinishReason | None = None
        if self._is_answering:
            was_cut = len(self._reasoning_ids) == self._max_reasoning
            reason = "length" if was_cut else "stop"
        text = "".join(chunk.text for chunk in self._chunks)
        reasoning = {"text": text, "grounding": grounding, "finish_reason": reason}
        return {**self._answer.output(), "reasoning": reasoning}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self._reasoning_ids, *self._answer.token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        return len(self._reasoning_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self._answer.logprobs

    @property
    def is_complete(self) -> bool:
        return self._answer.is_complete

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
