"""Lessons: the tokens of an example, exactly as a skill builds its prompt, and what is to follow which token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...skills.base import SkillContext
from ...skills.registry import SkillRegistry
from ...types.requests import Coord, ImagePlace, Size, Token
from .examples import BoxExample, CaptionExample, Example, PointExample, QuestionExample

_SKILLS = SkillRegistry.default()


@dataclass(frozen=True, slots=True)
class WordTarget:
    """The id ``id`` follows the token at ``at``."""

    at: int
    id: int


@dataclass(frozen=True, slots=True)
class EndTarget:
    """After the token at ``at``, the model decides between the end and one more object. ``is_end``: the right decision.
    ``is_pair``: it decides between the end token and the coordinate token only, otherwise any other token than the end
    means one more object (skills/objects/locate.py)."""

    at: int
    is_end: bool
    is_pair: bool


@dataclass(slots=True)
class Lesson:
    """``tokens`` follow BOS and the image. Each coordinate and size among them is read after the token before it.
    ``weight``: multiplies the lesson's losses."""

    tokens: list[Token]
    weight: float = 1.0
    words: list[WordTarget] = field(default_factory=list)
    ends: list[EndTarget] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add_end(self, *, is_end: bool, is_pair: bool) -> None:
        self.ends.append(EndTarget(len(self.tokens) - 1, is_end, is_pair))


def write(example: Example, context: SkillContext, weight: float = 1.0) -> Lesson:
    """Returns the lesson of an example. Raises InvalidRequest for a text that the skill refuses."""
    match example:
        case QuestionExample(question, answer, ids):
            lesson = _prompt("query", {"question": question}, context, weight)
            _say(lesson, context.codec.encode(answer) if ids is None else ids, context)
        case CaptionExample(length, ids):
            lesson = _prompt("caption", {"length": length}, context, weight)
            _say(lesson, ids, context)
        case PointExample(name, points):
            lesson = _prompt("point", {"object": name}, context, weight)
            for x, y in points:
                _end(lesson, context, is_end=False)
                lesson.tokens += (Coord(x), Coord(y))
            _end(lesson, context, is_end=True)
        case BoxExample(name, boxes):
            lesson = _prompt("detect", {"object": name}, context, weight)
            for x0, y0, x1, y1 in boxes:
                _end(lesson, context, is_end=False)
                centre = Coord((x0 + x1) / 2), Coord((y0 + y1) / 2)
                lesson.tokens += (*centre, Size(x1 - x0, y1 - y0))
            _end(lesson, context, is_end=True)
    return lesson


def _prompt(
    skill: str, arguments: Mapping[str, Any], context: SkillContext, weight: float
) -> Lesson:
    suffix = _SKILLS.get(skill).build(arguments, {}, context).prompt_suffix
    tokens = [token for token in suffix if not isinstance(token, ImagePlace)]
    assert len(tokens) == len(suffix), "an example is about one image"
    return Lesson(tokens, weight)


def _say(lesson: Lesson, ids: list[int] | tuple[int, ...], context: SkillContext) -> None:
    """Appends a text and its end. The end is not fed back."""
    for token in ids:
        lesson.words.append(WordTarget(len(lesson.tokens) - 1, token))
        lesson.tokens.append(token)
    lesson.words.append(WordTarget(len(lesson.tokens) - 1, context.model.ids.eos_id))


def _end(lesson: Lesson, context: SkillContext, *, is_end: bool) -> None:
    is_first = not lesson.ends
    lesson.add_end(is_end=is_end, is_pair=not is_first and context.model.family != "moondream2")
